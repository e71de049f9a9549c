"""What workers write straight to an object store, shards and fragments, is what the local engine builds."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cairn.pipeline import durable
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.errors import TryAgainError
from cairn.pipeline.index import replica as replica_module
from cairn.pipeline.index import worker_files as pending_area_module
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import compact_collection, verify_collection
from cairn.pipeline.index.object_folder import ObjectFolder
from cairn.pipeline.index.segments import parts
from cairn.pipeline.index.segments.parts import Task
from cairn.pipeline.index.store_tasks import StoredTask, folder_prefix, store_tasks
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.encoder_worker import EncoderWorker
from cairn.pipeline.line.engine import EncodedShard

from tests.line.test_row_tasks import corpus

if TYPE_CHECKING:
    from tests.object_stores import ObjectStore

ROOT = "s3://cairn/indexes"


def run_elsewhere(tasks: Sequence[Task], folder: Path) -> list[Any]:
    """Run tasks as workers do that share the store alone."""
    assert all(isinstance(task, StoredTask) and task.is_reached() for task in tasks)
    return [pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(task)).run())) for task in tasks]


def run_here(tasks: Sequence[Task], folder: Path) -> list[Any]:
    """Run tasks as the driver does where no worker reaches the store."""
    assert not any(isinstance(task, StoredTask) and task.is_reached() for task in tasks)
    return [task.run() for task in tasks]


def shards_in_store() -> list[str]:
    """Return the names of encoded shards' files."""
    return sorted(ObjectFolder(f"{ROOT}/c").list("pending"))


def require_whole(layout: CollectionLayout, num_documents: int) -> None:
    """Require each document once, nothing damaged and nothing left of the runs."""
    doc_ids = open_generation(layout).doc_ids.to_pylist()
    assert sorted(doc_ids) == sorted(f"d{number}" for number in range(num_documents))
    assert verify_collection(layout) == []
    assert shards_in_store() == []


@pytest.fixture
def on(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], CollectionLayout]:
    """Return a function that goes to another machine, which has a copy of its own."""
    monkeypatch.setattr(replica_module, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(parts, "PART_CHUNKS", 20)
    engine = property(lambda _: run_elsewhere)
    monkeypatch.setattr(EncoderWorker, "run_tasks", engine)

    def go(machine: str) -> CollectionLayout:
        monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / machine))
        return CollectionLayout.at(Path(ROOT), "c")

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
    assert shards_in_store() == []
    monkeypatch.undo()
    for source in (first, second):
        build_index([source], tmp_path / "local", "c", config)
    local = open_generation(CollectionLayout(tmp_path / "local", "c"))
    assert whole.manifest.segments == local.manifest.segments
    files, others = whole.manifest.files, local.manifest.files
    assert {name for name in files if files[name] != others[name]} <= {"lance_files.json"}


def test_compaction_by_tasks_over_a_store_publishes_the_files_of_one_process(
    on: Callable[[str], CollectionLayout],
    tmp_path: Path,
    config: IngestConfig,
) -> None:
    """The driver's copy lacks what workers wrote, and the next writer pulls it."""
    layout = on("one")
    for begin in (0, 60):
        source = corpus(tmp_path / f"{begin}.parquet", dict.fromkeys(range(begin, begin + 60), 0))
        build_index([source], ROOT, "c", config)
    merged = compact_collection(layout, run_tasks=run_elsewhere)
    assert len(merged.segments) == 1
    assert not (
        layout.generation_folder(merged.generation) / f"{merged.segments[0].name}chunks.faiss"
    ).exists()
    again = compact_collection(layout)
    names = {name.removeprefix(merged.segments[0].name): name for name in merged.files}
    others = {name.removeprefix(again.segments[0].name): name for name in again.files}
    differing = {each for each in names if merged.files[names[each]] != again.files[others[each]]}
    assert differing <= {"lance_files.json"}
    require_whole(on("reader"), 120)


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
    encoded = on("one").encoded_folder
    source = corpus(tmp_path / "a.parquet", dict.fromkeys(range(60), 0))
    stop_at(point)
    with pytest.raises(KeyboardInterrupt):
        build_index([source], ROOT, "c", config)
    durable._observers.clear()
    assert {path.name.partition("-")[0] for path in encoded.iterdir()} == {"rows", "stored"}
    on("one")
    report = build_index([source], ROOT, "c", config)
    assert (report.indexed, report.encoded) == (60, 0)
    require_whole(on("reader"), 60)


