"""Training [CLS] pooling, the LMK paper's baseline (§3.1): a row's [CLS] is its chunk's vector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.heldout import embed_texts
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.log import read_log
from cairn.pipeline.lab.train.loop import train
from cairn.pipeline.lab.train.pair_task import served_interval
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.sequences import SequenceMaker
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.landmark_reader import INITIAL_GATE

from tests.lab.train.conftest import LOOP_SETTINGS
from tests.lab.train.families import FAMILIES, tiny_new

PREFIX = "the old: "


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["chunk", "landmark"])
@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_vectors_of_rows_are_those_that_an_ingest_gives(
    family: str,
    attention: str,
    prefix: str,
    tiny_model_folder: Path,
    make_pairs: Callable[..., TrainingPairs],
    tmp_path: Path,
):
    checkpoint, pairs = tiny_new(family, tiny_model_folder), make_pairs(6)
    save_encoder_folder(tmp_path / "model", checkpoint, EncoderConfig())
    made = SequenceMaker(
        checkpoint,
        pairs,
        pooling="cls",
        attention=attention,
        max_query_tokens=16,
        max_document_tokens=1_000,
        document_prefix=prefix,
    )
    model = LandmarkEncoder(checkpoint, initial_gate=INITIAL_GATE)
    with torch.no_grad():
        rows, text_M = made.documents(range(6), 8)
        found = embed_texts(model, rows, text_M, 100, landmarks=attention == "landmark").numpy()
    config = EncoderConfig(
        model=str(tmp_path / "model"),
        attention=attention,
        pooling="cls",
        landmark_interval=8,
        document_prefix=prefix,
        precision="fp32",
    )
    expected = DocumentEncoder(config).encode(pairs.documents).document_vectors_NV
    assert len(rows) > 6
    assert np.abs(found - expected).max() <= 1e-5
    assert rows.alone.pooled_start_B.tolist() == [(1 + made.prefix_tokens) if prefix else 0] * len(rows)


def test_train_cls_learns_and_the_folder_is_served_so(run: Any, tmp_path: Path):
    run(steps=30, pooling="cls", attention="chunk", landmark_intervals=(40,))
    losses = [r["loss"] for r in read_log(tmp_path / "run" / "log.jsonl") if "loss" in r]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    served = encoder_config({"model": str(tmp_path / "run" / "model")})
    assert (served.attention, served.pooling, served.landmark_interval) == ("chunk", "cls", 40)
    assert np.isfinite(DocumentEncoder(served).encode(["cat mat"]).document_vectors_NV).all()
    with pytest.raises(ConfigError, match="pooling cls must go with attention chunk or landmark, got full"):
        encoder_config({"model": str(tmp_path / "run" / "model"), "attention": "full"})


def test_train_refuses_cls_where_rows_hold_several_chunks():
    with pytest.raises(ConfigError, match="pooling cls must go with attention chunk or landmark, got full"):
        TrainConfig(steps=1, pooling="cls", attention="full")


def test_train_refuses_cls_for_a_base_without(decoder: Path, pairs_file: Path, tmp_path: Path):
    config = TrainConfig(**{**LOOP_SETTINGS, "pooling": "cls"})
    with pytest.raises(ConfigError, match=r"pooling cls must go with a base model that has \[CLS\] or BOS"):
        train([pairs_file], tmp_path / "run", config, base=str(decoder))


@pytest.mark.parametrize(
    ("intervals", "longest", "expected"),
    [((32, 64, 128, 256), 510, 64), ((16, 32), 510, 32), ((128, 256), 510, 128), ((512,), 510, 510)],
)
def test_served_interval_is_that_of_an_ingest_or_the_nearest_trained(
    intervals: tuple[int, ...], longest: int, expected: int
):
    assert served_interval(intervals, longest) == expected


@pytest.mark.parametrize("intervals", [(), (4, 64)])
def test_train_refuses_intervals_that_no_ingest_takes(intervals: tuple[int, ...]):
    with pytest.raises(ConfigError, match="landmark_intervals must be at least 8, got"):
        TrainConfig(steps=1, landmark_intervals=intervals)
