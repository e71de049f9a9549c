from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError, FingerprintMismatchError
from cairn.pipeline.lab.train.pair_vectors import (
    FITTED_PAIRS,
    PairVectors,
    Teacher,
    fitted_positions,
    laid_onto,
)
from cairn.pipeline.lab.train.pairs import TrainingPairs, read_pairs
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.token_vectors.codes import unit
from cairn.pipeline.types import silent_progress

from tests.tiny_models import Size, make_tiny_model

WIDE = Size(width=48, heads=4, inner=64, positions=96, layers=1)


def vectors_of(num_pairs: int, width: int, rank: int, seed: int = 0) -> PairVectors:
    rng = np.random.default_rng(seed)
    axes = rng.normal(size=(rank, width))
    document_NV, query_NV = (
        unit((rng.normal(size=(num_pairs, rank)) @ axes).astype(np.float32)) for _ in range(2)
    )
    return PairVectors(document_NV=document_NV, query_NV=query_NV, fingerprint="teacher")


@pytest.mark.parametrize(("width", "rank"), [(8, 8), (5, 5), (24, 8)], ids=["equal", "narrower", "wider"])
def test_scores_of_a_teacher_stay_in_the_width_of_the_base(width: int, rank: int) -> None:
    taught, base = vectors_of(60, width, rank), vectors_of(60, 8, 8, seed=1)
    laid = laid_onto(taught, base)
    assert laid.document_NV.shape == laid.query_NV.shape == (60, 8)
    np.testing.assert_allclose(
        laid.query_NV @ laid.document_NV.T, taught.query_NV @ taught.document_NV.T, atol=1e-4
    )


def test_teacher_that_is_the_base_turned_is_turned_back() -> None:
    base = vectors_of(60, 8, 8)
    turn, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(8, 8)))
    turned = PairVectors(
        document_NV=(base.document_NV @ turn).astype(np.float32),
        query_NV=(base.query_NV @ turn).astype(np.float32),
        fingerprint="turned",
    )
    np.testing.assert_allclose(laid_onto(turned, base).query_NV, base.query_NV, atol=1e-4)


def test_axes_are_found_from_pairs_spread_over_all() -> None:
    positions = fitted_positions(3 * FITTED_PAIRS + 1)
    assert (positions[0], len(positions) <= FITTED_PAIRS, positions[-1] > 2.9 * FITTED_PAIRS) == (
        0,
        True,
        True,
    )
    assert fitted_positions(5).tolist() == [0, 1, 2, 3, 4]


def test_teacher_embeds_whole_texts_as_an_ingest_would(
    tmp_path: Path, make_pairs: Callable[..., TrainingPairs]
) -> None:
    make_tiny_model(tmp_path / "wide", size=WIDE)
    pairs = make_pairs(12)
    found = Teacher.named(str(tmp_path / "wide")).embed(pairs, silent_progress)
    encoder = DocumentEncoder(EncoderConfig(model=str(tmp_path / "wide"), landmark_interval=94))
    np.testing.assert_allclose(
        found.document_NV, encoder.encode(pairs.documents).document_vectors_NV, atol=2e-3
    )
    np.testing.assert_allclose(found.query_NV, encoder.encode_queries(pairs.queries), atol=2e-3)


def test_training_brings_texts_nearer_to_a_wider_teacher(run: Any, tmp_path: Path, pairs_file: Path) -> None:
    make_tiny_model(tmp_path / "wide", seed=5, size=WIDE)
    pairs = read_pairs([pairs_file])
    asked = {"steps": 30, "checkpoint_every": 30, "attention": "chunk", "pooling": "mean"}
    run("alone", **asked)
    run("taught", **asked, teacher=str(tmp_path / "wide"), distillation_weight=3.0)
    scores = Teacher.named(str(tmp_path / "wide")).embed(pairs, silent_progress)
    wanted = scores.query_NV @ scores.document_NV.T

    def agreement(name: str) -> float:
        encoder = DocumentEncoder(EncoderConfig(model=str(tmp_path / name / "model"), landmark_interval=60))
        queries, documents = encoder.encode_queries(pairs.queries), encoder.encode(pairs.documents)
        found = queries @ documents.document_vectors_NV.T
        return float(np.corrcoef(found.ravel(), wanted.ravel())[0, 1])

    assert agreement("taught") > agreement("alone") + 0.1


def test_run_goes_on_with_its_own_teacher_alone(run: Any, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "wide", size=WIDE)
    run(steps=2, teacher=str(tmp_path / "wide"))
    stored = tmp_path / "run" / "teacher.safetensors"
    before = stored.stat().st_mtime_ns
    assert run(steps=2, teacher=str(tmp_path / "wide")).resumed_at == 2
    assert stored.stat().st_mtime_ns == before
    make_tiny_model(tmp_path / "wide", seed=7, size=WIDE)
    with pytest.raises(FingerprintMismatchError, match="another teacher"):
        run(steps=2, teacher=str(tmp_path / "wide"))


def test_teacher_that_is_not_there_is_refused_by_its_name(run: Any) -> None:
    with pytest.raises(ConfigError, match=r"the teacher cannot be loaded: .*got 'org/none'"):
        run(steps=2, teacher="org/none")


def test_teacher_without_a_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match="distillation_weight must be above 0 with a teacher"):
        TrainConfig(steps=1, teacher="any", distillation_weight=0.0)
