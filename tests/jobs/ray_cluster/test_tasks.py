"""Workers of a cluster write segments: one that dies costs its task, and the files stay the same."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cairn.cli.main import cairn, run
from cairn.jobs.ray_cluster import pool
from cairn.jobs.ray_cluster.engine import RayEngine
from cairn.jobs.ray_cluster.runtime import RayConnection
from cairn.jobs.ray_cluster.tasks import TaskPool
from cairn.pipeline import durable
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import verify_collection
from cairn.pipeline.index.segments import parts
from cairn.pipeline.index.segments.parts import Task

from tests.index import stones

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

IDS = stones.document_ids(300)


@dataclass(frozen=True)
class Dying:
    """A task whose first worker dies at a commit point of its own, or when it is done, before it answers."""

    task: Task
    alive: Path
    point: str

    @property
    def num_rows(self) -> int:
        return self.task.num_rows

    def run(self) -> Any:
        if self.alive.exists():
            self.alive.unlink()
            durable.observe_commit_points(self.die)
            self.task.run()
            self.die(self.point)
        return self.task.run()

    def die(self, point: str) -> None:
        if point == self.point:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def tasks(ray_cluster: Any) -> Iterator[TaskPool]:
    with closing(RayConnection(ray_cluster.address)) as connection:
        connection.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        with closing(TaskPool(connection.ray, 2, 1)) as workers:
            yield workers
        connection.ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_CHUNKS", 100)


def publish(layout: CollectionLayout, run_tasks: Callable[..., Any] | None) -> None:
    config = IndexConfig(index_kind="ivf_sq8")
    stones.publish_documents(layout, IDS, config=config, with_tokens=True, run_tasks=run_tasks)


def hashes(layout: CollectionLayout) -> dict[str, str]:
    files = open_generation(layout).manifest.files
    return {name: record.sha256 for name, record in files.items() if name != "lance_files.json"}


def publish_with_merge(layout: CollectionLayout, run_tasks: Callable[..., Any] | None) -> None:
    """Change half of the documents, so that their segments are merged."""
    publish(layout, None)
    config = IndexConfig(index_kind="ivf_sq8")
    stones.publish_documents(
        layout, IDS[:150], replaced=IDS[:150], version=1, config=config, run_tasks=run_tasks
    )


@pytest.mark.parametrize("has_workers", [True, False], ids=["another-worker", "the-driver"])
def test_merge_whose_worker_is_killed_is_done_by_another_or_by_the_driver(
    tmp_path: Path, tasks: TaskPool, monkeypatch: pytest.MonkeyPatch, has_workers: bool
) -> None:
    if not has_workers:
        monkeypatch.setattr(pool, "MAX_ATTEMPTS", 1)
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    alive = tmp_path / "alive"

    def run(asked: Sequence[Task], folder: Path) -> list[Any]:
        is_merge = [getattr(task, "name", "").endswith("merged-") for task in asked]
        if any(is_merge):
            alive.touch()
        return tasks(
            [
                Dying(task, alive, "done") if each else task
                for each, task in zip(is_merge, asked, strict=True)
            ],
            folder,
        )

    disturbed, whole = (CollectionLayout(tmp_path / name, "stones") for name in ("disturbed", "whole"))
    publish_with_merge(disturbed, run)
    publish_with_merge(whole, None)
    assert not alive.exists()
    assert any("merged-" in name for name in hashes(whole))
    assert hashes(disturbed) == hashes(whole)
    assert verify_collection(disturbed) == []


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        ("TrainCodebook", "done"),
        ("WritePart", "passages-written"),
        ("WritePart", "done"),
        ("JoinParts", "done"),
    ],
)
def test_task_whose_worker_is_killed_is_done_by_another(
    tmp_path: Path, tasks: TaskPool, kind: str, point: str
) -> None:
    alive = tmp_path / "alive"
    alive.touch()

    def run(asked: Sequence[Task], folder: Path) -> list[Any]:
        return tasks(
            [Dying(task, alive, point) if type(task).__name__ == kind else task for task in asked], folder
        )

    disturbed, whole = (CollectionLayout(tmp_path / name, "stones") for name in ("disturbed", "whole"))
    publish(disturbed, run)
    publish(whole, None)
    assert not alive.exists()
    assert hashes(disturbed) == hashes(whole)
    assert verify_collection(disturbed) == []
    assert list(disturbed.generations_folder.glob(".*")) == []


def test_compact_on_a_cluster_writes_the_files_of_one_process(
    tmp_path: Path, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set[str]()
    run_tasks: Callable[..., Any] = RayEngine._run_tasks

    def watched(engine: RayEngine, tasks: Sequence[Task], folder: Path) -> list[Any]:
        asked.update(type(task).__name__ for task in tasks)
        return run_tasks(engine, tasks, folder)

    monkeypatch.setattr(RayEngine, "_run_tasks", watched)
    layouts = {name: CollectionLayout(tmp_path / name, "stones") for name in ("ray", "local")}
    for name, layout in layouts.items():
        publish_with_merge(layout, None)
        flags = ["--engine", "ray", "--address", ray_cluster.address] if name == "ray" else []
        assert run(cairn, ["compact", "stones", "--root", str(layout.root), *flags], "cairn") == 0
    assert {"WritePart", "JoinParts"} <= asked
    assert hashes(layouts["ray"]) == hashes(layouts["local"])
    assert verify_collection(layouts["ray"]) == []
