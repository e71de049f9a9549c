"""Ray workers write a collection in an object store; killed or shut out, they cost their task, and no row."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from cairn.jobs.engine import open_engine
from cairn.jobs.engine_settings import EngineConfig
from cairn.jobs.ray_cluster import engine as ray_engine
from cairn.jobs.ray_cluster.engine import RayEngine
from cairn.pipeline import durable
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig
from cairn.pipeline.encode.shards import write_encoded_shard
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import verify_collection
from cairn.pipeline.index.object_folder import ObjectFolder
from cairn.pipeline.index.segments import parts
from cairn.pipeline.index.segments.parts import Task
from cairn.pipeline.line import encode as encode_corpus
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.encoder_worker import EncoderWorker
from cairn.pipeline.line.engine import EncodedShard

from tests.line.test_store_tasks import corpus

if TYPE_CHECKING:
    from tests.object_stores import ObjectStore

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


@pytest.fixture
def build(
    object_store: ObjectStore, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Return a function that ingests by two Ray workers and compares with the local engine's collection."""
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "driver"))
    monkeypatch.setattr(parts, "PART_CHUNKS", 20)
    config = IngestConfig(
        encoder=EncoderConfig(
            model=str(tiny_model_folder), landmark_interval=16, window_tokens=64, window_overlap_tokens=16
        ),
        cluster=ClusterConfig(num_clusters=3),
        context=ContextConfig(context_documents=8, max_document_tokens=32),
        shard_characters=600,
    )
    source = corpus(tmp_path / "a.parquet", dict.fromkeys(range(60), 0))

    def ingest() -> None:
        build_index(
            [source], ROOT, "c", config, engine=open_engine(EngineConfig(name="ray", max_workers=2), config)
        )
        build_index([source], tmp_path / "local", "c", config)
        monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "reader"))
        layout, local = CollectionLayout.at(Path(ROOT), "c"), CollectionLayout(tmp_path / "local", "c")
        stored, built = (open_generation(each).manifest for each in (layout, local))
        assert stored.segments == built.segments
        differing = {name for name in stored.files if stored.files[name] != built.files[name]}
        assert differing <= {"lance_files.json"}
        assert verify_collection(layout) == []
        assert not ObjectFolder(f"{ROOT}/c").list("pending")

    return ingest


def test_worker_killed_in_a_fragment_task_over_a_store_costs_no_row(
    build: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, asked = tmp_path / "alive", list[str]()
    alive.touch()
    run_tasks: Callable[..., Any] = RayEngine._run_tasks

    def run(engine: RayEngine, tasks: Sequence[Task], folder: Path) -> list[Any]:
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        asked.extend(type(task).__name__ for task in tasks)
        return run_tasks(engine, [Dying(tasks[0], alive), *tasks[1:]], folder)

    monkeypatch.setattr(RayEngine, "_run_tasks", run)
    build()
    assert set(asked) == {"StoredTask"}
    assert not alive.exists()


def test_worker_killed_when_its_shard_is_in_the_store_costs_no_row(
    build: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = tmp_path / "alive"
    alive.touch()

    def die(point: str) -> None:
        if point == "shard-uploaded":
            os.kill(os.getpid(), signal.SIGKILL)

    class DyingEncoder(EncoderWorker):
        def encode_shard(self, staged: bytes, on_tokens: Callable[[int], None] | None = None) -> EncodedShard:
            if alive.exists():
                alive.unlink()
                durable.observe_commit_points(die)
            return super().encode_shard(staged, on_tokens)

    monkeypatch.setattr(ray_engine, "EncoderWorker", DyingEncoder)
    build()
    assert not alive.exists()


def test_workers_without_keys_of_the_store_leave_it_to_the_driver(
    build: Callable[[], None], object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They see no folder of the driver either."""
    object_store.fault("GET", "", "forbid", times=10**6, access_key="stranger")
    connection = ray_engine.RayConnection

    def connect(address: str | None) -> Any:
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "stranger")
            return connection(address)

    handed_over = set[type]()

    def write(folder: Path, number: int, staged: Path, documents: Any, chunks: Any) -> None:
        handed_over.update((type(documents), type(chunks)))
        write_encoded_shard(folder, number, staged, documents, chunks)

    monkeypatch.setattr(ray_engine, "RayConnection", connect)
    monkeypatch.setattr(ray_engine, "_shared_folder", lambda _: (tmp_path / "elsewhere", "mark"))
    monkeypatch.setattr(encode_corpus, "write_encoded_shard", write)
    build()
    assert handed_over == {pa.Buffer}
