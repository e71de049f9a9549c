"""One run of the line: what its steps work on, how long they take, and the record it leaves."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from cairn.pipeline import durable
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.corpus.ledger import Ledger
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.rows import StoredRows
from cairn.pipeline.line.engine import Engine
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.types import ProgressListener


def _new_run_id() -> str:
    """Name a run so that names sort by time and never collide."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What the steps of a run share, under the writer lock.

    ``base`` is the generation whose clusters, context and model are kept, None where they are drawn.
    ``stored`` are its rows, partition by partition, none in the first run of a collection. ``keeps_work``
    says whether what it encodes is kept for the next run where this one is killed.
    """

    layout: CollectionLayout
    config: IngestConfig
    base: Manifest | None
    stored: Sequence[StoredRows]
    metadata_fields: Sequence[pa.Field[Any]]
    sources: tuple[str, ...]
    ledger: Ledger
    engine: Engine
    progress: StageWatch
    keeps_work: bool = True
    run_id: str = field(default_factory=_new_run_id)

    def record(self, **content: Any) -> None:
        """Write ``runs/<run_id>.json``: what was asked for and what was done."""
        with durable.storage_errors("recording the run"):
            durable.make_folder(self.layout.runs_folder)
            durable.write_json(
                self.layout.runs_folder / f"{self.run_id}.json",
                {"run_id": self.run_id, "settings": self.config.to_dict(), **content},
            )


class StageWatch:
    """A progress listener that passes reports on and measures how long each stage takes.

    What comes before the first report, such as loading the model, is the stage ``setup``.
    """

    def __init__(self, listener: ProgressListener) -> None:
        self._listener = listener
        self._stage = "setup"
        self._stage_started_seconds = time.monotonic()
        self._finished = defaultdict[str, float](float)

    def __call__(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """Take a report; the name of another stage ends the one before."""
        if stage != self._stage:
            self._close()
            self._stage = stage
        self._listener(stage, done, total, unit)

    def _close(self) -> None:
        now = time.monotonic()
        self._finished[self._stage] += now - self._stage_started_seconds
        self._stage_started_seconds = now

    def stage_seconds(self) -> dict[str, float]:
        """Return the seconds of each stage so far, the current one included: together all that passed."""
        self._close()
        return dict(self._finished)
