"""The curve of length collapse from stored vectors, against its definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.stored_files import SIZES
from cairn.pipeline.serve.length_curve import mean_cosine, measure_lengths


def test_mean_cosine_is_the_mean_over_all_pairs() -> None:
    vectors = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    pairs = [float(unit[i] @ unit[j]) for i in range(9) for j in range(9) if i != j]
    assert mean_cosine(vectors) == pytest.approx(np.mean(pairs), abs=1e-6)


def test_lengths_hold_every_document_and_leave_out_what_few_say(
    served_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.pipeline.serve.length_curve.MIN_SAMPLE", 5)
    generation = open_generation(CollectionLayout(served_root, "stones"), checks=SIZES)
    bins = measure_lengths(generation, np.arange(20))
    assert sum(each.documents for each in bins) == 20
    for each in bins:
        inside = np.flatnonzero(
            (generation.num_tokens >= each.min_tokens) & (generation.num_tokens <= each.max_tokens)
        )
        assert len(inside) == each.documents
        if each.documents >= 5:
            assert each.cosine == pytest.approx(mean_cosine(generation.documents.reconstruct(inside)))
        else:
            assert each.cosine is None
    assert measure_lengths(generation, np.arange(0)) == []
