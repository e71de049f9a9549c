"""Shared by the tests of encoding: a tiny model, its settings, contexts for it, and a tiny cross-encoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import EncoderConfig
from pipeline.context.store import ContextSet
from pipeline.model.backbone_loader import load_backbone
from pipeline.model.engine.backbone import Backbone
from tests.tiny_models import TINY, TINY_LAYERS


@pytest.fixture(scope="session")
def config(tiny_latent_folder: Path) -> EncoderConfig:
    """Return settings of a model that supports every pooling, with windows that overlap in short texts."""
    return EncoderConfig(
        model=str(tiny_latent_folder),
        precision="fp32",
        landmark_interval=12,
        window_tokens=40,
        window_overlap_tokens=15,
        batch_tokens=100,
    )


@pytest.fixture(scope="session")
def backbone(config: EncoderConfig) -> Backbone:
    """Return the model of those settings."""
    return load_backbone(config)


@pytest.fixture(scope="session")
def make_context() -> Callable[..., ContextSet]:
    """Return a maker of random contexts."""
    return _context


def _context(num_documents: int = 5, seed: int = 0) -> ContextSet:
    embeddings = np.random.default_rng(seed).normal(size=(num_documents, 32)).astype(np.float32)
    return ContextSet(
        doc_ids=tuple(f"c{index}" for index in range(num_documents)),
        content_sha256s=("0" * 64,) * num_documents,
        cluster_ids_C=np.zeros(num_documents, np.int32),
        embeddings_CD=embeddings,
        first_stage_fingerprint="first",
    )


@pytest.fixture(scope="session")
def tiny_cross_encoder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """Return the folder of a random cross-encoder of one score, as Sentence-Transformers reads it."""
    import torch
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-cross-encoder")
    tokenizer = Tokenizer.from_file(str(tiny_model_folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
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
