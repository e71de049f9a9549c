"""Compare the Ray engine with bare encoder processes and numbers of machines; measure its driver's memory.

The memory is compared at ten times the corpus. Times leave out start-up (Ray, imports, loading models). Both
sides take turns. Load on the machine disturbs processor time least; it is summed over all processes of a
side, Ray's own included.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.jobs.engine import EngineConfig
from cairn.jobs.ray_cluster.engine import RayEngine
from cairn.jobs.ray_cluster.pool import WorkerPool
from cairn.jobs.ray_cluster.runtime import RayConnection
from cairn.pipeline import durable
from cairn.pipeline.cluster.store import Clusters
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.shards import write_encoded_shard
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.engine import CorpusView
from cairn.pipeline.types import staged_schema

pytestmark = pytest.mark.bench

WORKERS, TURNS = 2, 2
SHARDS, PASSAGES_A_SHARD = 8, 80
"""Shards of some 7,000 tokens, a ninth of the default.

What a shard costs beside its encoding shows nine times.
"""
VIEW_PASSAGES = 200

BARE_ENCODER = """
import sys
from pathlib import Path
import pyarrow.parquet as pq
import torch
torch.set_num_threads(1)
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder
encoder = DocumentEncoder(IngestConfig().encoder, ContextSet.read(Path(sys.argv[1])))
print("ready", flush=True)
for line in sys.stdin:
    tokens = 0
    for path in line.split():
        tokens += int(encoder.encode(pq.read_table(path).column("text").to_pylist()).num_tokens.sum())
    print(tokens, flush=True)
"""

# Both in one session, as Ray's workers are: a busy Linux shares its processors between sessions.
BARE_ENCODERS = """
import subprocess, sys
program, context, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
command = [sys.executable, "-c", program, context]
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
children = [subprocess.Popen(command, **pipes, text=True) for _ in range(count)]
print(*{child.stdout.readline() for child in children}, end="", flush=True)
for line in sys.stdin:
    paths = line.split()
    for number, child in enumerate(children):
        child.stdin.write(" ".join(paths[number::count]) + chr(10))
        child.stdin.flush()
    print(sum(int(child.stdout.readline()) for child in children), flush=True)
"""


def test_bench_two_workers_against_two_bare_encoders(
    tmp_path: Path,
    sample_passages: Callable[[int], list[str]],
    write_passages: Callable[[Path, list[str]], str],
) -> None:
    texts = sample_passages(VIEW_PASSAGES + SHARDS * PASSAGES_A_SHARD)
    build_index(
        [write_passages(tmp_path / "view.parquet", texts[:VIEW_PASSAGES])], tmp_path, "c", IngestConfig()
    )
    folder = CollectionLayout(tmp_path, "c").generation_folder(1)
    view = CorpusView(
        clusters=Clusters.read(folder / "clusters.arrow"), context=ContextSet.read(folder / "context.arrow")
    )
    shards = [
        _stage(
            tmp_path / f"shard-{number}.parquet", texts[VIEW_PASSAGES + number :: SHARDS][:PASSAGES_A_SHARD]
        )
        for number in range(SHARDS)
    ]
    measured: dict[str, list[tuple[float, float]]] = {"bare": [], "ray": []}
    tokens: set[int] = set()
    bare = _start_bare(folder / "context.arrow")

    def ask_bare() -> None:
        _stream(bare.stdin).write(" ".join(map(str, shards)) + "\n")
        _stream(bare.stdin).flush()
        tokens.add(int(_stream(bare.stdout).readline()))

    with closing(RayEngine(EngineConfig(name="ray", max_workers=WORKERS), IngestConfig())) as engine:
        engine.begin(view)

        def ask_ray(folder: Path) -> None:
            encoded = []
            for number, shard in engine.encode(shards, lambda _: None, None):
                staged = shutil.copy(shards[number], folder.with_suffix(".staged"))  # writing moves it
                write_encoded_shard(folder, number, Path(staged), shard.documents, shard.chunks)
                encoded.append(shard.num_tokens)
            tokens.add(sum(encoded))

        ask_ray(tmp_path / "warm")
        assert engine._pool is not None
        while sum(worker.steps_passed >= 2 for worker in engine._pool._workers) < WORKERS:
            ask_ray(tmp_path / "warm")
        ask_bare()
        for turn in range(TURNS):
            for name, ask in (
                ("bare", ask_bare),
                ("ray", lambda turn=turn: ask_ray(tmp_path / f"encoded-{turn}")),
            ):
                processor, started = _processor_seconds(), time.perf_counter()
                ask()
                measured[name].append((time.perf_counter() - started, _processor_seconds() - processor))
    bare.communicate(timeout=60)
    (count,) = tokens
    for kind, position in (("by the clock", 0), ("of processor time", 1)):
        best = {name: min(values[position] for values in turns) for name, turns in measured.items()}
        total = {name: sum(values[position] for values in turns) for name, turns in measured.items()}
        print(
            f"\nRay with {WORKERS} workers / {WORKERS} bare encoders, {kind}: "
            f"{total['bare'] / total['ray']:.3f} x, best turns "
            f"{best['bare'] / best['ray']:.3f} x ({count / best['ray']:.0f} against "
            f"{count / best['bare']:.0f} tokens/s)  (goal >= 0.85)"
        )


NODES = (1, 4, 16)
CALLS_A_WORKER, CALL_SECONDS = 4, 5.0
"""A shard of the default size takes a core 7 seconds."""
STAGED_BYTES, ENCODED_BYTES = 256 << 10, 2 << 20
"""What a shard of 65,000 tokens weighs, before and after."""


class Sleeper:
    """A stage that waits, as one on an accelerator of its own does, and hands over what a shard weighs.

    It does so as bytes, or as files in a ``folder`` shared with the driver.
    """

    def work(self, staged: bytes | Path, seconds: float, folder: Path | None) -> tuple[Any, Any]:
        if isinstance(staged, Path):
            staged.read_bytes()
        time.sleep(seconds)
        handed = bytes(ENCODED_BYTES // 8), bytes(ENCODED_BYTES)
        if folder is None:
            return handed
        paths = tuple(folder / uuid.uuid4().hex for _ in handed)
        for path, content in zip(paths, handed, strict=True):
            durable.write_bytes(path, content)
        return paths


def test_bench_throughput_against_machines(started_ray_cluster: Any, tmp_path: Path) -> None:
    with closing(RayConnection(started_ray_cluster.address)) as connection:
        connection.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        print()
        for nodes in NODES:
            started_ray_cluster.restore(nodes)
            pool = WorkerPool(
                connection.ray,
                Sleeper,
                (),
                {"num_cpus": 1},
                min_workers=nodes,
                max_workers=nodes,
                deadline_seconds=None,
            )
            with closing(pool):
                _finish(pool, tmp_path / "warm", nodes, 0.0, None)  # one for each: all have started
                processor = time.process_time()
                time.sleep(CALL_SECONDS)
                idle = (time.process_time() - processor) / CALL_SECONDS  # Ray's threads, whatever we do
                for shared in (None, tmp_path):
                    processor, started = time.process_time(), time.perf_counter()
                    count = nodes * CALLS_A_WORKER
                    folder = tmp_path / f"encoded-{nodes}-{shared is None}"
                    _finish(pool, folder, count, CALL_SECONDS, shared)
                    seconds, processor = time.perf_counter() - started, time.process_time() - processor
                    print(
                        f"{nodes:3d} machines, {'bytes' if shared is None else 'files'}: "
                        f"{count / seconds:6.2f} shards/s, {count * CALL_SECONDS / seconds / nodes:.3f} of "
                        f"linear; {1e3 * processor / count:.1f} ms of the driver's processor a shard, "
                        f"{1e3 * (processor - idle * seconds) / count:.1f} without the {1e3 * idle:.1f} ms "
                        "that Ray takes each second where nothing is sent"
                    )


DOCUMENTS = 3_000
MEASURE_PEAK = """
import resource, sys
from cairn.pipeline.line.build_index import build_index
sys.path.insert(0, sys.argv[4])
from cairn.jobs.engine import EngineConfig
from test_bench_ray import peak_config
from cairn.cli.cluster import open_engine
config = peak_config(sys.argv[3])
engine = open_engine(EngineConfig(name="ray", max_workers=2), config)
build_index([sys.argv[1]], sys.argv[2], "c", config, engine=engine)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def peak_config(model: str) -> IngestConfig:
    """Return settings with a sample that either corpus exceeds."""
    return IngestConfig(
        encoder=EncoderConfig(model=model),
        cluster=ClusterConfig(max_sample_documents=1_000),
        context=ContextConfig(context_documents=64),
    )


