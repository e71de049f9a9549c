"""What the line asks of a model: :class:`Engine`.

``local_engine`` answers in this process, ``cairn.jobs.ray_cluster`` by the workers of a Ray cluster. An
engine loads and connects only when it is first called: a run without changes calls none, and loads neither
torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from cairn.pipeline.context.store import ContextSet
    from cairn.pipeline.index.segments.parts import RunTasks
    from cairn.pipeline.index.worker_files import PendingArea
    from cairn.pipeline.line.corpus_view import CorpusView
    from cairn.pipeline.line.engine_records import Begun, EmbeddedSample, EncodedShard, Loaded
    from jaxtyping import Int32


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
