"""The best documents by sparse weights, against every passage scored by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.index.segments.words import sparse_term
from cairn.pipeline.search import reader
from cairn.pipeline.search.reader import sparse_documents
from cairn.pipeline.types import SPARSE_STEP

NUM_TOKENS = 12
QUERY = {token: 0.5 + token / 7 for token in (0, 2, 3, 7, 11, 40)}


class Words:
    """Postings of a dense table of steps, chunk by token."""

    def __init__(self, steps_MX: np.ndarray) -> None:
        self._steps_MX = steps_MX

    def postings(self, term: str) -> tuple[np.ndarray, np.ndarray]:
        tokens = [token for token in range(NUM_TOKENS) if sparse_term(token) == term]
        steps_M = self._steps_MX[:, tokens[0]] if tokens else np.zeros(0, np.uint8)
        return np.flatnonzero(steps_M), steps_M[steps_M > 0]


@pytest.fixture
def generation() -> Any:
    generator = np.random.default_rng(4)
    counts_N = generator.integers(1, 30, size=40)
    steps_MX = generator.integers(1, 256, size=(counts_N.sum(), NUM_TOKENS)).astype(np.uint8)
    steps_MX[generator.random(steps_MX.shape) < 0.9] = 0
    return SimpleNamespace(
        chunk_offsets=np.append(0, np.cumsum(counts_N)),
        chunk_documents=np.repeat(np.arange(len(counts_N)), counts_N),
        sparse_words=Words(steps_MX),
        steps_MX=steps_MX,
    )


def by_every_passage(generation: Any, size: int) -> np.ndarray:
    asked = [token for token in QUERY if token < NUM_TOKENS]
    weights = np.array([QUERY[token] for token in asked]) * SPARSE_STEP
    return np.array(
        [
            max(
                generation.steps_MX[at : min(at + size, end), asked].max(0) @ weights
                for at in range(first, end)
            )
            for first, end in zip(generation.chunk_offsets, generation.chunk_offsets[1:], strict=False)
        ]
    )


@pytest.mark.parametrize("block", [20, 100_000])
@pytest.mark.parametrize("limit", [1, 6, 100])
@pytest.mark.parametrize("size", [1, 3, 16, 50])
def test_best_documents_are_those_of_every_passage(
    generation: Any, monkeypatch: pytest.MonkeyPatch, size: int, limit: int, block: int
) -> None:
    monkeypatch.setattr(reader, "BLOCK_POSTINGS", block)
    monkeypatch.setattr(reader, "BLOCK_CHUNKS", block)
    expected = by_every_passage(generation, size)
    for allowed in (None, np.arange(0, 40, 3)):
        documents, scores = sparse_documents(generation, QUERY, size, allowed, limit)

        chosen = np.arange(40) if allowed is None else allowed
        ranked = sorted(chosen[expected[chosen] > 0].tolist(), key=lambda place: (-expected[place], place))
        assert documents.tolist() == ranked[:limit]
        assert scores == pytest.approx(expected[documents], rel=1e-6)


def test_tokens_that_stand_nowhere_find_nothing(generation: Any) -> None:
    documents, scores = sparse_documents(generation, {40: 1.0}, 3, None, 5)

    assert not len(documents)
    assert not len(scores)
