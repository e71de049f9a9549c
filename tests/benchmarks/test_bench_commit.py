"""Measure the time, memory and storage of an ingest of a million chunks without its encoder.

That is staging, the commit to Lance and a generation's files. The encoder is replaced by one that returns
random unit vectors. Documents are ten passages of the sample each, drawn at random. Two sizes are ingested,
each in its own process; their difference gives the cost of another million chunks, without start-up. Both
are ingested twice: the committer does all, or two other processes do its tasks, as workers of Ray would.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline import durable
from cairn.pipeline.config import ClusterConfig, EncoderConfig, IngestConfig
from cairn.pipeline.context.store import ContextSet, build_context
from cairn.pipeline.encode.documents import EncodedDocuments
from cairn.pipeline.encode.shards import as_parquet, shard_tables
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.segments.parts import RunTasks
from cairn.pipeline.index.worker_files import PendingArea
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.engine import Begun, CorpusView, EmbeddedSample, EncodedShard, Loaded

pytestmark = pytest.mark.bench

SIZES = (280_000, 360_000)
"""Chunks. Beyond 262,144 neither the number of an inverted file's lists nor its training grows."""
VECTOR_DIM, PASSAGES_A_DOCUMENT, SAMPLE_PASSAGES = 384, 10, 19_000
CHUNK_CHARACTERS = 256
"""Of 64 tokens, the interval of landmarks."""

MEASURE = """
import sys
sys.path.insert(0, sys.argv[1])
from test_bench_commit import measure
if __name__ == "__main__":
    measure(*sys.argv[2:])
"""


