"""Indexes and postings of several files, read as one, by definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.index.segments.segment import SAMPLED_TERMS, DeletedRows, JoinedIndex, JoinedWords
from cairn.pipeline.index.segments.words import write_passage_terms
from cairn.pipeline.index.segments.writer import read_codebook
from cairn.pipeline.vector_index.faiss_build import build_faiss_index, write_coded, write_flat
from cairn.pipeline.vector_index.faiss_index import FaissIndex, open_faiss_index

SIZES = (900, 300, 40, 300)
QUERIES = np.random.default_rng(1).standard_normal((5, 16)).astype(np.float32)


def parts_of(folder: Path, kind: Any, deleted_share: float) -> list[tuple[FaissIndex, DeletedRows]]:
    """Write an index of each size with the codebook of the first, a small one without."""
    rng = np.random.default_rng(0)
    vectors = [rng.standard_normal((size, 16)).astype(np.float32) for size in SIZES]
    trained = folder / "trained.faiss"
    config = IndexConfig(index_kind=kind)
    description = build_faiss_index(lambda: iter([vectors[0]]), SIZES[0], 16, config, trained)
    codebook = read_codebook(trained, description)
    assert codebook is not None
    parts: list[tuple[FaissIndex, DeletedRows]] = []
    for number, own in enumerate(vectors):
        path = folder / f"{number}.faiss"
        if len(own) < 100:
            description = write_flat(iter([own]), len(own), 16, path, "few")
        else:
            description = write_coded(codebook, lambda own=own: iter([own]), len(own), path)
        rows = np.flatnonzero(rng.random(len(own)) < deleted_share)
        parts.append((open_faiss_index(path, description, rows), DeletedRows(len(own), rows)))
    return parts


def one_by_one(parts: Sequence[tuple[FaissIndex, DeletedRows]], top_k: int) -> list[list[tuple[float, int]]]:
    """Search each index by itself and merge what they find."""
    found: list[list[tuple[float, int]]] = [[] for _ in QUERIES]
    begin = 0
    for index, deleted in parts:
        scores, positions = index.search(QUERIES, top_k)
        for row, own_scores, own in zip(found, scores, positions, strict=True):
            is_found = own >= 0
            live = deleted.live_of(own[is_found]) + begin
            row += zip(own_scores[is_found].tolist(), live.tolist(), strict=True)
        begin += deleted.num_live
    return [sorted(row, key=lambda each: (-each[0], each[1]))[:top_k] for row in found]


@pytest.mark.parametrize("deleted_share", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["ivf_sq8", "ivf_rabitq"])
def test_joined_search_finds_what_searches_of_each_find(
    tmp_path: Path, kind: str, deleted_share: float
) -> None:
    parts = parts_of(tmp_path, kind, deleted_share)
    assert parts[1][0].nprobe > parts[0][0].nprobe, "other vectors are looked for in more lists"
    scores, positions = JoinedIndex(parts).search(QUERIES, 20)
    expected = one_by_one(parts, 20)
    assert [
        list(zip(*row, strict=True)) for row in zip(scores.tolist(), positions.tolist(), strict=True)
    ] == expected


def test_joined_search_pads_where_fewer_are_left(tmp_path: Path) -> None:
    (index, _), *_ = parts_of(tmp_path, "ivf_sq8", 0.0)
    flat = parts_of(tmp_path, "ivf_sq8", 0.0)[2]
    joined = JoinedIndex([flat, (index, DeletedRows(SIZES[0], np.arange(SIZES[0])))])
    scores, positions = joined.search(QUERIES, 60)
    assert np.all(np.sort(positions[:, :40], axis=1) == np.arange(40))
    assert np.all(positions[:, 40:] == -1)
    assert np.all(scores[:, 40:] == -np.inf)


TERMS = [f"w{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(5 * SAMPLED_TERMS)] + ["жизнь", "日"]
COUNTS = (60, 1, 9)


def chunks_of(count: int, seed: int) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    return [["often", *rng.choice(TERMS[seed:], rng.integers(0, 40))] for _ in range(count)]


def file_of(chunks: Sequence[Sequence[str]], path: Path) -> pa.RecordBatch:
    texts = [" ".join(words) for words in chunks]
    lengths = np.array([len(text) for text in texts])
    return write_passage_terms(
        [texts], np.arange(len(texts) + 1), np.zeros_like(lengths), lengths, path, "none"
    ).terms


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
        assert joined.num_holding(term) == len(found)
        for few in (np.arange(len(left)), np.flatnonzero(rng.random(len(left)) < 0.2), np.arange(0)):
            times_TA = joined.counts_of_few(["zz", term], few)
            np.testing.assert_array_equal(times_TA, [np.zeros(len(few)), counts[few]])
