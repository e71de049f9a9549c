"""What scheduled runs did: the newest records, one JSON object a line, beside the schedule file.

Only the scheduler of a file writes its history, whole and atomically; any process may read it. A schedule's
last run is kept however old it is: it says which runs were missed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from cairn.pipeline import durable

KEPT_RUNS: Final = 1_000
"""Records in the file: some 300 kB, three years of a nightly run."""

INTERRUPTED: Final = 130
"""Exit code of a run that the scheduler or Ctrl-C stopped: it is run again at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRun:
    """One run of a schedule.

    ``counts`` are the whole numbers of the command's JSON report, ``error`` is the sentence of its failure.
    ``attempts`` exceeds 1 where the command ended with 75, "try again"; ``seconds`` includes the pauses.
    """

    schedule: str
    cron: str
    started_at: datetime
    seconds: float
    exit_code: int
    attempts: int = 1
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        started_at = self.started_at.astimezone(UTC).isoformat(timespec="seconds")
        return {**asdict(self), "started_at": started_at, "seconds": round(self.seconds, 1)}


def read_history(path: Path) -> tuple[ScheduledRun, ...]:
    """Return the records, oldest first; lines that are no record are passed over."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return ()
    except OSError as error:
        durable.raise_storage_error(error, f"reading {path}")
    return tuple(run for run in map(_run_of, lines) if run is not None)


def append_run(path: Path, run: ScheduledRun) -> None:
    """Write the history with one record more, without the oldest beyond ``KEPT_RUNS``."""
    runs = (*read_history(path), run)
    last = {id(found) for found in last_runs(runs).values()}
    lines = [
        json.dumps(found.to_dict(), ensure_ascii=False) + "\n"
        for number, found in enumerate(runs, start=1)
        if number > len(runs) - KEPT_RUNS or id(found) in last
    ]
    with durable.storage_errors("writing the schedules' history"):
        durable.write_bytes(path, "".join(lines).encode())


def last_runs(runs: Sequence[ScheduledRun]) -> dict[str, ScheduledRun]:
    """Return each schedule's last run."""
    return {run.schedule: run for run in runs}


def _run_of(line: bytes) -> ScheduledRun | None:
    try:
        record: dict[str, Any] = json.loads(line)
        record["started_at"] = datetime.fromisoformat(record["started_at"]).astimezone(UTC)
        return ScheduledRun(**record)
    except (ValueError, TypeError, KeyError):
        return None
