"""What becomes of an ingest on a Ray cluster whose workers and machines die, freeze or hang: the undisturbed collection.

A machine is a raylet with its processes, and freezing all of them stands for a cut link: nobody on it answers, nothing of it is closed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.build_index import build_index
from jobs.engine import EngineConfig
from pipeline import durable
from pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig
from pipeline.index.layout import CollectionLayout
from pipeline.index.maintenance import verify_collection

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]
MORE_FAULTS = pytest.mark.faults

WORDS = ["stone", "path", "hill", "river", "mark", "way", "old", "mountain", "walk", "mat", "cat"]
DOCUMENTS = 120
WORKERS = 2

# Run in a process of its own: ingest argv[2] into argv[1] on the cluster argv[4] with the model argv[3], and die when a shard is written.
KILLED_DRIVER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[5])
from pipeline import durable
from test_ray_faults import engine_at, settings
from jobs.build_index import build_index
written = []
def die(name):
    written.append(name)
    if written.count("shard-written") == 4:
        os.kill(os.getpid(), signal.SIGKILL)
durable.observe_commit_points(die)
build_index([sys.argv[2]], sys.argv[1], "c", settings(Path(sys.argv[3])), engine=engine_at(sys.argv[4]))
"""


def settings(model: Path) -> IngestConfig:
    return IngestConfig(
        encoder=EncoderConfig(model=str(model), landmark_interval=16, max_window_tokens=64, window_overlap_tokens=16, use_context=True),
        cluster=ClusterConfig(num_clusters=3, max_sample_documents=40),
        context=ContextConfig(num_documents=8, max_document_tokens=32),
        shard_characters=600,
    )


def engine_at(address: str, deadline_seconds: float = 60.0) -> EngineConfig:
    return EngineConfig(name="ray", address=address, max_workers=WORKERS, shard_deadline_seconds=deadline_seconds)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = []
    for number in range(DOCUMENTS):
        rng = np.random.default_rng(number)
        rows.append({"id": f"d{number:03d}", "text": " ".join(rng.choice(WORDS, size=12 + number % 40)), "year": 2000 + number % 7})
    path = tmp_path_factory.mktemp("ray-faults") / "corpus.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture
def require_undisturbed(
    source: str, tiny_model_folder: Path, tmp_path: Path, stored: Callable[..., Any], require_same: Callable[..., None]
) -> Callable[[], None]:
    """Return a function that compares the collection with the one this process builds by itself."""

    def require() -> None:
        build_index([source], tmp_path / "undisturbed", "c", settings(tiny_model_folder))
        require_same(stored(tmp_path / "disturbed"), stored(tmp_path / "undisturbed"))
        assert verify_collection(CollectionLayout(tmp_path / "disturbed", "c")) == []

    return require


@pytest.fixture
def at_shard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Callable[[], None]], None]]:
    """Return a function that has something happen once, when so many shards are written; it must happen."""
    monkeypatch.setattr(durable, "_observers", [])
    armed, happened = [], []

    def arm(count: int, happen: Callable[[], None]) -> None:
        written: list[str] = []

        def observer(name: str) -> None:
            if name == "shard-written":
                written.append(name)
                if len(written) == count:
                    happen()
                    happened.append(count)

        armed.append(count)
        durable.observe_commit_points(observer)

    yield arm
    assert happened == armed


def signal_all(pids: list[int], number: signal.Signals) -> None:
    assert pids, "nobody is there to be disturbed"
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, number)


@contextlib.contextmanager
def killed_afterwards(frozen: list[int]) -> Iterator[None]:
    """What is frozen for ever would be left behind."""
    try:
        yield
    finally:
        signal_all(frozen, signal.SIGKILL)


def ingest(source: str, model: Path, folder: Path, engine: EngineConfig) -> Any:
    return build_index([source], folder / "disturbed", "c", settings(model), engine=engine)


