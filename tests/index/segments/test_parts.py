"""A segment that is written in parts has the files of one that is written by one process."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline import durable
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.lance_index import LanceTables, StoredRows
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import verify_collection
from cairn.pipeline.index.segments import codes, parts
from cairn.pipeline.index.segments.parts import (
    PARTS_FOLDER,
    JoinParts,
    Task,
    TrainCodebook,
    cut_between_documents,
)
from cairn.pipeline.index.tables import CHUNKS, DOCUMENTS
from cairn.pipeline.search.candidates import nominate_by_document
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KINDS = ("flat", "ivf_sq8", "ivf_rabitq")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_CHUNKS", 100)
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)


def run_pickled(tasks: Sequence[Task], folder: Path) -> list[Any]:
    """Run tasks here as other processes get them."""
    assert folder.is_dir()
    return [pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(task)).run())) for task in tasks]


def files_of(layout: CollectionLayout) -> dict[str, str]:
    manifest = open_generation(layout).manifest
    return {name: record.sha256 for name, record in manifest.files.items() if name != "lance_files.json"}


def assert_same_generation(layout: CollectionLayout, other: CollectionLayout) -> None:
    assert files_of(layout) == files_of(other)
    one, two = (open_generation(each).manifest for each in (layout, other))
    assert one.segments == two.segments
    assert verify_collection(layout) == []
    assert list(layout.generations_folder.glob(".*")) == []


@pytest.mark.parametrize("exact_vectors", [20, codes.EXACT_VECTORS])
@pytest.mark.parametrize("kind", KINDS)
def test_collection_of_parts_has_the_files_of_one_process(
    stones: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, exact_vectors: int
) -> None:
    """A first publication, and one that adds a large segment and deletes rows of the older one."""
    monkeypatch.setattr(codes, "EXACT_VECTORS", exact_vectors)
    config = IndexConfig(index_kind=kind)
    asked: list[str] = []

    def run(tasks: Sequence[Task], folder: Path) -> list[Any]:
        asked.extend(type(task).__name__ for task in tasks)
        return run_pickled(tasks, folder)

    layouts = [CollectionLayout(tmp_path / name, "stones") for name in ("parts", "whole")]
    for layout, run_tasks in zip(layouts, (run, None), strict=True):
        first, second = stones.document_ids(300), stones.document_ids(150, "n")
        stones.publish_documents(layout, first, config=config, with_tokens=True, run_tasks=run_tasks)
        changed = [*second, *first[5:15]]
        stones.publish_documents(
            layout, changed, replaced=first[5:15], version=1, config=config, run_tasks=run_tasks
        )
    # Chunks: 595 and 284.
    trained = 2 if kind != "flat" else 4
    assert asked.count("WritePart") == 5 + 3
    assert (asked.count("TrainCodebook"), asked.count("JoinParts")) == (trained, 2)
    assert_same_generation(*layouts)


@pytest.mark.parametrize("kind", ["flat", "ivf_rabitq"])
def test_merge_by_a_task_has_the_files_of_one_process(
    stones: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """Half of the documents change, so that the old segment and the new one are merged."""
    monkeypatch.setattr(codes, "EXACT_VECTORS", 20)
    config = IndexConfig(index_kind=kind)
    merged: list[int] = []

    def run(tasks: Sequence[Task], folder: Path) -> list[Any]:
        joins = [task for task in tasks if isinstance(task, JoinParts)]
        merged.extend(len(task.parts) for task in joins if task.name.endswith("merged-"))
        return run_pickled(tasks, folder)

    layouts = [CollectionLayout(tmp_path / name, "stones") for name in ("task", "driver")]
    for layout, run_tasks in zip(layouts, (run, None), strict=True):
        ids = stones.document_ids(300)
        stones.publish_documents(layout, ids, config=config, with_tokens=True)
        changed = ids[:150]
        stones.publish_documents(
            layout, changed, replaced=changed, version=1, config=config, run_tasks=run_tasks
        )
    assert merged == [2]
    assert_same_generation(*layouts)


def test_searches_go_on_while_tasks_train_a_new_codebook(
    stones: ModuleType, layout: CollectionLayout
) -> None:
    """The collection grows fourfold; the generation before answers until the new one is published."""
    config = IndexConfig(index_kind="ivf_sq8")
    stones.publish_documents(layout, stones.document_ids(60), config=config)
    query = stones.unit_vectors("query", 1)
    expected = nominate_by_document(open_generation(layout), query, 5, None)
    answered: list[int] = []

    def run(tasks: Sequence[Task], folder: Path) -> list[Any]:
        if any(isinstance(task, TrainCodebook) for task in tasks):
            generation = open_generation(layout)
            found = nominate_by_document(generation, query, 5, None)
            assert [row.tolist() for row in found] == [row.tolist() for row in expected]
            answered.append(generation.number)
        return run_pickled(tasks, folder)

    stones.publish_documents(layout, stones.document_ids(240, "n"), config=config, run_tasks=run)
    assert answered == [1]
    assert open_generation(layout).number == 2


@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    kind=st.sampled_from(KINDS),
    numbers=st.lists(st.integers(0, 900), unique=True, min_size=80, max_size=300),
    part_chunks=st.integers(20, 200),
)
def test_any_cut_into_parts_has_the_files_of_one_process(
    stones: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    numbers: list[int],
    part_chunks: int,
) -> None:
    monkeypatch.setattr(parts, "PART_CHUNKS", part_chunks)
    ids = [f"d{'x' * (number % 4)}{number}" for number in numbers]
    root = tmp_path_factory.mktemp("root")
    layouts = [CollectionLayout(root / name, "stones") for name in ("parts", "whole")]
    for layout, run_tasks in zip(layouts, (run_pickled, None), strict=True):
        stones.publish_documents(layout, ids, config=IndexConfig(index_kind=kind), run_tasks=run_tasks)
    assert_same_generation(*layouts)


def test_spans_hold_all_rows_once_and_no_document_twice(stones: ModuleType, layout: CollectionLayout) -> None:
    manifest = stones.publish_documents(layout, stones.document_ids(100))
    rows = StoredRows(tables=LanceTables.open(layout), versions=manifest.lance_versions)
    for wanted in (1, 2, 7, 1_000):
        spans = cut_between_documents(rows, manifest.chunks, wanted)
        assert len(spans) <= wanted
        for table, count in ((DOCUMENTS, manifest.documents), (CHUNKS, manifest.chunks)):
            stops = [span[table].stop for span in spans]
            assert [span[table].start for span in spans] == [0, *stops[:-1]]
            assert stops[-1] == count
            assert np.all(np.diff([0, *stops]) > 0)
        for span in spans:
            documents, chunks = (
                StoredRows(tables=rows.tables, versions=rows.versions, spans=span).scan(table, ["doc_id"])
                for table in (DOCUMENTS, CHUNKS)
            )
            ids, owners = (pa.Table.from_batches(each).column("doc_id") for each in (documents, chunks))
            assert owners.unique().to_pylist() == ids.to_pylist()


def test_document_that_is_in_two_parts_is_refused(
    stones: ModuleType, layout: CollectionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = stones.document_ids(200)
    with pytest.raises(IntegrityError, match="each doc_id once, got 1 repeated"):
        stones.publish_documents(layout, [*ids, ids[0]], run_tasks=run_pickled)
    assert list(layout.generations_folder.glob("*")) == []
    monkeypatch.undo()
    stones.publish_documents(layout, ids)
    assert verify_collection(layout) == []


def test_task_that_fails_leaves_nothing_behind(stones: ModuleType, layout: CollectionLayout) -> None:
    def fail(tasks: Sequence[Task], folder: Path) -> list[Any]:
        answers = run_pickled(tasks, folder)
        assert (layout.generations_folder / PARTS_FOLDER).is_dir()
        if len(tasks) > 2:
            raise OSError(28, "No space left on device")
        return answers

    with pytest.raises(durable.DiskFullError):
        stones.publish_documents(layout, stones.document_ids(200), run_tasks=fail)
    assert list(layout.generations_folder.glob("*")) == []
