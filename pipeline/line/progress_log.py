"""Progress as lines of a log: one a stage, and one every ``SILENT_SECONDS`` while a long stage works."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

SILENT_SECONDS: Final = 30.0
"""The longest silence of a log while a stage works."""


class ProgressLog:
    """A :class:`cairn.pipeline.types.ProgressListener` that writes lines; ``finish`` ends the last stage."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._stage: str | None = None
        self._started_seconds = self._spoke_seconds = time.monotonic()
        self._last = (0, "")

    def __call__(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """Hear where a stage stands; another stage name ends the one before."""
        if stage != self._stage:
            self.finish()
            self._stage = stage
            self._started_seconds = time.monotonic()
        self._last = (done, unit)
        if time.monotonic() - self._spoke_seconds >= SILENT_SECONDS:
            self._spoke_seconds = time.monotonic()
            self._write(f"stage={stage} done={done} total={total} unit={unit}")

    def finish(self) -> None:
        """Say what the stage has done, where there is one."""
        if self._stage is not None:
            done, unit = self._last
            self._write(
                f"stage={self._stage} done={done} unit={unit} "
                f"seconds={time.monotonic() - self._started_seconds:.1f}"
            )
            self._stage = None