def test_bench_drivers_memory_at_ten_times_the_corpus(
    tmp_path: Path,
    tiny_model_folder: Path,
    sample_passages: Callable[[int], list[str]],
    write_passages: Callable[[Path, list[str]], str],
) -> None:
    """With a tiny model, whose vectors of 32 dimensions a driver handles as it does others."""
    passages = sample_passages(DOCUMENTS)
    peaks = []
    for times in (1, 10):
        texts = [f"{number} {text}" for number in range(times) for text in passages]
        source = write_passages(tmp_path / f"{times}.parquet", texts)
        command = [
            sys.executable,
            "-c",
            MEASURE_PEAK,
            source,
            str(tmp_path / f"root-{times}"),
            str(tiny_model_folder),
            str(Path(__file__).parent),
        ]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        peaks.append(float(ran.stdout.split()[-1]))
    print(
        f"\ndriver's peak {peaks[0]:.0f} MiB at {DOCUMENTS:,} documents, {peaks[1]:.0f} at ten times: "
        f"{peaks[1] / peaks[0]:.2f} x"
    )


def _finish(pool: WorkerPool, folder: Path, count: int, seconds: float, shared: Path | None) -> None:
    staged = folder.with_suffix(".given")
    staged.write_bytes(bytes(STAGED_BYTES))
    arguments = (staged.read_bytes() if shared is None else staged, seconds, shared)
    for number, (documents, chunks) in pool.map("work", lambda _: arguments, [STAGED_BYTES] * count):
        moved = Path(shutil.copy(staged, folder.with_suffix(".staged")))
        if shared is None:
            documents, chunks = map(pa.py_buffer, (documents, chunks))
        write_encoded_shard(folder, number, moved, documents, chunks)


def _stage(path: Path, texts: list[str]) -> Path:
    rows = [
        {"doc_id": f"{path.stem}-{number}", "text": text, "content_sha256": "0" * 64, "source_file": "bench"}
        for number, text in enumerate(texts)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=staged_schema([])), path)
    return path


def _start_bare(context: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}  # as a worker
    command = [sys.executable, "-c", BARE_ENCODERS, BARE_ENCODER, str(context), str(WORKERS)]
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert _stream(process.stdout).readline() == "ready\n"
    return process


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _processor_seconds() -> float:
    """Return what this process and all that it started have used."""
    used = time.process_time()
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        used += times.user + times.system
    return used
