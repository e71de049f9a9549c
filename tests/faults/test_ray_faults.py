"""An ingest that is disturbed on a Ray cluster of three machines still builds the undisturbed collection.

Workers and machines die, freeze or hang, a link is cut, the driver is killed; each has a time to be over in.
Machines are raylets with their processes on this one; where a link is cut they are network namespaces as
well.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from cairn.cli.cluster import open_engine
from cairn.jobs.engine import EngineConfig
from cairn.pipeline import durable
from cairn.pipeline.config import IndexConfig, IngestConfig
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.types import IngestReport

from tests import small_ingests
from tests.object_stores import STORE_ROOT, ObjectStore
from tests.ray_machines import RayCluster
from tests.served_stones import wait_until
from tests.small_ingests import WINDOWS, text_of, write_rows
from tests.stored_collections import require_same, sorted_rows, stored

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.xdist_group("ray"),
    # Ray leaves the log of a killed worker open, and its collection falls into any test.
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning"
    ),
]
FAULTS = pytest.mark.faults

DOCUMENTS = 120
WORKERS = 2
PARTITIONS = 3
SHARDS_BEFORE = 5
"""A disturbance happens when so many shards are written, to the worker that began first.

It is at work, others may still load.
"""

KILL_SECONDS = 30.0
"""After something was killed a run of small shards is done within this."""

SILENT_SECONDS = 120.0
"""And within this where something fell silent without a word: it is found out by its deadline."""

ROOT = Path(__file__).parents[2]
APART = "unshare --user --map-root-user --mount".split()  # noqa: SIM905
NAMESPACES = "unshare --user --map-root-user --net --pid --fork --kill-child --mount-proc".split()  # noqa: SIM905


def settings(model: Path) -> IngestConfig:
    own: dict[str, Any] = {"num_clusters": 3, "max_sample_documents": 40, "context_documents": 8}
    return small_ingests.settings(model, shard_characters=600, use_context=True, **own, **WINDOWS)


def engine_at(address: str, deadline_seconds: float | None = 60.0) -> EngineConfig:
    return EngineConfig(name="ray", address=address, max_workers=WORKERS, shard_deadline=deadline_seconds)


def ingest_on(
    address: str, root: str | Path, source: str, model: Path, deadline_seconds: float = 60.0
) -> IngestReport:
    """Ingest on a cluster."""
    config = settings(model)
    engine = open_engine(engine_at(address, deadline_seconds), config)
    return build_index([source], root, "c", config, engine=engine)


def in_partitions(model: Path) -> IngestConfig:
    return replace(settings(model), index=IndexConfig(partitions=PARTITIONS))


def driver(name: str, *arguments: str | Path) -> list[str]:
    """Return the command that calls a function of this module in a process of its own."""
    call = "from tests.faults import test_ray_faults as own; getattr(own, sys.argv[2])(*sys.argv[3:])"
    program = f"import sys; sys.path.insert(0, sys.argv[1]); {call}"
    return [sys.executable, "-c", program, str(ROOT), name, *map(str, arguments)]


def drive_and_die(root: str, source: str, model: str, address: str) -> None:
    """Ingest on a cluster, and die when the fourth shard is written."""
    written: list[str] = []

    def die(name: str) -> None:
        written.append(name)
        if written.count("shard-written") == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    durable.observe_commit_points(die)
    ingest_on(address, root, source, Path(model))


def drive_and_cut(root: str, source: str, model: str) -> None:
    """Ingest on the head of ray_namespaces.py, and cut a machine off when shards are written."""
    from tests.ray_namespaces import HEAD_ADDRESS, cut_off_oldest

    written: list[float] = []

    def cut(name: str) -> None:
        if name == "shard-written":
            written.append(time.monotonic())
            if len(written) == SHARDS_BEFORE:
                cut_off_oldest("EncoderWorker")

    durable.observe_commit_points(cut)
    config = settings(Path(model))
    engine = open_engine(engine_at(HEAD_ADDRESS, deadline_seconds=None), config)
    report = build_index([source], root, "c", config, engine=engine)
    seconds = time.monotonic() - written[SHARDS_BEFORE - 1]
    print(json.dumps({"indexed": report.indexed, "encoded": report.encoded, "seconds": seconds}), flush=True)


def drive_apart(root: str, source: str, model: str, address: str, disk: str) -> None:
    """Ingest into partitions where this process has a disk of its own, which no worker sees."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], check=True)
    os.environ["CAIRN_CACHE"] = disk
    config = in_partitions(Path(model))
    report = build_index([source], root, "c", config, engine=open_engine(engine_at(address), config))
    print(report.indexed, report.encoded)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [
        {"id": f"d{number:03d}", "text": text_of(number, 12 + number % 40), "year": 2000 + number % 7}
        for number in range(DOCUMENTS)
    ]
    return write_rows(tmp_path_factory.mktemp("ray-faults") / "corpus.parquet", rows)


