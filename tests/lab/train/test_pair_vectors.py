"""A cross-encoder's scores of each query's candidates (LMK), made once and followed by a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig, Surrogate
from cairn.pipeline.encode.cross_encoder import CrossEncoderReranker
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError, SourceError
from cairn.pipeline.lab.train.pair_vectors import (
    FITTED_PAIRS,
    NONE_FOUND,
    PairVectors,
    Teacher,
    candidate_scores,
    embed_pairs,
    fitted_positions,
    kept_vectors,
    laid_onto,
    mine_hard_negatives,
    pairs_fingerprint,
)
from cairn.pipeline.lab.train.pairs import TrainingPairs, read_pairs
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.token_vectors.codes import unit
from cairn.pipeline.types import silent_progress

from tests.tiny_models import Size, make_tiny_model

N, V = 41, 6


def world() -> tuple[np.ndarray, np.ndarray, list[str], list[str]]:
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((2, N, V)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    documents = [f"text {place % 35}" for place in range(N)]
    for place in range(35, N):
        vectors[1, place] = vectors[1, place - 35]
    return vectors[0], vectors[1], documents, [f"s{place % 3}" for place in range(N)]


NO_PAIRS = np.zeros(0, np.int64)


@pytest.mark.parametrize("num_negatives", [1, 4, 30])
@pytest.mark.parametrize("margin", [0.0, 0.02, 0.4])
def test_mine_hard_negatives_equals_the_rule_written_out(num_negatives: int, margin: float):
    query, document, texts, sources = world()
    left_out = np.array([3, 8])
    mined = mine_hard_negatives(
        query,
        document,
        texts,
        sources,
        num_negatives=num_negatives,
        max_share=0.95,
        left_out=left_out,
        margin=margin,
    )
    for pair in range(N):
        positive = float(query[pair] @ document[pair])
        limit = min(positive - 0.05 * abs(positive), positive - margin)
        seen: dict[str, int] = {}
        for other in range(N):
            if sources[other] == sources[pair] and other not in left_out and texts[other] != texts[pair]:
                seen.setdefault(texts[other], other)
        allowed = [other for other in seen.values() if float(query[pair] @ document[other]) < limit]
        expected = sorted(allowed, key=lambda other: -float(query[pair] @ document[other]))[:num_negatives]
        assert mined[pair].tolist() == expected + [NONE_FOUND] * (num_negatives - len(expected))


def test_mine_hard_negatives_a_pair_alone_in_its_source_has_none():
    query, document, texts, _ = world()
    mined = mine_hard_negatives(
        query,
        document,
        texts,
        [str(place) for place in range(N)],
        num_negatives=2,
        max_share=0.95,
        left_out=NO_PAIRS,
    )
    assert (mined == NONE_FOUND).all()


CPU = torch.device("cpu")


@pytest.mark.parametrize("surrogate", ["static", "encoder"])
def test_embed_pairs_gives_unit_vectors_and_equal_texts_equal_ones(
    tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs], surrogate: Surrogate
):
    pairs = make_pairs(40)
    pairs = replace(pairs, documents=(pairs.documents[1], *pairs.documents[1:]))
    backbone = load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"), CPU)
    vectors = embed_pairs(pairs, backbone, surrogate, silent_progress)
    assert vectors.document_NV.shape == vectors.query_NV.shape == (40, vectors.document_NV.shape[1])
    assert np.allclose(np.linalg.norm(vectors.query_NV, axis=1), 1.0, atol=1e-5)
    assert np.array_equal(vectors.document_NV[0], vectors.document_NV[1])
    assert not np.array_equal(vectors.document_NV[0], vectors.document_NV[2])


def test_kept_vectors_are_made_once_for_a_key(
    tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs], tmp_path: Path
):
    backbone = load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"), CPU)
    calls: list[int] = []

    def listen(stage: str, done: int, total: int | None, unit: str) -> None:
        calls.append(done)

    def embed() -> PairVectors:
        return embed_pairs(make_pairs(20), backbone, "static", listen)

    first, again = (kept_vectors(tmp_path / "v.safetensors", "key", embed) for _ in range(2))
    assert np.array_equal(first.document_NV, again.document_NV)
    assert len(calls) == 1
    kept_vectors(tmp_path / "v.safetensors", "another key", embed)
    assert len(calls) == 2


def test_pairs_fingerprint_knows_texts_order_and_where_a_column_ends(
    make_pairs: Callable[..., TrainingPairs],
):
    pairs = make_pairs(6)
    others = [
        replace(pairs, queries=("x", *pairs.queries[1:])),
        replace(pairs, titles=tuple(reversed(pairs.titles))),
        replace(
            pairs,
            queries=(pairs.queries[0] + "a", *pairs.queries[1:]),
            documents=(pairs.documents[0][1:], *pairs.documents[1:]),
        ),
    ]
    assert len({pairs_fingerprint(some) for some in (pairs, *others)}) == 4
    assert pairs_fingerprint(pairs) == pairs_fingerprint(make_pairs(6))


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


def test_teacher_that_is_not_there_is_refused_by_its_name(run: Any) -> None:
    with pytest.raises(ConfigError, match=r"the teacher cannot be loaded: .*got 'org/none'"):
        run(steps=2, teacher="org/none")


def test_teacher_without_a_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match="distillation_weight must be above 0 with a teacher"):
        TrainConfig(steps=1, teacher="any", distillation_weight=0.0)


pytest.importorskip("sentence_transformers")


QUERIES = ["the cat", "a river", "old way"]


TEXTS = ["a cat sat on the mat", "the river by a mountain", "walk on the path", "a mark"]


OWN = np.array([[3, 1], [2, -1], [-1, -1]])


@pytest.fixture
def teacher(tiny_cross_encoder: Path) -> CrossEncoderReranker:
    return CrossEncoderReranker(str(tiny_cross_encoder))


def scored(path: Path, teacher: Any, own: np.ndarray = OWN) -> np.ndarray:
    return candidate_scores(path, teacher, QUERIES, TEXTS, own, np.array([1]), silent_progress)


def test_scores_are_the_logits_of_each_query_with_its_candidates(teacher: Any, tmp_path: Path):
    found = scored(tmp_path / "s.safetensors", teacher)
    np.testing.assert_allclose(
        found[0], [teacher.logits("the cat", [TEXTS[place]])[0] for place in (0, 3, 1)], rtol=1e-4
    )
    assert np.isnan(found[1]).all()  # left out
    assert np.isfinite(found[2, 0])
    assert np.isnan(found[2, 1:]).all()


def test_scores_are_made_once_for_the_same_candidates(
    teacher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "s.safetensors"
    first = scored(path, teacher)
    asked: list[str] = []
    whole = teacher.logits
    monkeypatch.setattr(teacher, "logits", lambda query, texts: asked.append(query) or whole(query, texts))
    np.testing.assert_array_equal(scored(path, teacher), first)
    assert asked == []
    scored(path, teacher, np.array([[3, 2], [2, -1], [-1, -1]]))
    assert asked == ["the cat", "old way"]
    path.write_bytes(path.read_bytes()[:40])
    np.testing.assert_array_equal(scored(path, teacher), first)  # a damaged file is made again


def test_run_follows_the_scores_of_a_cross_encoder(run: Any, tiny_cross_encoder: Path, tmp_path: Path):
    settings = {"steps": 3, "hard_negatives": 2, "score_teacher": str(tiny_cross_encoder)}
    run("alone", steps=3, hard_negatives=2)
    run("taught", **settings, score_weight=2.0)
    logs = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("alone", "taught")
    ]
    losses = [[line["loss"] for line in log if "loss" in line] for log in logs]
    assert len(losses[0]) == 3
    assert losses[1][0] > losses[0][0]  # the same batch, and a divergence is never below 0
    assert (tmp_path / "taught" / "scores.safetensors").is_file()
    with pytest.raises(SourceError, match="pairs must have negatives that score_teacher ranks"):
        run("without", steps=1, score_teacher=str(tiny_cross_encoder))
