"""A thousand small publications leave few segments, fragments, versions, files and descriptors."""

from __future__ import annotations

import gc
import math
from typing import TYPE_CHECKING

import lance
import numpy as np
import psutil
import pytest
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import compact_collection
from cairn.pipeline.index.names import TABLES
from cairn.pipeline.index.verify import verify_collection

from tests.index.segments.test_splits import assert_same, publications, read

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


def drawn_work() -> Iterator[tuple[list[str], bool]]:
    """Draw publications of up to three documents at a time, each fifth a deletion."""
    rng = np.random.default_rng(0)
    for number in range(PUBLICATIONS):
        ids = rng.choice(DOCUMENTS, int(rng.integers(1, 4)), replace=False)
        yield [f"d{each}" for each in ids], number % 5 == 4


def test_thousand_publications_leave_little_behind(
    layout: CollectionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)  # the smallest collections have segments, too
    left: list[str] = []
    descriptors: list[int] = []
    for number, standing in enumerate(publications(layout, drawn_work()), start=1):
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
    before = read(generation)
    compact_collection(layout)
    assert_same(before, read(open_generation(layout)))
