"""Indexes that share their centroids compare a query with these once, and find the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.index.faiss_build import train_codebook, write_coded, write_flat
from cairn.pipeline.index.faiss_index import FaissIndex, open_faiss_index
from cairn.pipeline.index.segments.joined import JoinedIndex
from cairn.pipeline.index.segments.segment import DeletedRows

SIZES = (900, 300, 40, 300)
QUERIES = np.random.default_rng(1).standard_normal((5, 16)).astype(np.float32)


def parts_of(folder: Path, kind: Any, deleted_share: float) -> list[tuple[FaissIndex, DeletedRows]]:
    """Write an index of each size with the codebook of the first, a small one without."""
    rng = np.random.default_rng(0)
    vectors = [rng.standard_normal((size, 16)).astype(np.float32) for size in SIZES]
    codebook = train_codebook(lambda: iter([vectors[0]]), SIZES[0], 16, IndexConfig(index_kind=kind))
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
