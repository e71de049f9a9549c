"""What a person sees while a long stage runs, and the tables at its end.

Bars (counts, rate, time left) are drawn on stderr only when it is a terminal; otherwise stages leave lines
(``cairn.pipeline.line.progress_log``).
"""

from __future__ import annotations

import codecs
import json
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import click
from typing_extensions import override

if TYPE_CHECKING:
    from tqdm import tqdm

_STAGE_WIDTH = 8
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal obeys, but for tab and newline."""


ESCAPED: Final = "cairn-escaped"
"""Name of what writes characters that an encoding lacks as JSON escapes them."""


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error(ESCAPED, _escape)


def printable(text: str) -> str:
    r"""Write characters that a terminal obeys as JSON escapes them, such as `\u001b`.

    Texts, titles and names of files may hold any: they could name its window, or fill its clipboard.
    """
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text so that no terminal obeys it; JSON stays JSON."""
    click.echo(printable(str(text)), err=err, nl=nl)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    echo(f"warning: {text}", err=True)


_WAITS: Final = logging.getLogger("cairn.pipeline.encode.endpoint_requests")
"""Says that a server does not answer and is waited for, and that it answers again."""


class _Notes(logging.Handler):
    """Prints lines of a log between bars."""

    def __init__(self, bars: ProgressBars) -> None:
        super().__init__()
        self._bars = bars

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._bars.say(record.getMessage())


class ProgressBars:
    """A :class:`ProgressListener` that draws one bar a stage; use it as a context manager."""

    def __init__(self, *, quiet: bool = False) -> None:
        from cairn.pipeline.line.progress_log import ProgressLog

        self._quiet = quiet
        self._log = None if sys.stderr.isatty() else ProgressLog(lambda line: echo(line, err=True))
        self._stage: str | None = None
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> ProgressBars:
        self._notes = _Notes(self)
        _WAITS.addHandler(self._notes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _WAITS.removeHandler(self._notes)
        if self._log is not None:
            self._log.finish()
        elif self._bar is not None:
            self._bar.close()

    def __call__(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """Show where a stage stands; another stage name ends the bar before."""
        if self._quiet:
            return
        if self._log is not None:
            self._log(stage, done, total, unit)
            return
        if self._bar is None or stage != self._stage:
            self._bar = self._start(stage, total, unit)
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def say(self, line: str) -> None:
        """Print a line between the bars."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if not self._quiet:
            echo(line, err=True)

    def _start(self, stage: str, total: int | None, unit: str) -> tqdm[Any]:
        from tqdm import tqdm

        if self._bar is not None:
            self._bar.close()
        self._stage = stage
        return tqdm(
            desc=stage.ljust(_STAGE_WIDTH),
            total=total,
            unit=f" {unit}",
            unit_scale=True,
            file=sys.stderr,
            dynamic_ncols=True,
            leave=True,
        )


def table(rows: Iterable[Sequence[object]]) -> str:
    """Lay out rows in two or more left-aligned columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))] if cells else []
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def cell(value: Any) -> str:
    """Write a value of a report for a person, a float as seconds."""
    if isinstance(value, float):
        return duration(value)
    if isinstance(value, int):
        return thousands(value)
    if isinstance(value, Mapping):
        told = {name: each for name, each in value.items() if each is not None}
        return "; ".join(f"{name}: {cell(each)}" for name, each in told.items()) or "none"
    return value if isinstance(value, str) else "; ".join(map(str, value)) or "none"


def facts(report: Mapping[str, Any]) -> str:
    """Lay out a report by the names of its values, without those that are None."""
    return table((name.replace("_", " "), cell(value)) for name, value in report.items() if value is not None)


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
