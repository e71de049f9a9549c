"""Ray workers write a collection in an object store; one that is killed costs its task, and no row."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs.build_index import build_index
from jobs.engine import EngineConfig
from jobs.ray_cluster.engine import RayEngine
from pipeline import durable
from pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig
from pipeline.index.generation import open_generation
from pipeline.index.layout import CollectionLayout
from pipeline.index.maintenance import verify_collection
from pipeline.index.segments import parts
from pipeline.index.segments.parts import Task
from tests.jobs.test_row_tasks import corpus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.xdist_group("ray"),
    # Ray leaves the log of a killed worker open, and its collection falls into any test.
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning"
    ),
]

ROOT = "s3://cairn/indexes"


@dataclass(frozen=True)
class Dying:
    """A task whose first worker dies when its files are in the store, before it answers."""

    task: Task
    alive: Path

    @property
    def num_rows(self) -> int:
        return self.task.num_rows

    def run(self) -> Any:
        if self.alive.exists():
            self.alive.unlink()
            durable.observe_commit_points(self.die)
        return self.task.run()

    def die(self, point: str) -> None:
        if point == "task-files-uploaded":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("object_store")
def test_worker_killed_in_a_fragment_task_over_a_store_costs_no_row(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "driver"))
    monkeypatch.setattr(parts, "PART_CHUNKS", 20)
    alive, asked = tmp_path / "alive", list[str]()
    alive.touch()
    run_tasks: Callable[..., Any] = RayEngine._run_tasks

    def run(engine: RayEngine, tasks: Sequence[Task], folder: Path) -> list[Any]:
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        asked.extend(type(task).__name__ for task in tasks)
        return run_tasks(engine, [Dying(tasks[0], alive), *tasks[1:]], folder)

    monkeypatch.setattr(RayEngine, "_run_tasks", run)
    config = IngestConfig(
        encoder=EncoderConfig(
            model=str(tiny_model_folder), landmark_interval=16, window_tokens=64, window_overlap_tokens=16
        ),
        cluster=ClusterConfig(num_clusters=3),
        context=ContextConfig(context_documents=8, max_document_tokens=32),
        shard_characters=600,
    )
    source = corpus(tmp_path / "a.parquet", dict.fromkeys(range(60), 0))
    build_index([source], ROOT, "c", config, engine=EngineConfig(name="ray", max_workers=2))
    assert set(asked) == {"StoredTask"}
    assert not alive.exists()
    build_index([source], tmp_path / "local", "c", config)
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "reader"))
    layout, local = CollectionLayout(Path(ROOT), "c"), CollectionLayout(tmp_path / "local", "c")
    stored, built = (open_generation(each).manifest for each in (layout, local))
    assert stored.segments == built.segments
    assert {name for name in stored.files if stored.files[name] != built.files[name]} <= {"lance_files.json"}
    assert verify_collection(layout) == []
