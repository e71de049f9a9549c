"""What workers write straight to an object store is the collection that the local engine builds."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.build_index import build_index
from jobs.local_engine import LocalEngine
from pipeline import durable
from pipeline.config import IngestConfig
from pipeline.index import replica as replica_module
from pipeline.index.generation import open_generation
from pipeline.index.layout import CollectionLayout
from pipeline.index.maintenance import verify_collection
from pipeline.index.segments import parts
from pipeline.index.segments.parts import Task
from pipeline.index.store_tasks import StoredTask, folder_prefix, store_tasks
from tests.jobs.test_row_tasks import corpus

if TYPE_CHECKING:
    from tests.object_stores import ObjectStore

ROOT = "s3://cairn/indexes"


def run_elsewhere(tasks: Sequence[Task], folder: Path) -> list[Any]:
    """Run tasks as workers do that share the store alone."""
    assert all(isinstance(task, StoredTask) and task.is_reached() for task in tasks)
    return [pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(task)).run())) for task in tasks]


@pytest.fixture
def on(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], CollectionLayout]:
    """Return a function that goes to another machine, which has a copy of its own."""
    monkeypatch.setattr(replica_module, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(parts, "PART_CHUNKS", 20)
    engine = property(lambda _: run_elsewhere)
    monkeypatch.setattr(LocalEngine, "run_tasks", engine)

    def go(machine: str) -> CollectionLayout:
        monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / machine))
        return CollectionLayout(Path(ROOT), "c")

    return go


def test_ingests_by_tasks_over_a_store_build_the_collection_of_the_local_engine(
    on: Callable[[str], CollectionLayout],
    tmp_path: Path,
    config: IngestConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first ingest, and on another machine one of changed and new documents; the driver fetches none."""
    first = corpus(tmp_path / "first.parquet", dict.fromkeys(range(90), 0))
    second = corpus(tmp_path / "second.parquet", {number: int(number < 30) for number in range(150)})
    for machine, source in (("one", first), ("two", second)):
        layout = on(machine)
        build_index([source], ROOT, "c", config)
        kept = {path.name for path in layout.lance_folder.glob("chunks.lance/data/*.lance")}
        whole = open_generation(on("reader"))
        stored = {path.name for path in whole.layout.lance_folder.glob("chunks.lance/data/*.lance")}
        assert kept < stored, "the driver's copy lacks what workers wrote"
    assert verify_collection(on("reader")) == []
    monkeypatch.undo()
    for source in (first, second):
        build_index([source], tmp_path / "local", "c", config)
    local = open_generation(CollectionLayout(tmp_path / "local", "c"))
    assert whole.manifest.segments == local.manifest.segments
    files, others = whole.manifest.files, local.manifest.files
    assert {name for name in files if files[name] != others[name]} <= {"lance_files.json"}


@pytest.mark.parametrize(
    "point",
    [
        "generation-renamed",
        pytest.param("fragments-written", marks=pytest.mark.slow),
        pytest.param("parts-written", marks=pytest.mark.slow),
    ],
)
def test_ingest_stopped_over_a_store_goes_on_and_publishes_each_row_once(
    on: Callable[[str], CollectionLayout],
    tmp_path: Path,
    config: IngestConfig,
    stop_at: Callable[..., None],
    point: str,
) -> None:
    on("one")
    source = corpus(tmp_path / "a.parquet", dict.fromkeys(range(60), 0))
    stop_at(point)
    with pytest.raises(KeyboardInterrupt):
        build_index([source], ROOT, "c", config)
    durable._observers.clear()
    on("one")
    report = build_index([source], ROOT, "c", config)
    assert (report.indexed, report.encoded) == (60, 0)
    generation = open_generation(on("reader"))
    assert sorted(generation.doc_ids.to_pylist()) == sorted(f"d{number}" for number in range(60))
    assert verify_collection(on("reader")) == []


@dataclass(frozen=True)
class WriteFile:
    folder: Path
    num_rows: int = 1

    def reads(self) -> list[Path]:
        return []

    def run(self) -> Path:
        path = self.folder / "written"
        path.write_bytes(b"by a worker")
        return path


def test_task_writes_to_the_store_alone_and_clears_the_folders_of_dead_workers(
    on: Callable[[str], CollectionLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = on("one")
    layout.folder.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, alive = (tmp_path / f"{folder_prefix()}{pid}-x" for pid in (2**22 + 1, os.getppid()))
    dead.mkdir()
    alive.mkdir()
    with layout.writer_lock():
        run_tasks = store_tasks(layout, run_elsewhere)
        assert run_tasks is not None
        assert run_tasks([WriteFile(layout.folder)], layout.folder) == [layout.folder / "written"]
        assert layout.replica is not None
        assert not (layout.folder / "written").exists()
        layout.replica.worker_files.fetch(layout.folder / "written")
    assert (layout.folder / "written").read_bytes() == b"by a worker"
    assert [path.name for path in tmp_path.glob(f"{folder_prefix()}*")] == [alive.name]
