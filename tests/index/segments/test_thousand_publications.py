"""A thousand small publications leave few segments, fragments, versions, files and descriptors."""

from __future__ import annotations

import gc
import math
from typing import TYPE_CHECKING

import lance
import numpy as np
import psutil
import pytest
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import Generation, open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import compact_collection
from cairn.pipeline.index.names import TABLES
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.search.reader import words_asked

from tests.index import stones

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

PUBLICATIONS, LOOK_EVERY = 1_000, 100
DOCUMENTS = 400
KEPT_GENERATIONS = 2
MOST_FILES = 20
"""A segment's own files, its second copies, and a fragment with its deletions, in two generations."""
MOST_DESCRIPTORS = 10
"""Libraries open some of their own when they are first used."""


def publish_at_random(layout: CollectionLayout) -> Iterator[list[str]]:
    """Publish or delete up to three documents at a time; yield the ids that are left, in their order."""
    rng = np.random.default_rng(0)
    left: list[str] = []
    for number in range(PUBLICATIONS):
        ids = [f"d{each}" for each in rng.choice(DOCUMENTS, int(rng.integers(1, 4)), replace=False)]
        standing = [doc_id for doc_id in ids if doc_id in left]
        left = [doc_id for doc_id in left if doc_id not in ids]
        if number % 5 == 4 and standing and left:
            stones.delete(layout, standing)
        else:
            stones.publish_documents(
                layout, ids, replaced=ids, version=number % 3, config=IndexConfig(index_kind="flat")
            )
            left += ids
        yield left


def answers(generation: Generation) -> list[np.ndarray]:
    """Return what a search reads first, of all documents."""
    queries = np.random.default_rng(1).standard_normal((3, 16)).astype(np.float32)
    assert generation.document_bm25 is not None
    return [
        generation.document_bm25.scores(words_asked("stone d7 w0x1", generation.query_languages)),
        generation.documents.search(queries, 20, None)[1],
        generation.chunks.search(queries, 20, None)[1],
    ]


def test_thousand_publications_leave_little_behind(
    layout: CollectionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)  # the smallest collections have segments, too
    left: list[str] = []
    descriptors: list[int] = []
    for number, standing in enumerate(publish_at_random(layout), start=1):
        left = standing
        if number % LOOK_EVERY:
            continue
        generation = open_generation(layout)
        most_parts = tiers.FACTOR * math.log(max(generation.num_chunks, tiers.FACTOR), tiers.FACTOR)
        assert len(generation.segments) <= most_parts
        for name in TABLES:
            table = lance.dataset(str(layout.lance_folder / f"{name}.lance"))
            assert len(table.versions()) == KEPT_GENERATIONS
            assert len(table.get_fragments()) <= most_parts
        assert sum(1 for _ in layout.folder.rglob("*")) <= MOST_FILES * most_parts
        del generation, table
        gc.collect()
        descriptors.append(psutil.Process().num_fds())
    assert max(descriptors) <= descriptors[0] + MOST_DESCRIPTORS

    generation = open_generation(layout)
    assert generation.doc_ids.to_pylist() == left
    assert verify_collection(layout) == []
    before = answers(generation)
    compact_collection(layout)
    for found, expected in zip(before, answers(open_generation(layout)), strict=True):
        np.testing.assert_array_equal(found, expected)