@pytest.fixture
def require_undisturbed(source: str, tiny_model_folder: Path, tmp_path: Path) -> Callable[[], None]:
    """Return a function that compares the collection with the one this process builds by itself."""

    def require() -> None:
        build_index([source], tmp_path / "undisturbed", "c", settings(tiny_model_folder))
        require_same(stored(tmp_path / "disturbed"), stored(tmp_path / "undisturbed"))
        assert verify_collection(CollectionLayout(tmp_path / "disturbed", "c")) == []

    return require


def signal_all(pids: list[int], number: signal.Signals) -> None:
    assert pids, "there is no process to disturb"
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, number)


def oldest_worker(cluster: RayCluster) -> list[int]:
    return cluster.workers("EncoderWorker")[:1]


def all_workers(cluster: RayCluster) -> list[int]:
    return cluster.workers("EncoderWorker")


def machine_at_work(cluster: RayCluster) -> list[int]:
    return cluster.processes(cluster.machine_at_work("EncoderWorker"))


@pytest.mark.parametrize(
    ("processes", "number", "within_seconds", "deadline_seconds"),
    [
        # A run of the whole suite leaves a machine little: only make faults holds recoveries to a time.
        pytest.param(oldest_worker, signal.SIGKILL, math.inf, 60.0, id="killed worker"),
        pytest.param(all_workers, signal.SIGKILL, KILL_SECONDS, 60.0, id="all workers killed", marks=FAULTS),
        pytest.param(machine_at_work, signal.SIGKILL, KILL_SECONDS, 60.0, id="killed machine", marks=FAULTS),
        pytest.param(machine_at_work, signal.SIGSTOP, SILENT_SECONDS, 10.0, id="machine halts", marks=FAULTS),
        pytest.param(oldest_worker, signal.SIGSTOP, SILENT_SECONDS, 5.0, id="worker hangs", marks=FAULTS),
    ],
)
def test_ingest_that_is_disturbed_gives_the_undisturbed_collection(
    ray_cluster: RayCluster,
    source: str,
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    require_undisturbed: Callable[[], None],
    processes: Callable[[RayCluster], list[int]],
    number: signal.Signals,
    within_seconds: float,
    deadline_seconds: float,
) -> None:
    monkeypatch.setattr(durable, "_observers", [])
    written: list[float] = []
    disturbed: list[int] = []

    def disturb(name: str) -> None:
        if name == "shard-written":
            written.append(time.monotonic())
            if len(written) == SHARDS_BEFORE:
                disturbed.extend(processes(ray_cluster))
                signal_all(disturbed, number)

    durable.observe_commit_points(disturb)
    root, address = tmp_path / "disturbed", ray_cluster.address
    try:
        report = ingest_on(address, root, source, tiny_model_folder, deadline_seconds)
    finally:
        durable._observers.clear()
        if number == signal.SIGSTOP:
            signal_all(disturbed, signal.SIGKILL)  # frozen for ever they would be left behind
    seconds = time.monotonic() - written[SHARDS_BEFORE - 1]
    print(f"overcome after {seconds:.1f} seconds")
    assert (report.indexed, report.encoded) == (DOCUMENTS, DOCUMENTS)
    assert seconds < within_seconds
    require_undisturbed()


@FAULTS
def test_ingest_whose_driver_was_killed_goes_on_and_gives_the_undisturbed_collection(
    ray_cluster: RayCluster,
    source: str,
    tiny_model_folder: Path,
    tmp_path: Path,
    require_undisturbed: Callable[[], None],
) -> None:
    root = tmp_path / "disturbed"
    command = driver("drive_and_die", root, source, tiny_model_folder, ray_cluster.address)
    died = subprocess.run(command, capture_output=True, check=False, timeout=300)
    assert died.returncode == -signal.SIGKILL
    kept = sum(
        pq.read_metadata(path).num_rows
        for path in CollectionLayout(root, "c").encoded_folder.glob("documents-*.parquet")
    )
    assert kept
    report = ingest_on(ray_cluster.address, root, source, tiny_model_folder)
    assert (report.indexed, report.encoded) == (DOCUMENTS, DOCUMENTS - kept)
    require_undisturbed()


