"""Rows that tasks write as fragments are those that the committer streams, whatever stops a run between."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline import durable
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.index import stored_files
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.lance_index import LanceTables
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import verify_collection
from cairn.pipeline.index.segments import parts
from cairn.pipeline.index.segments.parts import Task
from cairn.pipeline.index.stored_files import find_lance_files
from cairn.pipeline.index.tables import CHUNKS, TABLES
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.encoder_worker import EncoderWorker
from cairn.pipeline.line.pending import EncodedShards
from cairn.pipeline.line.publish import MAX_FRAGMENTS
from cairn.pipeline.manifest import record_file

from tests.index import stones

WORDS = ("stone", "path", "hill", "river", "mark", "way", "old", "mountain", "walk", "lake")


def corpus(path: Path, versions: dict[int, int]) -> str:
    rows = []
    for number, version in versions.items():
        rng = np.random.default_rng([number, version])
        text = " ".join(rng.choice(WORDS, size=12 + number % 90))
        rows.append({"id": f"d{number}", "text": text, "year": 2000 + version})
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def run_pickled(_: EncoderWorker, tasks: Sequence[Task], folder: Path) -> list[Any]:
    assert folder.is_dir()
    return [pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(task)).run())) for task in tasks]


@pytest.fixture
def with_tasks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that gives the local engine tasks from here on."""
    monkeypatch.setattr(parts, "PART_CHUNKS", 20)

    def give() -> None:
        monkeypatch.setattr(EncoderWorker, "run_tasks", property(lambda self: run_pickled.__get__(self)))

    return give


def data_files(layout: CollectionLayout) -> set[str]:
    stored = layout.lance_folder.glob("*.lance/data/*")
    return {str(path.relative_to(layout.lance_folder)) for path in stored}


def named_data_files(layout: CollectionLayout) -> set[str]:
    generations = [layout.generation_folder(number) for number in layout.generation_numbers()]
    named = (
        find_lance_files(layout, open_generation(layout, int(each.name)).manifest) for each in generations
    )
    return {name for files in named for name in files if "/data/" in name}


def test_ingests_by_tasks_build_the_collection_of_the_local_engine(
    root: Path,
    tmp_path: Path,
    config: IngestConfig,
    stored: Callable[..., Any],
    require_same: Callable[..., None],
    with_tasks: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first ingest, and one of new, changed and vanished documents."""
    config = replace(config, sync=True)
    first = corpus(tmp_path / "first.parquet", dict.fromkeys(range(90), 0))
    second = corpus(tmp_path / "second.parquet", {number: int(number < 30) for number in range(10, 150)})
    hashed: list[Path] = []
    for name in ("streamed", "tasks"):
        if name == "tasks":
            with_tasks()
            monkeypatch.setattr(
                stored_files, "record_file", lambda path: hashed.append(path) or record_file(path)
            )
        for source in (first, second):
            build_index([source], root, name, config)
    require_same(stored(root, "tasks"), stored(root, "streamed"))
    layout = CollectionLayout(root, "tasks")
    one, other = (open_generation(CollectionLayout(root, name)).manifest for name in ("tasks", "streamed"))
    assert one.segments == other.segments
    assert {name for name in one.files if one.files[name] != other.files[name]} == {"lance_files.json"}
    assert verify_collection(layout) == []
    tables = LanceTables.open(layout)
    fragments = [len(tables._dataset(name).get_fragments()) for name in TABLES]
    assert hashed
    assert not any(path.parent.name == "data" for path in hashed), "tasks hash what they write"
    assert all(MAX_FRAGMENTS < count <= 2 * MAX_FRAGMENTS for count in fragments)


def test_ingest_stopped_after_its_fragments_were_written_leaves_no_row_twice_and_no_file(
    root: Path,
    tmp_path: Path,
    config: IngestConfig,
    stored: Callable[..., Any],
    require_same: Callable[..., None],
    with_tasks: Callable[[], None],
    stop_at: Callable[..., None],
) -> None:
    """A document that changed before the rerun is left out of the shard that has its older text."""
    versions = dict.fromkeys(range(90), 0)
    source = corpus(tmp_path / "a.parquet", versions)
    with_tasks()
    stop_at("fragments-written")
    with pytest.raises(KeyboardInterrupt):
        build_index([source], root, "c", config)
    durable._observers.clear()
    layout = CollectionLayout(root, "c")
    left = data_files(layout)
    assert len(left) == 2 * MAX_FRAGMENTS
    source = corpus(tmp_path / "a.parquet", {**versions, 7: 1})
    assert build_index([source], root, "c", config).encoded == 1
    build_index([source], root, "fresh", config)
    require_same(stored(root, "c"), stored(root, "fresh"))
    assert data_files(layout) == named_data_files(layout)
    assert left.isdisjoint(data_files(layout))
    assert verify_collection(layout) == []


def test_shards_are_cut_into_runs_of_about_as_many_chunks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    counts = {number: (1, int(chunks)) for number, chunks in enumerate(rng.integers(0, 50, 100))}
    shards = EncodedShards(folder=tmp_path, counts=counts, stale={})
    total = shards.count()[1]
    for wanted in (1, 2, 7, 100):
        cut = shards.cut(wanted)
        assert len(cut) <= wanted
        assert [number for part in cut for number in part.counts] == list(counts)
        assert max(part.count()[1] for part in cut) <= total / wanted + 50
    assert EncodedShards(folder=tmp_path, counts={}, stale={}).cut(3) == []


def test_fragment_with_another_number_of_rows_is_refused(tmp_path: Path) -> None:
    layout = CollectionLayout(tmp_path, "stones")
    stones.publish_documents(layout, stones.document_ids(5))
    rows = stones.chunk_rows(["dx1"])
    reader = pa.RecordBatchReader.from_batches(rows.schema, [rows])
    with pytest.raises(IntegrityError, match="`chunks` must grow by 4 rows, got 1"):
        LanceTables.open(layout).write_fragments(CHUNKS, reader, 4)


def test_fragment_of_a_vector_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    layout = CollectionLayout(tmp_path, "stones")
    stones.publish_documents(layout, stones.document_ids(5))
    rows = stones.chunk_rows(["dx1"])
    vectors = pa.FixedSizeListArray.from_arrays(pa.array([np.nan] * 16, pa.float32()), 16)
    rows = rows.set_column(rows.schema.get_field_index("vector"), rows.schema.field("vector"), vectors)
    reader = pa.RecordBatchReader.from_batches(rows.schema, [rows])
    with pytest.raises(IntegrityError, match="must be finite numbers"):
        LanceTables.open(layout).write_fragments(CHUNKS, reader, 1)
