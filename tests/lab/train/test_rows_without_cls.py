"""Training decoders whose tokenizer opens a text with nothing, as Qwen's: rows begin with prefix or text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.train.heldout import embed_texts
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.loop import train
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.sequences import SequenceMaker
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint
from cairn.pipeline.model.landmark_reader import INITIAL_GATE

from tests.lab.train.conftest import LOOP_SETTINGS

PREFIX = "the old: "


def maker_of(checkpoint: Checkpoint, pairs: TrainingPairs, **settings: object) -> SequenceMaker:
    sizes = {"max_query_tokens": 16, "max_document_tokens": 1_000, "window_tokens": 96}
    return SequenceMaker(checkpoint, pairs, **{**sizes, "pooling": "lmk", **settings})


@pytest.mark.parametrize("attention", ["chunk", "landmark", "full"])
@pytest.mark.parametrize("pooling", ["mean", "lmk"])
@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_vectors_of_rows_are_those_that_an_ingest_gives(
    decoder: Path, make_pairs: Callable[..., TrainingPairs], attention: str, pooling: str, prefix: str
):
    checkpoint, pairs = read_checkpoint(decoder), make_pairs(6)
    assert checkpoint.cls_id is None
    made = maker_of(checkpoint, pairs, pooling=pooling, attention=attention, document_prefix=prefix)
    model = LandmarkEncoder(checkpoint, initial_gate=INITIAL_GATE)
    with torch.no_grad():
        rows, text_M = made.documents(range(6), 8)
        found = embed_texts(model, rows, text_M, 100, landmarks=attention == "landmark").numpy()
    config = EncoderConfig(
        model=str(decoder),
        attention=attention,
        pooling=pooling,
        landmark_interval=8,
        window_tokens=96 if attention == "full" else 0,
        window_overlap_tokens=0,
        document_prefix=prefix,
        precision="fp32",
    )
    expected = DocumentEncoder(config).encode(pairs.documents).document_vectors_NV
    assert np.abs(found - expected).max() <= 1e-5
    if attention != "full":
        assert (rows.own_lengths == rows.lengths_B - 1 - made.prefix_tokens).all()


def test_context_documents_are_read_as_by_an_ingest(decoder: Path, make_pairs: Callable[..., TrainingPairs]):
    checkpoint, pairs = read_checkpoint(decoder), make_pairs(6)
    with torch.no_grad():
        found = LandmarkEncoder(checkpoint).embed_documents(maker_of(checkpoint, pairs).context(range(6), 12))
    config = EncoderConfig(model=str(decoder), precision="fp32")
    first_stage = ContextEncoder.of(load_backbone(config), config, ContextConfig(max_document_tokens=12))
    assert np.abs(found.numpy() - first_stage.embed(pairs.documents)).max() <= 1e-5


def test_decoder_is_trained_and_served(decoder: Path, pairs_file: Path, tmp_path: Path):
    config = TrainConfig(**{**LOOP_SETTINGS, "steps": 3})
    report = train([pairs_file], tmp_path / "run", config, base=str(decoder))
    assert report.last_loss is not None
    served = DocumentEncoder(EncoderConfig(model=str(tmp_path / "run" / "model"), precision="fp32"))
    assert np.isfinite(served.encode(["cat mat"]).document_vectors_NV).all()