@pytest.fixture
def stopped(
    on: Callable[[str], CollectionLayout], tmp_path: Path, config: IngestConfig, stop_at: Callable[..., None]
) -> str:
    """Return the source of an ingest on machine ``one`` that was stopped with three shards in the store."""
    on("one")
    source = corpus(tmp_path / "a.parquet", dict.fromkeys(range(40), 0))
    stop_at("shard-written", 3)
    with pytest.raises(KeyboardInterrupt):
        build_index([source], ROOT, "c", config)
    durable._observers.clear()
    assert len(shards_in_store()) == 9
    return source


@pytest.mark.parametrize("damage", ["removed", pytest.param("cut", marks=pytest.mark.slow), "changed"])
def test_shard_that_is_not_in_the_store_as_it_was_uploaded_is_encoded_again(
    on: Callable[[str], CollectionLayout], config: IngestConfig, stopped: str, damage: str
) -> None:
    store, key = ObjectFolder(f"{ROOT}/c"), shards_in_store()[0]
    found = store.read(key)
    assert found is not None
    if damage == "removed":
        store.delete([key])
    else:
        content = found.content[:-1]
        store.write(key, content if damage == "cut" else content + bytes([found.content[-1] ^ 1]))
    on("one")
    if damage == "changed":  # which shows when a worker reads it
        with pytest.raises(TryAgainError, match="got 1 that are not"):
            build_index([stopped], ROOT, "c", config)
    report = build_index([stopped], ROOT, "c", config)
    assert 0 < report.encoded < 40
    require_whole(on("reader"), 40)


def test_shards_in_a_store_are_committed_by_an_engine_without_workers(
    on: Callable[[str], CollectionLayout],
    config: IngestConfig,
    stopped: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EncoderWorker, "run_tasks", None)
    report = build_index([stopped], ROOT, "c", config)
    assert 0 < report.encoded < 40
    require_whole(on("reader"), 40)


def test_shards_of_a_lost_machine_stay_for_a_day_and_go_with_a_publication(
    on: Callable[[str], CollectionLayout],
    config: IngestConfig,
    stopped: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = shards_in_store()
    layout = on("two")
    assert build_index([stopped], ROOT, "c", config).encoded == 40
    assert shards_in_store() == left
    monkeypatch.setattr(replica_module, "KEPT_SECONDS", -60.0)
    compact_collection(layout)
    require_whole(on("reader"), 40)


def test_settings_that_discard_a_killed_run_remove_its_shards_from_the_store(
    on: Callable[[str], CollectionLayout], config: IngestConfig, stopped: str, stop_at: Callable[..., None]
) -> None:
    other = replace(config, cluster=replace(config.cluster, num_clusters=2))
    stop_at("clusters-written")
    with pytest.raises(KeyboardInterrupt):
        build_index([stopped], ROOT, "c", other)
    assert shards_in_store() == []


@pytest.mark.parametrize(
    ("method", "path", "fault", "times"),
    [
        ("GET", "LEASE", "forbid", 10**6),
        ("PUT", "/pending/", "forbid", 1),
        pytest.param("PUT", "/pending/", "lose-reply", 2, marks=pytest.mark.slow),
    ],
    ids=["no-keys", "refused-once", "lost-replies"],
)
def test_shards_of_workers_that_cannot_upload_pass_the_driver(
    on: Callable[[str], CollectionLayout],
    object_store: ObjectStore,
    tmp_path: Path,
    config: IngestConfig,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    fault: str,
    times: int,
) -> None:
    """Workers have a key of their own, which the store refuses, or whose first uploads go wrong."""
    on("one")
    object_store.fault(method, path, fault, times, access_key="worker")

    def opened_by_worker(uri: str) -> ObjectFolder:
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "worker")
            return ObjectFolder(uri)

    monkeypatch.setattr(pending_area_module, "ObjectFolder", opened_by_worker)
    handed_over = list[bool]()
    encode = EncoderWorker.encode_shard

    def watched(worker: EncoderWorker, *arguments: Any) -> EncodedShard:
        shard = encode(worker, *arguments)
        handed_over.append(shard.chunks is not None)
        return shard

    monkeypatch.setattr(EncoderWorker, "encode_shard", watched)
    if path == "LEASE":
        monkeypatch.setattr(EncoderWorker, "run_tasks", property(lambda _: run_here))
    build_index([corpus(tmp_path / "a.parquet", dict.fromkeys(range(40), 0))], ROOT, "c", config)
    assert set(handed_over) == {fault == "forbid"}
    require_whole(on("reader"), 40)


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
        layout.replica.worker_files.fetch([layout.folder / "written"])
    assert (layout.folder / "written").read_bytes() == b"by a worker"
    assert [path.name for path in tmp_path.glob(f"{folder_prefix()}*")] == [alive.name]
