"""Tasks of a cluster: partitions published by workers, also where these share no more than a store."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.jobs.ray_cluster import tasks as tasks_module
from cairn.jobs.ray_cluster.pool import WorkerPool, _Work
from cairn.jobs.ray_cluster.tasks import HandedOver, TaskPool, TaskWorker
from cairn.pipeline.config import EncoderConfig, IndexConfig, IngestConfig
from cairn.pipeline.errors import StorageError
from cairn.pipeline.index import replica as replica_module
from cairn.pipeline.index.layout import CollectionLayout, read_manifest
from cairn.pipeline.index.maintenance import compact_collection
from cairn.pipeline.index.object_folder import ObjectFolder
from cairn.pipeline.index.partitions import ChangePartition
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.encoder_worker import EncoderWorker
from cairn.pipeline.line.recontextualise import recontextualise
from cairn.pipeline.manifest import PartitionRecord

from tests.nightly.forks import forked
from tests.stored_collections import sorted_rows

if TYPE_CHECKING:
    from tests.object_stores import ObjectStore

ROOT = "s3://cairn/indexes"
PARTITIONS = 3
TEXTS = {f"d{number:02d}": f"stone {number} by the river of hill {number % 5}" for number in range(18)}


def test_long_task_is_not_given_up_because_another_was_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerPool, "step", lambda *_: None)
    tasks = TaskPool(SimpleNamespace(remote=lambda **_: lambda made: made), 2, 1)
    tasks._pool._slowest_seconds_a_byte = 0.1
    work = _Work(method="run", arguments=lambda _: (), sizes=[1, 1], waiting=deque([1]))
    assert tasks._pool._deadline(work, 1) > 3_600.0


@pytest.fixture
def config(tiny_model_folder: Path) -> IngestConfig:
    encoder = EncoderConfig(model=str(tiny_model_folder), landmark_interval=16, token_bytes=0)
    return IngestConfig(encoder=encoder, index=IndexConfig(partitions=PARTITIONS), shard_characters=200)


@pytest.fixture
def machines(object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which machines have their files; this process is the driver's at first."""
    monkeypatch.setattr(replica_module, "REFRESH_SECONDS", 0.0)
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "driver"))
    monkeypatch.setattr(EncoderWorker, "run_tasks", None)
    return tmp_path


def move_to(machines: Path, name: str) -> None:
    """Make this process one on another machine."""
    os.environ["CAIRN_CACHE"] = str(machines / name)


class MachinesApart:
    """A pool whose workers are on machines of their own: one a task, and another for one that was killed."""

    step = close = lambda *_: None

    def __init__(self, machines: Path, kills: Sequence[str] = ()) -> None:
        self.names: list[str] = []
        self._machines, self._kills = machines, deque(kills)

    def map(
        self,
        method: str,
        arguments: Callable[[int], tuple[ChangePartition, HandedOver | None]],
        sizes: list[int],
        goes_again: Callable[[Any], bool],
    ) -> Iterator[tuple[int, Any]]:
        assert method == "run"
        for number in range(len(sizes)):
            while goes_again(answer := self._answer(*arguments(number))):
                pass
            yield number, answer

    def _answer(self, task: ChangePartition, handed: HandedOver | None) -> bool | PartitionRecord:
        assert task.mark is not None
        task = replace(task, mark=Path("/nowhere") / task.mark.name)  # as another machine sees it
        if handed is None:
            return TaskWorker().run(task, handed)
        while True:
            self.names.append(f"worker-{len(self.names)}")
            move_to(self._machines, self.names[-1])
            try:
                if not self._kills:
                    return TaskWorker().run(*pickle.loads(pickle.dumps((task, handed))))
                outcome = forked(run, task, handed, kill=self._kills.popleft())
                assert outcome.signal == signal.SIGKILL
            finally:
                move_to(self._machines, "driver")


def run(task: ChangePartition, handed: HandedOver | None) -> bool | PartitionRecord:
    return TaskWorker().run(task, handed)


