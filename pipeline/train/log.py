"""The log of a run, a JSON object a line, and its picture: loss, scores and learning rate over steps, as SVG by hand.

A resumed run cuts the log back to where its checkpoint stood, so that no step is told twice.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pipeline import durable

WIDTH, HEIGHT, MARGIN = 720, 180, 56
CURVES: Final = (
    ("loss", "#1b6ca8"),
    ("heldout_ndcg_at_10", "#b8561b"),
    ("heldout_score", "#b8561b"),
    ("dev_score", "#8a2b57"),
    ("turn_loss", "#1b6ca8"),
    ("lr", "#4d7c3a"),
)
DEV_PREFIX: Final = "dev/"
"""What stands before the measures of dev sets; each has a panel of its own behind the others."""
DEV_COLOUR: Final = "#77516a"


class TrainingLog:
    """Appends lines; ``size`` is what a checkpoint remembers."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self._path = path
        with durable.storage_errors("writing the log"):
            path.touch()
            with path.open("r+b") as stream:
                stream.truncate(min(keep_bytes, path.stat().st_size))
        self.size = path.stat().st_size

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line."""
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
        with durable.storage_errors("writing the log"), self._path.open("ab") as stream:
            stream.write(line)
        self.size += len(line)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log; a last line that was being written when the process died is left out."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    return [json.loads(line) for line in lines[:-1]]


def write_plot(log_path: Path, plot_path: Path) -> None:
    """Draw the log."""
    durable.write_bytes(plot_path, plot(read_log(log_path)).encode())


def plot(records: Sequence[Mapping[str, Any]]) -> str:
    """Return one panel a curve as an SVG document; a curve nobody logged has no panel."""
    panels: list[str] = []
    measures = dict.fromkeys(name for record in records for name in record if name.startswith(DEV_PREFIX))
    for name, colour in (*CURVES, *((measure, DEV_COLOUR) for measure in measures)):
        points = [(float(record["step"]), float(record[name])) for record in records if name in record]
        if points:
            panels.append(_panel(name, colour, points, float(len(panels) * HEIGHT)))
    height = max(1, len(panels)) * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n' + "\n".join(panels) + "\n</svg>\n"
    )


def _panel(name: str, colour: str, points: Sequence[tuple[float, float]], top: float) -> str:
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    span_x, span_y = max(steps) - min(steps) or 1.0, high - low or 1.0
    inner_width, inner_height = WIDTH - 2 * MARGIN, HEIGHT - MARGIN
    path = " ".join(
        f"{MARGIN + (step - min(steps)) / span_x * inner_width:.1f},{top + MARGIN / 2 + (high - value) / span_y * inner_height:.1f}"
        for step, value in points
    )
    bottom = top + MARGIN / 2 + inner_height
    return (
        f'<text x="{MARGIN}" y="{top + 16}" fill="{colour}">{html.escape(name)}</text>\n'
        f'<line x1="{MARGIN}" y1="{bottom}" x2="{MARGIN + inner_width}" y2="{bottom}" stroke="#999"/>\n'
        f'<text x="4" y="{top + MARGIN / 2 + 8}">{high:.4g}</text><text x="4" y="{bottom}">{low:.4g}</text>\n'
        f'<text x="{MARGIN}" y="{bottom + 14}">step {min(steps):.0f}</text>'
        f'<text x="{MARGIN + inner_width}" y="{bottom + 14}" text-anchor="end">{max(steps):.0f}</text>\n'
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    )
