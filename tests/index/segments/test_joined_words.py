"""The postings of several files, without their deleted chunks, by definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.index.passage_terms import write_passage_terms
from cairn.pipeline.index.segments.joined import SAMPLED_TERMS, JoinedWords
from cairn.pipeline.index.segments.segment import DeletedRows

TERMS = [f"w{number}" for number in range(5 * SAMPLED_TERMS)] + ["straße", "中文"]
COUNTS = (60, 1, 9)


def chunks_of(count: int, seed: int) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    return [["often", *rng.choice(TERMS[seed:], rng.integers(0, 40))] for _ in range(count)]


def file_of(chunks: Sequence[Sequence[str]], path: Path) -> pa.RecordBatch:
    texts = [" ".join(words) for words in chunks]
    lengths = np.array([len(text) for text in texts])
    return write_passage_terms([texts], np.arange(len(texts) + 1), np.zeros_like(lengths), lengths, path)


@pytest.mark.parametrize("deleted_share", [0.0, 0.1, 0.9])
def test_postings_of_files_are_those_of_the_chunks_that_are_left(
    tmp_path: Path, deleted_share: float
) -> None:
    rng = np.random.default_rng(int(10 * deleted_share))
    left: list[list[str]] = []
    parts: list[tuple[pa.RecordBatch, DeletedRows]] = []
    for seed, count in enumerate(COUNTS):
        chunks, is_deleted = chunks_of(count, seed), rng.random(count) < deleted_share
        left += [words for words, is_gone in zip(chunks, is_deleted, strict=True) if not is_gone]
        terms = file_of(chunks, tmp_path / f"{seed}.arrow")
        parts.append((terms, DeletedRows(count, np.flatnonzero(is_deleted))))
    joined = JoinedWords(parts)
    wanted = ["often", *parts[0][0].column("term").to_pylist(), "", "a", "w", "w000", "w10x", "zz"]
    for term in wanted * 2:
        counts = np.array([words.count(term) for words in left], np.int64)
        found, times = joined.postings(term)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, np.flatnonzero(counts))
        np.testing.assert_array_equal(times, counts[counts > 0])