def with_workers_apart(machines: Path, kills: Sequence[str] = ()) -> MachinesApart:
    """Give ingests of this process workers on other machines; the first ones are killed at these points."""
    pool = MachinesApart(machines, kills)
    with patch.object(tasks_module, "WorkerPool", lambda *_, **__: pool):
        EncoderWorker.run_tasks = TaskPool(None, 1, 1)  # pyright: ignore
    return pool


def ingest(folder: Path, config: IngestConfig, texts: dict[str, str], root: str | Path = ROOT) -> Any:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": [*texts], "text": [*texts.values()]}), folder / "a.parquet")
    return build_index([str(folder / "a.parquet")], root, "c", config)


def records() -> tuple[PartitionRecord, ...]:
    layout = CollectionLayout.at(ROOT, "c")
    layout.refresh()
    number = layout.current_generation_number()
    assert number is not None
    return read_manifest(layout, number).partitions


def require_whole(machines: Path, config: IngestConfig, texts: dict[str, str]) -> None:
    """Require that all machines read what one process makes, and that the store keeps nothing else."""
    with patch.object(EncoderWorker, "run_tasks", None):
        ingest(machines / "one", config, texts, machines / "one")
    for name in ("reader", "driver"):
        move_to(machines, name)
        assert sorted_rows(ROOT).equals(sorted_rows(machines / "one"))
        assert verify_collection(CollectionLayout.at(ROOT, "c")) == []
    assert not [key for key in ObjectFolder(f"{ROOT}/c").list("files") if key.count("/") > 1]


def test_workers_that_see_no_folder_publish_their_partitions_into_the_store(
    machines: Path, config: IngestConfig
) -> None:
    pool = with_workers_apart(machines)
    ingest(machines / "source", config, TEXTS)
    assert len(pool.names) == PARTITIONS
    assert not [*(machines / "driver").rglob("*.lance")], "the driver has no rows"
    require_whole(machines, config, TEXTS)
    changed = {**TEXTS, **dict.fromkeys(list(TEXTS)[::2], "another stone")}
    pool = with_workers_apart(machines)
    for name in ("driver", "worker-0"):
        shutil.rmtree(machines / name)
    ingest(machines / "source", config, changed)
    assert [record.generation for record in records()] == [2] * PARTITIONS
    held = {path.parent.name for path in (machines / "worker-0").rglob("partitions/*/lance")}
    assert len(held) == 1, "a worker downloads its own partition alone"
    require_whole(machines, config, changed)
    layout = CollectionLayout.at(ROOT, "c")
    assert compact_collection(layout, run_tasks=EncoderWorker.run_tasks).documents == len(changed)
    recontextualise(ROOT, "c", config)
    assert {record.generation for record in records()} == {4}
    assert len(pool.names) == 3 * PARTITIONS
    assert verify_collection(layout) == []


@pytest.mark.slow
def test_workers_killed_while_they_publish_into_the_store_cost_nothing(
    machines: Path, config: IngestConfig
) -> None:
    points = ("strays-removed", "documents-added", "generation-renamed", "partition-published")
    pool = with_workers_apart(machines, (*points, "partition-uploaded"))
    report = ingest(machines / "source", config, TEXTS)
    assert (report.indexed, report.encoded) == (len(TEXTS), len(TEXTS))
    assert len(pool.names) == PARTITIONS + 5
    require_whole(machines, config, TEXTS)


@pytest.mark.slow
def test_driver_killed_before_the_manifest_moves_leaves_nothing_and_goes_on(
    machines: Path, config: IngestConfig
) -> None:
    changed = dict.fromkeys(TEXTS, "another stone")
    for texts, generation in ((TEXTS, 0), (changed, 1)):
        assert forked(drive, machines, config, texts, kill="store-files-written").signal == signal.SIGKILL
        move_to(machines, "reader")
        layout = CollectionLayout.at(ROOT, "c")
        layout.refresh()
        assert (layout.current_generation_number() or 0) == generation
        move_to(machines, "driver")
        time.sleep(0.2)  # until the lease has expired
        report = forked(drive, machines, config, texts).value
        assert (report.encoded, report.generation) == (0, generation + 1)
    require_whole(machines, config, changed)


