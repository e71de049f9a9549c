"""What a person sees while a long stage runs, and the tables at its end.

Bars (counts, rate, time left) are drawn on stderr only when it is a terminal; otherwise a long stage leaves a line now and then, and
each finished one a line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import click
from tqdm import tqdm

_STAGE_WIDTH = 8
_SILENT_SECONDS = 30.0
"""How long a log may say nothing while a stage works."""


class ProgressBars:
    """A :class:`pipeline.types.ProgressListener` that draws one bar a stage; use it as a context manager."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._stage: str | None = None
        self._bar: tqdm[Any] | None = None
        self._started_seconds = self._spoke_seconds = time.monotonic()
        self._last = (0, "")

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._finish()

    def __call__(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """Show where a stage stands; another stage name ends the bar before."""
        if self._quiet:
            return
        if stage != self._stage:
            self._finish()
            self._start(stage, total, unit)
        self._last = (done, unit)
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)
        elif not self._live and time.monotonic() - self._spoke_seconds >= _SILENT_SECONDS:
            self._spoke_seconds = time.monotonic()
            click.echo(f"stage={stage} done={done} total={total} unit={unit}", err=True)

    def _start(self, stage: str, total: int | None, unit: str) -> None:
        self._stage = stage
        self._started_seconds = time.monotonic()
        if self._live:
            self._bar = tqdm(
                desc=stage.ljust(_STAGE_WIDTH),
                total=total,
                unit=f" {unit}",
                unit_scale=True,
                file=sys.stderr,
                dynamic_ncols=True,
                leave=True,
            )

    def _finish(self) -> None:
        if self._stage is None:
            return
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        else:
            done, unit = self._last
            seconds = time.monotonic() - self._started_seconds
            click.echo(f"stage={self._stage} done={done} unit={unit} seconds={seconds:.1f}", err=True)
        self._stage = None


def table(rows: Iterable[Sequence[object]]) -> str:
    """Lay out rows in two or more left-aligned columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))] if cells else []
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)


def thousands(number: float) -> str:
    """Write 1234567 as ``1,234,567``."""
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """Write seconds as a person says them: ``8.2 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def size(num_bytes: float) -> str:
    """Write bytes in the largest binary unit below them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
