"""Training with full attention: a document a row, with a landmark after each chunk (LMK §4, algorithm 1)."""

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
from cairn.pipeline.lab.train import contrastive
from cairn.pipeline.lab.train.heldout import embed_texts, score_heldout
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.sequences import SequenceMaker, make_units, split_rows
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.lab.train.trainer import read_log
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.model_defaults import encoder_config

from tests.lab.train.families import FAMILIES, tiny_new

INTERVAL, WINDOW, PREFIX = 8, 40, "the old: "


def maker_of(folder: Path, pairs: TrainingPairs, **settings: Any) -> SequenceMaker:
    chosen = {"pooling": "lmk", "attention": "full", "window_tokens": WINDOW, "document_prefix": PREFIX}
    sizes = {"max_query_tokens": 16, "max_document_tokens": 1_000}
    return SequenceMaker(read_checkpoint(folder), pairs, **{**chosen, **sizes, **settings})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", ["lmk", "mean"])
def test_vectors_of_rows_are_those_that_an_ingest_gives(
    family: str,
    pooling: str,
    tiny_model_folder: Path,
    make_pairs: Callable[..., TrainingPairs],
    tmp_path: Path,
):
    checkpoint, pairs = tiny_new(family, tiny_model_folder), make_pairs(6)
    save_encoder_folder(tmp_path / "model", checkpoint, EncoderConfig())
    made = maker_of(tiny_model_folder, pairs, pooling=pooling)
    with torch.no_grad():
        rows, text_M = made.documents(range(6), INTERVAL)
        found = embed_texts(LandmarkEncoder(checkpoint), rows, text_M, 100, landmarks=False).numpy()
    config = EncoderConfig(
        model=str(tmp_path / "model"),
        attention="full",
        pooling=pooling,
        landmark_interval=INTERVAL,
        window_tokens=WINDOW,
        window_overlap_tokens=0,
        document_prefix=PREFIX,
        precision="fp32",
    )
    expected = DocumentEncoder(config).encode(pairs.documents).document_vectors_NV
    assert len(rows) > 6, "a document is longer than the window"
    assert np.abs(found - expected).max() <= 1e-5


def test_chunks_apart_are_the_rows_of_chunk_attention(
    tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs]
):
    pairs = make_pairs(6)
    full, full_text_M = maker_of(tiny_model_folder, pairs).documents(range(6), INTERVAL)
    chunks, text_B = maker_of(tiny_model_folder, pairs, attention="chunk").documents(range(6), INTERVAL)
    assert full_text_M.tolist() == text_B.tolist()
    assert len(full) < len(chunks)
    for name in ("ids_N", "lengths_B", "pooled_start_B", "pooled_end_B"):
        assert np.array_equal(getattr(full.alone, name), getattr(chunks.alone, name)), name


def test_micro_batches_of_rows_of_several_chunks_give_their_vectors_in_order(
    tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs]
):
    pairs = make_pairs(24)
    units = make_units(pairs, range(24), 3)
    batch = maker_of(tiny_model_folder, pairs).make(
        units, np.full(len(units), INTERVAL), np.ones(len(units), np.bool_)
    )
    parts = split_rows(batch.rows, 60)
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder))
    with torch.no_grad():
        whole, apart = model(batch.rows), torch.cat([model(part) for part in parts])
    assert len(parts) > 2
    assert len(whole) == len(batch.text_B) > len(batch.rows)
    torch.testing.assert_close(apart, whole, atol=1e-5, rtol=1e-5)


def test_train_full_attention_learns_and_the_folder_is_served_so(run: Any, tmp_path: Path):
    run(steps=30, attention="full")
    records = read_log(tmp_path / "run" / "log.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    served = encoder_config({"model": str(tmp_path / "run" / "model")})
    assert (served.attention, served.pooling, served.use_context) == ("full", "lmk", False)


@pytest.mark.parametrize("attention", ["chunk", "landmark", "full"])
def test_held_out_pairs_are_scored_as_the_model_is_served(
    run: Any, monkeypatch: pytest.MonkeyPatch, attention: str
):
    seen: list[bool] = []

    def score(*positional: Any, landmarks: bool, **named: Any) -> dict[str, float]:
        seen.append(landmarks)
        return score_heldout(*positional, landmarks=landmarks, **named)

    monkeypatch.setattr(contrastive, "score_heldout", score)
    run(steps=2, attention=attention)
    assert set(seen) == {attention == "landmark"}


def test_token_vectors_are_not_trained_along_with_full_attention():
    with pytest.raises(ConfigError, match="late_weight must go with attention chunk or landmark, got full"):
        TrainConfig(steps=1, attention="full", late_weight=1.0)
