"""The local engine: one encoder worker in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.index.segments.parts import RunTasks
from cairn.pipeline.index.worker_files import PendingArea
from cairn.pipeline.line.corpus_view import CorpusView
from cairn.pipeline.line.engine_records import Begun, EmbeddedSample, EncodedShard, Loaded
from jaxtyping import Int32

if TYPE_CHECKING:
    from cairn.pipeline.line.encoder_worker import EncoderWorker


class LocalEngine:
    """An :class:`Engine` in this process; loads torch and the model at its first call."""

    def __init__(self, config: IngestConfig) -> None:
        self._config = config
        self._loaded: EncoderWorker | None = None

    @property
    def _worker(self) -> EncoderWorker:
        if self._loaded is None:
            from cairn.pipeline.line.encoder_worker import EncoderWorker  # imports torch

            self._loaded = EncoderWorker(self._config)
            self._loaded.load()
        return self._loaded

    def load(self) -> Loaded:
        """See :class:`cairn.pipeline.line.engine.Engine`."""
        return self._worker.load()

    def embed_sample(self, sample: pa.Table) -> EmbeddedSample:
        """See :class:`cairn.pipeline.line.engine.Engine`."""
        return self._worker.embed_sample(sample)

    def draw_context(self, sample: pa.Table, assignments_N: Int32[np.ndarray, " N"]) -> ContextSet:
        """See :class:`cairn.pipeline.line.engine.Engine`."""
        return self._worker.draw_context(sample, assignments_N)

    def begin(self, view: CorpusView) -> Begun:
        """See :class:`cairn.pipeline.line.engine.Engine`."""
        return self._worker.begin(view)

    def encode(
        self, shards: Sequence[Path], on_tokens: Callable[[int], None], area: PendingArea | None
    ) -> Iterator[tuple[int, EncodedShard]]:
        """See :class:`Engine`; shards come in order, ``on_tokens`` is called for every batch."""
        if shards:
            self._worker.share_store(area)
        for number, shard in enumerate(shards):
            yield number, self._worker.encode(shard.read_bytes(), on_tokens)

    @property
    def run_tasks(self) -> RunTasks | None:
        """See :class:`cairn.pipeline.line.engine.Engine`."""
        return None

    def close(self) -> None:
        """See :class:`cairn.pipeline.line.engine.Engine`."""
        self._loaded = None
