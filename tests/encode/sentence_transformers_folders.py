"""Sentence-Transformers folders of a tiny model with the modules that a test asks for."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def published(folder):
    """Return a folder's model as that library reads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def write_modules(folder, *modules):
    """List modules, each its folder and its kind, of Sentence-Transformers' own where it names no package."""
    listed = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": kind if "." in kind else f"sentence_transformers.models.{kind}",
        }
        for index, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


def write_dense(
    folder, rows, columns, *, bias=True, activation="torch.nn.modules.activation.Tanh", seed=0, **settings
):
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {"linear.weight": torch.randn(rows, columns, generator=generator) * 0.3}
    if bias:
        tensors["linear.bias"] = torch.randn(rows, generator=generator)
    if settings.get("use_residual") and rows != columns:
        tensors["residual.weight"] = torch.randn(rows, columns, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "in_features": columns,
        "out_features": rows,
        "bias": bias,
        "activation_function": activation,
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_layer_norm(folder, width):
    folder.mkdir()
    generator = torch.Generator().manual_seed(4)
    tensors = {
        "norm.weight": 1 + torch.randn(width, generator=generator) * 0.2,
        "norm.bias": torch.randn(width, generator=generator),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"dimension": width}))


@pytest.fixture
def make_folder(tiny_model_folder, tmp_path):
    """Return a writer of Sentence-Transformers folders around the tiny BERT.

    Its pooling, its further modules, its settings.
    """

    def make(pooling=MEAN, modules=(), settings=None, transformer="", transformer_settings=None):
        outer = tmp_path / "model"
        inner = outer / transformer
        shutil.copytree(tiny_model_folder, inner)
        tokenizer = Tokenizer.from_file(str(inner / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        tokenizer.no_truncation()
        tokenizer.save(str(inner / "tokenizer.json"))
        names = {
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "mask_token": "[MASK]",
        }
        (inner / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
        )
        (inner / "sentence_bert_config.json").write_text(
            json.dumps({"max_seq_length": 90, **(transformer_settings or {})})
        )
        (outer / "1_Pooling").mkdir()
        (outer / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": 32, **pooling})
        )
        write_modules(outer, (transformer, "Transformer"), ("1_Pooling", "Pooling"), *modules)
        if settings is not None:
            (outer / "config_sentence_transformers.json").write_text(json.dumps(settings))
        return outer

    return make
