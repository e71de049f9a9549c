"""Random BERTs, RoBERTas and a cross-encoder in their published layout, tiny by default, for many folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.context.store import ContextSet

TINY_WORDS = (
    "the", "cat", "sat", "on", "mat", "stone", "path", "way", "mark", "##s", "##ing", "a", "river",
    "mountain", "walk", "##er", "old",
)  # fmt: skip
TINY_LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a random model: tiny unless told otherwise; ``layers`` = None leaves their number to the family."""

    width: int = 32
    heads: int = 4
    inner: int = 64
    positions: int = 96
    layers: int | None = None
    window: int = 8


TINY = Size()


def make_tiny_model(folder: Path, model_type: str = "bert", seed: int = 0, size: Size = TINY) -> Path:
    """Write a random BERT or RoBERTa in the published layout.

    Config.json, model.safetensors, tokenizer.json; of two layers if tiny.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = _write_tiny_tokenizer(folder)
    generator = torch.Generator().manual_seed(seed)
    num_positions = size.positions + {"bert": 0, "roberta": 1}[model_type]
    num_layers = size.layers or TINY_LAYERS
    config = {
        "model_type": model_type,
        "hidden_size": size.width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.inner,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": num_positions,
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
        weight = 1 + torch.randn(size.width, generator=generator) * 0.1
        return {f"{name}.weight": weight, f"{name}.bias": torch.randn(size.width, generator=generator) * 0.1}

    tensors = {
        "embeddings.word_embeddings.weight": torch.randn(vocab_size, size.width, generator=generator),
        "embeddings.position_embeddings.weight": torch.randn(num_positions, size.width, generator=generator)
        * 0.3,
        "embeddings.token_type_embeddings.weight": torch.randn(2, size.width, generator=generator) * 0.3,
        **norm("embeddings.LayerNorm"),
    }
    for index in range(num_layers):
        layer = f"encoder.layer.{index}"
        for name in ("query", "key", "value"):
            tensors |= linear(f"{layer}.attention.self.{name}", size.width, size.width)
        tensors |= linear(f"{layer}.attention.output.dense", size.width, size.width) | norm(
            f"{layer}.attention.output.LayerNorm"
        )
        tensors |= linear(f"{layer}.intermediate.dense", size.inner, size.width)
        tensors |= linear(f"{layer}.output.dense", size.width, size.inner) | norm(f"{layer}.output.LayerNorm")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _write_tiny_tokenizer(folder: Path) -> int:
    """Write a WordPiece tokenizer that pads and truncates, as published ones do.

    Return the size of its vocabulary.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*special, *TINY_WORDS, *letters, *(f"##{letter}" for letter in letters), *".,;:!?'-_()[]/"]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.add_special_tokens(special)
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(max_length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    return len(vocab)


def make_latent_block(
    width: int, heads: int, head_dim: int, *, latents: int = 5, inner: int = 20, seed: int = 0
) -> dict[str, Any]:
    """Return the tensors of a random latent attention block in the names NV-Embed-v2 publishes."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.4

    attention, mlp = (f"latent_attention_model.cross_attend_blocks.{index}" for index in range(2))
    norms = (f"{attention}.norm", f"{attention}.norm_context", f"{mlp}.norm")
    return {
        "latent_attention_model.latents": randn(latents, width),
        **{f"{name}.weight": 1 + randn(width) for name in norms},
        **{f"{name}.bias": randn(width) for name in norms},
        f"{attention}.fn.to_q.weight": randn(heads * head_dim, width),
        f"{attention}.fn.to_kv.weight": randn(2 * heads * head_dim, width),
        f"{attention}.fn.to_out.weight": randn(width, heads * head_dim),
        f"{mlp}.fn.net.0.weight": randn(2 * inner, width),
        f"{mlp}.fn.net.0.bias": randn(2 * inner),
        f"{mlp}.fn.net.2.weight": randn(width, inner),
        f"{mlp}.fn.net.2.bias": randn(width),
    }


@pytest.fixture(scope="session")
def latent_block() -> Callable[..., dict[str, Any]]:
    """Return :func:`make_latent_block`."""
    return make_latent_block


@pytest.fixture(scope="session")
def tiny_latent_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny BERT's folder with a latent attention block beside its weights."""
    from safetensors.torch import save_file

    folder = shutil.copytree(tiny_model_folder, tmp_path_factory.mktemp("tiny-latent") / "model")
    save_file(make_latent_block(TINY.width, 8, 6), folder / "cairn_extra.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random BERT of 2 layers, 32 dimensions and 96 positions."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-bert"))


@pytest.fixture(scope="session")
def tiny_roberta_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random RoBERTa, whose positions start after the padding id."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-roberta"), model_type="roberta", seed=1)


@pytest.fixture(scope="session")
def model_size() -> type[Size]:
    """Return the class of sizes a writer of models takes."""
    return Size


@pytest.fixture(scope="session")
def make_bert(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Size], Path]:
    """Return a writer of random BERTs of a size."""
    return lambda size: make_tiny_model(tmp_path_factory.mktemp("bert") / "model", size=size)


def context_of(embeddings_CD: np.ndarray) -> ContextSet:
    """Return a context of such embeddings, of documents that are nowhere."""
    ids = tuple(f"c{index}" for index in range(len(embeddings_CD)))
    return ContextSet(
        doc_ids=ids,
        content_sha256s=ids,
        cluster_ids_C=np.zeros(len(ids), np.int32),
        embeddings_CD=embeddings_CD.astype(np.float32),
        first_stage_fingerprint="first",
    )


def plain_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model's folder without padding and truncation."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer(tiny_model_folder: Path) -> Any:
    return plain_tokenizer(tiny_model_folder)


@pytest.fixture(scope="session")
def tiny_cross_encoder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """Return the folder of a random cross-encoder of one score, as Sentence-Transformers reads it."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-cross-encoder")
    tokenizer = plain_tokenizer(tiny_model_folder)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": TINY.width,
        "num_hidden_layers": TINY_LAYERS,
        "num_attention_heads": TINY.heads,
        "intermediate_size": TINY.inner,
        "max_position_embeddings": TINY.positions,
        "num_labels": 1,
        "initializer_range": 0.5,
    }
    BertForSequenceClassification(BertConfig(**settings)).save_pretrained(folder)
    return folder