def kill_task_workers(cluster: RayCluster, folder: Path, below: str = "") -> list[int]:
    """Kill all workers that publish partitions at each of three steps; return them."""
    killed: list[int] = []
    for step in ("*/lance/*", "*/generations/.*.tmp/*", "*/generations/.*.tmp/*chunks.faiss"):
        wait_until(lambda step=step: any(folder.glob(below + step)) and cluster.workers("TaskWorker"))
        killed.extend(workers := cluster.workers("TaskWorker"))
        signal_all(workers, signal.SIGKILL)
        while set(cluster.workers("TaskWorker")) & set(workers):
            time.sleep(0.01)
    return killed


@FAULTS
def test_publication_of_partitions_whose_workers_are_killed_gives_the_undisturbed_collection(
    ray_cluster: RayCluster, source: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    config = in_partitions(tiny_model_folder)
    folder = CollectionLayout(tmp_path, "disturbed").partitions_folder
    with ThreadPoolExecutor(1) as thread:
        kills = thread.submit(kill_task_workers, ray_cluster, folder)
        engine = engine_at(ray_cluster.address)
        report = build_index([source], tmp_path, "disturbed", config, engine=open_engine(engine, config))
        assert len(kills.result(0)) >= 3
    assert (report.indexed, report.encoded) == (DOCUMENTS, DOCUMENTS)
    build_index([source], tmp_path, "undisturbed", config)
    assert sorted_rows(tmp_path, "disturbed").equals(sorted_rows(tmp_path, "undisturbed"))
    assert verify_collection(CollectionLayout(tmp_path, "disturbed")) == []


@FAULTS
def test_publication_into_a_store_whose_workers_are_killed_gives_the_undisturbed_collection(
    object_store: ObjectStore,
    source: str,
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "driver").mkdir()
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "machines"))
    cluster = RayCluster()
    try:
        arguments = (STORE_ROOT, source, tiny_model_folder, cluster.address, tmp_path / "driver")
        command = [*APART, *driver("drive_apart", *arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        partitions = tmp_path / "machines/workers/cairn/indexes/c"
        killed = kill_task_workers(cluster, partitions, "*/c/partitions/")
        said, _ = process.communicate(timeout=SILENT_SECONDS)
    finally:
        cluster.close()
    assert said.split()[-2:] == [str(DOCUMENTS), str(DOCUMENTS)], "after what Ray says"
    assert len(killed) >= 3
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "reader"))
    build_index([source], tmp_path, "c", in_partitions(tiny_model_folder))
    assert sorted_rows(STORE_ROOT, "c").equals(sorted_rows(tmp_path, "c"))
    assert verify_collection(CollectionLayout.at(STORE_ROOT, "c")) == []


@pytest.fixture
def machines_apart() -> list[str]:
    """Return the command that runs others on the head of a cluster of network namespaces."""
    if missing := [name for name in ("unshare", "nsenter", "ip", "bridge") if not shutil.which(name)]:
        pytest.skip(f"this machine has no {', '.join(missing)}")
    command = [*NAMESPACES, *["ip", "link", "add", "switch", "type", "bridge"]]
    probe = subprocess.run(command, capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"this machine allows no network namespaces with a bridge: {probe.stderr.strip()}")
    return [*NAMESPACES, sys.executable, str(ROOT / "tests/ray_namespaces.py")]


@FAULTS
def test_ingest_with_a_cut_link_gives_the_undisturbed_collection(
    machines_apart: list[str],
    source: str,
    tiny_model_folder: Path,
    tmp_path: Path,
    require_undisturbed: Callable[[], None],
) -> None:
    """With the deadlines that a user has who sets none."""
    arguments = (tmp_path / "disturbed", source, tiny_model_folder)
    command = [*machines_apart, *driver("drive_and_cut", *arguments)]
    for _ in range(3):  # a busy machine may be too slow for Ray to start
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
        if ran.returncode != 75:
            break
    assert ran.returncode == 0, ran.stderr
    heard = json.loads(ran.stdout.splitlines()[-1])
    print(f"overcome after {heard['seconds']:.1f} seconds")
    assert (heard["indexed"], heard["encoded"]) == (DOCUMENTS, DOCUMENTS)
    assert heard["seconds"] < SILENT_SECONDS
    require_undisturbed()
