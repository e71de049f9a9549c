"""Who encodes: this process, or the workers of a Ray cluster. Everything else of the line is the same.

An engine does what needs a model, and only when it is asked: a run without changes opens none, and so never
loads torch or Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import pyarrow as pa
from jaxtyping import Int32

from pipeline.config import IngestConfig, require_kinds
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from jobs.encoder_worker import Begun, CorpusView, EmbeddedSample, EncodedShard, EncoderWorker, Loaded
    from pipeline.context.store import ContextSet

EngineName = Literal["local", "ray"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Where shards are encoded, and by how many.

    The rest holds for ``ray`` alone. ``address`` = None starts a Ray of its own on this machine.
    ``max_workers`` = None takes as many as the cluster has CPUs, or GPUs if a worker needs one; no more are
    started than there are shards, and a run that cannot have ``min_workers`` of them fails.
    ``shard_deadline_seconds`` = None learns it from the shards that are finished.
    """

    name: EngineName = "local"
    address: str | None = None
    min_workers: int = 1
    max_workers: int | None = None
    cpus_a_worker: int = 1
    gpus_a_worker: float = 0.0
    shard_deadline_seconds: float | None = None

    def __post_init__(self) -> None:
        require_kinds(self)
        if self.name not in ("local", "ray"):
            raise ConfigError(f"engine must be local or ray, got {self.name!r}")
        if self.min_workers < 1 or (self.max_workers is not None and self.max_workers < self.min_workers):
            raise ConfigError(
                "workers must be a positive number, or two as in 2:8, got "
                f"{self.min_workers}:{self.max_workers}; give the smaller first"
            )
        if self.cpus_a_worker < 1 or self.gpus_a_worker < 0:
            raise ConfigError(
                f"a worker must have at least one CPU and no fewer than 0 GPUs, got {self.cpus_a_worker} "
                f"and {self.gpus_a_worker:g}"
            )
        if self.shard_deadline_seconds is not None and not self.shard_deadline_seconds > 0:
            raise ConfigError(
                f"shard_deadline_seconds must be positive, got {self.shard_deadline_seconds}; leave it "
                "out to have it learnt"
            )


class Engine(Protocol):
    """What the line asks of a model."""

    def load(self) -> Loaded:
        """Load the model and check that the settings fit it; doing it again costs nothing."""
        ...

    def embed_sample(self, sample: pa.Table) -> EmbeddedSample:
        """Embed both sides of a sample's documents with the surrogate."""
        ...

    def draw_context(self, sample: pa.Table, assignments_N: Int32[np.ndarray, " N"]) -> ContextSet:
        """Draw the context from a clustered sample and embed it."""
        ...

    def begin(self, view: CorpusView) -> Begun:
        """Make ready to encode in the light of a corpus."""
        ...

    def encode(
        self, shards: Sequence[Path], on_tokens: Callable[[int], None]
    ) -> Iterator[tuple[int, EncodedShard]]:
        """Encode staged shards, each once, and give them with their positions as they are finished, in any order."""
        ...

    def close(self) -> None:
        """Let go of everything that was loaded or started."""
        ...


class LocalEngine:
    """One worker, in this process."""

    def __init__(self, config: IngestConfig) -> None:
        self._config = config
        self._worker: EncoderWorker | None = None

    def _at_work(self) -> EncoderWorker:
        if self._worker is None:
            from jobs.encoder_worker import EncoderWorker  # torch comes in here

            self._worker = EncoderWorker(self._config)
            self._worker.load()
        return self._worker

    def load(self) -> Loaded:
        """See :class:`Engine`."""
        return self._at_work().load()

    def embed_sample(self, sample: pa.Table) -> EmbeddedSample:
        """See :class:`Engine`."""
        return self._at_work().embed_sample(sample)

    def draw_context(self, sample: pa.Table, assignments_N: Int32[np.ndarray, " N"]) -> ContextSet:
        """See :class:`Engine`."""
        return self._at_work().draw_context(sample, assignments_N)

    def begin(self, view: CorpusView) -> Begun:
        """See :class:`Engine`."""
        return self._at_work().begin(view)

    def encode(
        self, shards: Sequence[Path], on_tokens: Callable[[int], None]
    ) -> Iterator[tuple[int, EncodedShard]]:
        """See :class:`Engine`; shards come in order, and tokens are heard of batch by batch."""
        for number, shard in enumerate(shards):
            yield number, self._at_work().encode(shard.read_bytes(), on_tokens)

    def close(self) -> None:
        """See :class:`Engine`."""
        self._worker = None


def open_engine(engine: EngineConfig, config: IngestConfig) -> Engine:
    """Return the engine asked for; nothing is loaded or started before it is asked for anything."""
    if engine.name == "local":
        return LocalEngine(config)
    from jobs.ray_cluster.engine import RayEngine

    return RayEngine(engine, config)