def test_ingest_with_a_killed_worker_gives_the_undisturbed_collection(
    ray_cluster: Any, source: str, tiny_model_folder: Path, tmp_path: Path, at_shard: Any, require_undisturbed: Callable[[], None]
) -> None:
    at_shard(5, lambda: signal_all(ray_cluster.workers("EncoderWorker")[:1], signal.SIGKILL))
    report = ingest(source, tiny_model_folder, tmp_path, engine_at(ray_cluster.address))
    assert (report.indexed, report.encoded) == (DOCUMENTS, DOCUMENTS)
    require_undisturbed()


@MORE_FAULTS
def test_ingest_with_all_workers_killed_gives_the_undisturbed_collection(
    ray_cluster: Any, source: str, tiny_model_folder: Path, tmp_path: Path, at_shard: Any, require_undisturbed: Callable[[], None]
) -> None:
    at_shard(5, lambda: signal_all(ray_cluster.workers("EncoderWorker"), signal.SIGKILL))
    report = ingest(source, tiny_model_folder, tmp_path, engine_at(ray_cluster.address))
    assert (report.indexed, report.encoded) == (DOCUMENTS, DOCUMENTS)
    require_undisturbed()


@MORE_FAULTS
def test_ingest_with_a_killed_machine_gives_the_undisturbed_collection(
    ray_cluster: Any, source: str, tiny_model_folder: Path, tmp_path: Path, at_shard: Any, require_undisturbed: Callable[[], None]
) -> None:
    machine = ray_cluster.machines()[0]
    at_shard(5, lambda: signal_all(ray_cluster.processes(machine), signal.SIGKILL))
    report = ingest(source, tiny_model_folder, tmp_path, engine_at(ray_cluster.address))
    assert (report.indexed, report.encoded) == (DOCUMENTS, DOCUMENTS)
    require_undisturbed()


@MORE_FAULTS
def test_ingest_with_a_machine_that_stops_answering_gives_the_undisturbed_collection(
    ray_cluster: Any, source: str, tiny_model_folder: Path, tmp_path: Path, at_shard: Any, require_undisturbed: Callable[[], None]
) -> None:
    frozen: list[int] = []

    def freeze() -> None:
        frozen.extend(ray_cluster.processes(ray_cluster.machines()[0]))
        signal_all(frozen, signal.SIGSTOP)

    at_shard(5, freeze)
    with killed_afterwards(frozen):
        report = ingest(source, tiny_model_folder, tmp_path, engine_at(ray_cluster.address, deadline_seconds=10.0))
    assert (report.indexed, report.encoded) == (DOCUMENTS, DOCUMENTS)
    require_undisturbed()


@MORE_FAULTS
def test_ingest_with_a_worker_that_hangs_gives_the_undisturbed_collection(
    ray_cluster: Any, source: str, tiny_model_folder: Path, tmp_path: Path, at_shard: Any, require_undisturbed: Callable[[], None]
) -> None:
    frozen: list[int] = []

    def freeze() -> None:
        frozen.extend(ray_cluster.workers("EncoderWorker")[:1])
        signal_all(frozen, signal.SIGSTOP)

    at_shard(5, freeze)
    with killed_afterwards(frozen):
        report = ingest(source, tiny_model_folder, tmp_path, engine_at(ray_cluster.address, deadline_seconds=5.0))
    assert (report.indexed, report.encoded) == (DOCUMENTS, DOCUMENTS)
    require_undisturbed()


@MORE_FAULTS
def test_ingest_whose_driver_was_killed_goes_on_and_gives_the_undisturbed_collection(
    ray_cluster: Any, source: str, tiny_model_folder: Path, tmp_path: Path, require_undisturbed: Callable[[], None]
) -> None:
    root, tests = str(tmp_path / "disturbed"), str(Path(__file__).parent)
    command = [sys.executable, "-c", KILLED_DRIVER, root, source, str(tiny_model_folder), ray_cluster.address, tests]
    assert subprocess.run(command, capture_output=True, check=False, timeout=300).returncode == -signal.SIGKILL
    kept = sum(pq.read_metadata(path).num_rows for path in CollectionLayout(Path(root), "c").encoded_folder.glob("documents-*.parquet"))
    report = ingest(source, tiny_model_folder, tmp_path, engine_at(ray_cluster.address))
    assert (report.indexed, report.encoded) == (DOCUMENTS, DOCUMENTS - kept)
    require_undisturbed()
