"""A cross-encoder's scores of each query's candidates (LMK), made once and followed by a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.encode.cross_encoder import CrossEncoderReranker
from cairn.pipeline.errors import IntegrityError, SourceError
from cairn.pipeline.lab.train.pair_vectors import candidate_scores
from cairn.pipeline.types import silent_progress

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
    with pytest.raises(IntegrityError, match="must be a whole safetensors file"):
        scored(path, teacher)


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
