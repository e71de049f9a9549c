"""The log of a training run: one JSON object a line.

A resumed run cuts the log back to where its checkpoint stood, so that no step is logged twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cairn.pipeline import durable
from cairn.pipeline.lab.train.finite import require_finite


class TrainingLog:
    """Appends lines; ``size`` is what a checkpoint remembers."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self._path = path
        with durable.storage_errors("writing the log"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            with path.open("r+b") as stream:
                stream.truncate(min(keep_bytes, path.stat().st_size))
        self.size = path.stat().st_size

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line; NaN or infinity raises :class:`cairn.pipeline.lab.train.finite.NotFiniteError`."""
        require_finite({name: value for name, value in record.items() if isinstance(value, float)})
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
        with durable.storage_errors("writing the log"), self._path.open("ab") as stream:
            stream.write(line)
        self.size += len(line)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log; a last line that was being written when the process died is left out."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    return [json.loads(line) for line in lines[:-1]]