def drive(machines: Path, config: IngestConfig, texts: dict[str, str]) -> Any:
    replica_module.LEASE_SECONDS = 0.1
    with_workers_apart(machines)
    return ingest(machines / "source", config, texts)


def test_store_that_fails_one_request_in_twenty_has_the_same_partitions(
    machines: Path, config: IngestConfig, object_store: ObjectStore
) -> None:
    with_workers_apart(machines)
    object_store.fault("", "", "refuse", times=10_000, every=20)
    ingest(machines / "source", config, TEXTS)
    changed = {**TEXTS, "d00": "a new stone"}
    ingest(machines / "source", config, changed)
    require_whole(machines, config, changed)


def test_worker_that_cannot_use_the_store_leaves_its_partition_to_the_driver(
    machines: Path, config: IngestConfig
) -> None:
    pool = with_workers_apart(machines)
    with patch.object(tasks_module.Replica, "upload", side_effect=StorageError("no such keys")):
        ingest(machines / "source", config, TEXTS)
    assert len(pool.names) == 1
    require_whole(machines, config, TEXTS)


DISK_BYTES = 4 << 20
"""Of a worker's machine."""


@pytest.mark.parametrize("free_kib", [100, 300])
def test_full_disk_of_a_worker_costs_its_task_alone(
    machines: Path, config: IngestConfig, disk: Path, caplog: pytest.LogCaptureFixture, free_kib: int
) -> None:
    filler = disk / "filler"
    filler.write_bytes(bytes(DISK_BYTES - (free_kib << 10)))
    ingest(machines / "source", config, TEXTS)
    (machines / "worker-1").symlink_to(disk)
    changed = dict.fromkeys(TEXTS, "another stone")
    pool = with_workers_apart(machines)
    with caplog.at_level("INFO", "cairn.jobs.ray_cluster.tasks"):
        ingest(machines / "source", config, changed)
    told = [record.getMessage() for record in caplog.records if "done_here" in record.getMessage()]
    assert [("no space left" in each, records()[1].name in each) for each in told] == [(True, True)], told
    assert len(pool.names) == PARTITIONS, "the others are done by workers"
    assert [path for path in disk.rglob("*") if path.is_file()] == [filler]
    require_whole(machines, config, changed)


def test_machine_keeps_no_copy_of_a_partition_that_another_has_published_since(
    machines: Path, config: IngestConfig
) -> None:
    for version in range(3):
        pool = with_workers_apart(machines)
        pool.names += ["none"] * (version > 0)  # from then on each partition has the next machine
        ingest(machines / "source", config, dict.fromkeys(TEXTS, f"stone {version}"))
    held = {path.parent.name for path in (machines / "worker-1").rglob("partitions/*/lance")}
    assert held == {records()[0].name}, "that of its last task"
    require_whole(machines, config, dict.fromkeys(TEXTS, "stone 2"))


def test_workers_of_one_machine_may_remove_copies_of_before_a_repartition_at_once(
    machines: Path, config: IngestConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(machines / "source", config, TEXTS)
    changed = {**TEXTS, **dict.fromkeys(list(TEXTS)[::2], "another stone")}
    pool = with_workers_apart(machines)
    old = machines / "worker-0" / "workers" / "cairn" / "indexes" / "c" / "old"
    (old / "lance").mkdir(parents=True)
    rmdir = os.rmdir

    def rmdir_after_another(path: Any, **options: Any) -> None:
        rmdir(path, **options)
        if str(path).endswith("lance"):
            raise FileNotFoundError(path)

    monkeypatch.setattr(os, "rmdir", rmdir_after_another)
    ingest(machines / "source", config, changed)
    assert not old.exists()
    assert len(pool.names) == PARTITIONS
    require_whole(machines, config, changed)
