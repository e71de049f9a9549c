"""Shared by all tests: no network, one thread a process, shapes checked, and a tiny model made in code."""

from __future__ import annotations

import json
import os
from pathlib import Path

# Before torch, FAISS or tokenizers are imported: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from jaxtyping import install_import_hook

install_import_hook(["pipeline.model", "pipeline.encode", "pipeline.corpus.tokenization"], "beartype.beartype")

TINY_WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "stone",
    "path",
    "way",
    "mark",
    "##s",
    "##ing",
    "a",
    "river",
    "mountain",
    "walk",
    "##er",
    "old",
)
TINY_DIM, TINY_LAYERS, TINY_INNER, TINY_POSITIONS = 32, 2, 64, 96


def make_tiny_model(folder: Path, model_type: str = "bert", seed: int = 0) -> Path:
    """Write a random BERT or RoBERTa of two layers in the published layout: config.json, model.safetensors, tokenizer.json."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = _write_tiny_tokenizer(folder)
    generator = torch.Generator().manual_seed(seed)
    is_roberta = model_type != "bert"
    config = {
        "model_type": model_type,
        "hidden_size": TINY_DIM,
        "num_hidden_layers": TINY_LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": TINY_INNER,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": TINY_POSITIONS + (1 if is_roberta else 0),
        "vocab_size": vocab_size,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }
    (folder / "config.json").write_text(json.dumps(config))

    def linear(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
        weight = torch.randn(rows, columns, generator=generator) * 0.3
        return {f"{name}.weight": weight, f"{name}.bias": torch.randn(rows, generator=generator) * 0.1}

    def norm(name: str) -> dict[str, torch.Tensor]:
        weight = 1 + torch.randn(TINY_DIM, generator=generator) * 0.1
        return {f"{name}.weight": weight, f"{name}.bias": torch.randn(TINY_DIM, generator=generator) * 0.1}

    tensors = {
        "embeddings.word_embeddings.weight": torch.randn(vocab_size, TINY_DIM, generator=generator),
        "embeddings.position_embeddings.weight": torch.randn(config["max_position_embeddings"], TINY_DIM, generator=generator) * 0.3,
        "embeddings.token_type_embeddings.weight": torch.randn(2, TINY_DIM, generator=generator) * 0.3,
        **norm("embeddings.LayerNorm"),
    }
    for index in range(TINY_LAYERS):
        layer = f"encoder.layer.{index}"
        for name in ("query", "key", "value"):
            tensors |= linear(f"{layer}.attention.self.{name}", TINY_DIM, TINY_DIM)
        tensors |= linear(f"{layer}.attention.output.dense", TINY_DIM, TINY_DIM) | norm(f"{layer}.attention.output.LayerNorm")
        tensors |= linear(f"{layer}.intermediate.dense", TINY_INNER, TINY_DIM)
        tensors |= linear(f"{layer}.output.dense", TINY_DIM, TINY_INNER) | norm(f"{layer}.output.LayerNorm")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _write_tiny_tokenizer(folder: Path) -> int:
    """Write a WordPiece tokenizer that pads and truncates, as published ones do; return the size of its vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *TINY_WORDS,
        *letters,
        *(f"##{letter}" for letter in letters),
        *".,;:!?'-_()[]/",
    ]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(max_length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    return len(vocab)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random BERT of 2 layers, 32 dimensions and 96 positions."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-bert"))


@pytest.fixture(scope="session")
def tiny_roberta_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random RoBERTa, whose positions start after the padding id."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-roberta"), model_type="roberta", seed=1)
