"""The Ray engine: the worker of a local run, many times, on the machines of a cluster.

The driver is the process that ingests: it stages, hands each staged shard to a worker as bytes, and alone
commits what comes back: bytes, or files where the worker sees the driver's folder. So workers need the
package, the model and a connection, but no disk in common with the driver. Clusters and context of a first
ingest come from one worker's model; the driver loads none. Workers that see the collection's root then
publish its partitions, see ``tasks``.
"""

from __future__ import annotations

import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from cairn.jobs.engine import EngineConfig
from cairn.jobs.ray_cluster.pool import WorkerPool
from cairn.jobs.ray_cluster.runtime import RayConnection
from cairn.jobs.ray_cluster.tasks import TaskPool
from cairn.pipeline import durable
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.index.partitions import ChangePartition
from cairn.pipeline.line.encoder_worker import HANDED_OVER, EncoderWorker, shard_left
from cairn.pipeline.line.engine import Begun, CorpusView, EmbeddedSample, EncodedShard, Loaded
from cairn.pipeline.manifest import PartitionRecord
from cairn.pipeline.token_vectors.codebook import TokenCoder
from jaxtyping import Int32


class RayEngine:
    """An :class:`cairn.pipeline.line.engine.Engine` of actors; it connects when it is first asked."""

    def __init__(self, engine: EngineConfig, config: IngestConfig) -> None:
        self._engine = engine
        self._config = config
        self._connection: RayConnection | None = None
        self._pool: WorkerPool | None = None
        self._tasks: TaskPool | None = None
        self._loaded: Loaded | None = None

    def load(self) -> Loaded:
        self._at_work()
        assert self._loaded is not None
        return self._loaded

    def embed_sample(self, sample: pa.Table) -> EmbeddedSample:
        return self._at_work().call("embed_sample", sample)

    def draw_context(self, sample: pa.Table, assignments_N: Int32[np.ndarray, " N"]) -> ContextSet:
        return self._at_work().call("draw_context", sample, assignments_N)

    def fit_codebook(self, sample: pa.Table, context: ContextSet) -> TokenCoder | None:
        return self._at_work().call("fit_codebook", sample, context)

    def begin(self, view: CorpusView) -> Begun:
        return self._at_work().step("begin", view)

    def encode(
        self, shards: Sequence[Path], on_tokens: Callable[[int], None]
    ) -> Iterator[tuple[int, EncodedShard]]:
        # Tokens are heard of shard by shard.
        pool, are_seen = self._at_work(), True
        if shards:
            folder = shards[0].parent.absolute()
            pool.step("share", folder, _leave_mark(folder))

        def staged(number: int) -> tuple[str | bytes]:
            return (shards[number].name if are_seen else shards[number].read_bytes(),)

        def is_unseen(answer: object) -> bool:
            nonlocal are_seen  # by a machine without the folder: from here on all get bytes
            are_seen = are_seen and answer is not None
            return answer is None

        sizes = [shard.stat().st_size for shard in shards]
        for number, answer in pool.map("encode_staged", staged, sizes, is_unseen):
            encoded = shard_left(shards[0].parent, answer) if isinstance(answer, tuple) else answer
            on_tokens(encoded.num_tokens)
            yield number, encoded

    def run_tasks(self, tasks: Sequence[ChangePartition], folder: Path) -> list[PartitionRecord]:
        if self._tasks is None:
            ray, engine = self._connected(), self._engine
            max_workers = engine.max_workers or _room(engine, ray.cluster_resources())
            self._tasks = TaskPool(ray, max_workers, engine.worker_cpus)
        return self._tasks(tasks, folder)

    def close(self) -> None:
        pools = (self._pool, self._tasks)
        self._pool = self._tasks = None
        connection, self._connection = self._connection, None
        for pool in pools:
            if pool is not None:
                pool.close()
        if connection is not None:
            connection.close()

    def _at_work(self) -> WorkerPool:
        if self._pool is None:
            ray, engine = self._connected(), self._engine
            self._pool = WorkerPool(
                ray,
                EncoderWorker,
                (self._config, engine.worker_cpus),
                {"num_cpus": engine.worker_cpus, "num_gpus": engine.worker_gpus},
                min_workers=engine.min_workers,
                max_workers=engine.max_workers or _room(engine, ray.cluster_resources()),
                deadline_seconds=engine.shard_deadline,
            )
            self._loaded = self._pool.step("load")
        return self._pool

    def _connected(self) -> Any:
        if self._connection is None:
            self._connection = RayConnection(self._engine.address)
        return self._connection.ray


def _leave_mark(staged: Path) -> str:
    """Make a folder beside the shards for workers that see it; return the file to know it by."""
    folder, mark = staged.with_name(HANDED_OVER), uuid.uuid4().hex
    with durable.storage_errors("preparing the folder that workers may share"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / mark).write_text(socket.gethostname())
    return mark


def _room(engine: EngineConfig, resources: dict[str, Any]) -> int:
    """Return how many workers the cluster has room for now, at least as many as are needed."""
    rooms = [resources.get("CPU", 0.0) / engine.worker_cpus]
    if engine.worker_gpus:
        rooms.append(resources.get("GPU", 0.0) / engine.worker_gpus)
    return max(engine.min_workers, int(min(rooms)))