class RandomEncoder:
    """Unit vectors of nothing, a chunk for every ``CHUNK_CHARACTERS``."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(0)

    def vectors(self, count: int) -> np.ndarray:
        vectors = self._generator.standard_normal((count, VECTOR_DIM), dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def encode(self, texts: Sequence[str]) -> EncodedDocuments:
        starts = [np.arange(0, len(text), CHUNK_CHARACTERS) for text in texts]
        ends = [np.append(start[1:], len(text)) for start, text in zip(starts, texts, strict=True)]
        offsets = np.cumsum([0, *map(len, starts)])
        return EncodedDocuments(
            document_vectors_NV=self.vectors(len(texts)),
            num_tokens=np.array([len(text) // 4 for text in texts], np.int32),
            chunk_offsets=offsets,
            start_char=np.concatenate(starts),
            end_char=np.concatenate(ends),
            chunk_vectors_MV=self.vectors(int(offsets[-1])),
        )


class RandomEngine:
    """A :class:`cairn.pipeline.line.engine.Engine` without a model."""

    def __init__(self) -> None:
        self._encoder = RandomEncoder()

    def load(self) -> Loaded:
        return Loaded(package_version="bench", first_stage_fingerprint="f" * 64, host="bench")

    def embed_sample(self, sample: pa.Table) -> EmbeddedSample:
        sides = [self._encoder.vectors(sample.num_rows) for _ in range(2)]
        return EmbeddedSample(
            phi_NV=sides[0], psi_NV=sides[1], surrogate_fingerprint="s" * 64, surrogate_state={}
        )

    def draw_context(self, sample: pa.Table, assignments_N: np.ndarray) -> ContextSet:
        return build_context(
            sample,
            assignments_N,
            IngestConfig().context,
            lambda texts: self._encoder.vectors(len(texts)),
            "f" * 64,
        )

    def begin(self, view: CorpusView) -> Begun:
        return Begun(encoder_fingerprint="e" * 64, vector_dim=VECTOR_DIM, host="bench")

    def encode(
        self, shards: Sequence[Path], on_tokens: Callable[[int], None], area: PendingArea | None
    ) -> Iterator[tuple[int, EncodedShard]]:
        for number, shard in enumerate(shards):
            rows = pq.read_table(shard)
            encoded = self._encoder.encode(rows.column("text").to_pylist())
            doc_ids = rows.column("doc_id").to_pylist()
            documents, chunks = shard_tables(doc_ids, encoded, np.zeros(rows.num_rows, np.int32))
            tokens = int(np.sum(documents.column("num_tokens").to_numpy()))
            on_tokens(tokens)
            yield (
                number,
                EncodedShard(
                    documents=as_parquet(documents),
                    chunks=as_parquet(chunks),
                    num_documents=rows.num_rows,
                    num_characters=4 * tokens,
                    num_tokens=tokens,
                ),
            )

    run_tasks: RunTasks | None = None

    def close(self) -> None: ...


def measure(source: str, root: str, workers: str) -> None:
    """Ingest and print JSON: processor and clock seconds of each part, peak memory and bytes written.

    All but ``others`` is of this process, the committer.
    """
    engine = RandomEngine()
    processes = ProcessPoolExecutor(int(workers) or 1, mp_context=get_context("spawn"))
    if int(workers):
        engine.run_tasks = lambda tasks, _: [
            each.result() for each in [processes.submit(task.run) for task in tasks]
        ]
    marks: list[tuple[str, float, float]] = []
    commit: list[tuple[float, int]] = []

    def mark(name: str) -> None:
        marks.append((name, time.process_time(), time.perf_counter()))
        if name in {"before commit", "end"}:
            commit.append((time.process_time(), bytes_moved()))

    stages: list[str] = []

    def progress(stage: str, *_: Any) -> None:
        if stage not in stages:
            stages.append(stage)
            mark(f"before {stage}")

    durable.observe_commit_points(mark)
    mark("start")
    # A sample that both corpora exceed, as those worth this question exceed the default one.
    config = IngestConfig(
        encoder=EncoderConfig(model="all-MiniLM-L6-v2"), cluster=ClusterConfig(max_sample_documents=4_096)
    )
    report = build_index([source], root, "c", config, progress=progress)
    mark("end")
    processes.shutdown()
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor: dict[str, float] = {}
    clock: dict[str, float] = {}
    for (_, cpu, wall), (name, later_cpu, later_wall) in pairwise(marks):
        processor[name] = processor.get(name, 0.0) + later_cpu - cpu
        clock[name] = clock.get(name, 0.0) + later_wall - wall
    layout = CollectionLayout(Path(root), "c")
    folder = layout.generation_folder(1)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    files |= {
        path.name: sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for path in layout.lance_folder.iterdir()
    }
    status = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    (began, moved_before), (ended, moved) = commit
    print(
        json.dumps(
            {
                "chunks": report.chunks,
                "processor": processor,
                "clock": clock,
                "bytes": files,
                "peak": peak,
                "commit": ended - began,
                "moved": moved - moved_before,
                "others": others.ru_utime + others.ru_stime,
            }
        )
    )


def bytes_moved() -> int:
    """Return the bytes that this process has read and written; what it maps is not among them."""
    counts = dict(row.split(":") for row in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])


def test_bench_commit_of_a_million_chunks(
    tmp_path: Path, sample_passages: Callable[[int], list[str]]
) -> None:
    sources = {size: write_source(tmp_path, size, sample_passages(SAMPLE_PASSAGES)) for size in SIZES}
    for workers in (0, 2):
        small, large = (
            ingest(source, tmp_path / f"{workers}-{size}", workers) for size, source in sources.items()
        )
        millions = (large["chunks"] - small["chunks"]) / 1e6

        commit, moved, others = (
            (large[name] - small[name]) / millions for name in ("commit", "moved", "others")
        )
        print(
            f"\n{workers} workers, {small['chunks']:,} and {large['chunks']:,} chunks; another million costs "
            f"the committer {commit:.1f} processor seconds from the first row of Lance on, and "
            f"{moved / 1e6:,.0f} bytes a chunk read and written; other processes {others:.1f} "
            f"seconds; of {large['chunks']:,} chunks {large['commit']:.1f} seconds and "
            f"{large['moved'] / large['chunks']:,.0f} bytes; processor seconds (and by the clock) "
            "of a million:"
        )
        for name in large["processor"]:
            values = [
                (large[kind][name] - small[kind].get(name, 0.0)) / millions for kind in ("processor", "clock")
            ]
            if values[0] >= 0.5:
                print(f"  {values[0]:7.1f} ({values[1]:.1f})  to {name}")
        print(
            "bytes a chunk:",
            {
                name: round(size / large["chunks"], 1)
                for name, size in large["bytes"].items()
                if size > large["chunks"]
            },
        )
        print(f"peak memory {small['peak'] / 1e6:.0f} and {large['peak'] / 1e6:.0f} MB")


def write_source(folder: Path, size: int, passages: Sequence[str]) -> Path:
    generator = np.random.default_rng(size)
    draws = generator.integers(0, len(passages), (size // PASSAGES_A_DOCUMENT, PASSAGES_A_DOCUMENT))
    texts = ["\n\n".join(passages[number] for number in row) for row in draws]
    source = folder / f"{size}.parquet"
    pq.write_table(
        pa.table({"id": [f"d{number:07d}" for number in range(len(texts))], "text": texts}), source
    )
    return source


def ingest(source: Path, root: Path, workers: int) -> dict[str, Any]:
    program = root.with_suffix(".py")  # a file, so that its processes can import it
    program.write_text(MEASURE)
    command = [sys.executable, str(program), str(Path(__file__).parent), str(source), str(root), str(workers)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    shutil.rmtree(root, ignore_errors=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
