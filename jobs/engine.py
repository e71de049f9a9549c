"""What the line asks of a model, and who answers: this process, or the workers of a Ray cluster.

``local_engine`` and ``ray_cluster.engine`` implement :class:`Engine`. An engine loads and connects only when
it is first called: a run without changes calls none, and loads neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol

from pipeline.errors import ConfigError
from pipeline.options import About, check_options, option

if TYPE_CHECKING:  # the command line reads EngineConfig for its help, and must not wait for pyarrow
    import numpy as np
    import pyarrow as pa
    from jaxtyping import Int32

    from jobs.corpus_view import CorpusView
    from jobs.engine_records import Begun, EmbeddedSample, EncodedShard, Loaded
    from pipeline.context.store import ContextSet
    from pipeline.index.pending_area import PendingArea
    from pipeline.index.segments.parts import RunTasks

EngineName = Literal["local", "ray"]
_WORKERS: Final = About(low=1, high=10_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Where shards are encoded, and by how many.

    The rest holds for ``ray`` alone. ``address`` = None starts a Ray of its own on this machine.
    ``max_workers`` = None takes as many as the cluster has CPUs, or GPUs if a worker needs one; no more are
    started than there are shards, and a run that cannot have ``min_workers`` of them fails.
    ``shard_deadline`` = None learns it from the shards that are finished.
    """

    name: EngineName = "local"
    address: str | None = option(
        None,
        About(
            "Ray cluster, HOST:PORT or auto.",
            default_text="one of our own, with engine ray",
            variable="RAY_ADDRESS",
        ),
    )
    min_workers: int = option(1, _WORKERS)
    max_workers: int | None = option(None, _WORKERS)
    worker_cpus: int = option(1, About("CPUs of a worker, one thread each.", low=1, high=1_024))
    worker_gpus: float = option(0.0, About("GPUs of a worker.", low=0, high=1_024))
    shard_deadline: float | None = option(
        None, About("Seconds until a shard goes to another worker.", above=0, default_text="learnt")
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ConfigError(
                f"min_workers must be at most max_workers, got {self.min_workers}:{self.max_workers}; give "
                "the smaller first"
            )


class Engine(Protocol):
    """What the line asks of a model."""

    def load(self) -> Loaded:
        """Load the model and check that the settings fit it; a second call costs nothing."""
        ...

    def embed_sample(self, sample: pa.Table) -> EmbeddedSample:
        """Embed both sides of a sample's documents with the surrogate."""
        ...

    def draw_context(self, sample: pa.Table, assignments_N: Int32[np.ndarray, " N"]) -> ContextSet:
        """Draw the context from a clustered sample and embed it."""
        ...

    def begin(self, view: CorpusView) -> Begun:
        """Take the clusters and the context that documents are encoded with."""
        ...

    def encode(
        self, shards: Sequence[Path], on_tokens: Callable[[int], None], area: PendingArea | None
    ) -> Iterator[tuple[int, EncodedShard]]:
        """Encode staged shards and yield each with its position, in the order in which they finish.

        Workers leave them in ``area``, if there is one and they reach it.
        """
        ...

    @property
    def run_tasks(self) -> RunTasks | None:
        """What runs tasks of the commit in other processes, None where this one does all of it."""
        ...

    def close(self) -> None:
        """Release what was loaded and stop what was started; a later call starts it again."""
        ...
