"""Schedules: what runs when, in a TOML file that people write.

    [nightly]
    cron = "30 2 * * *"
    time-zone = "Europe/Vienna"         the machine's own where left out
    run = ["ingest", "articles/", "--collection", "handbook", "--sync"]
    since = 2026-11-21T09:00:00Z        a run that was due after this and missed is made up for
    folder = "/srv/corpus"              where the command runs, seen from the file's own folder, the default

``run`` is a command line of `cairn`. Expressions mean what they mean to Debian's cron, also when clocks
change: a time that is skipped runs at once afterwards, one that comes twice runs once. This module knows the
file and the calendar; ``scheduler`` starts things.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo

from cairn.pipeline import durable
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.settings_file import check_setting
from cronsim import CronSim, CronSimError
from tzlocal import get_localzone

SCHEDULE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")

REPORTING_FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    "ingest": ("--json", "--quiet"),
    "plan": ("--json", "--quiet"),
    "submit": ("--json",),  # a job says in its log, on stderr, why it failed
}
"""The verbs a schedule may run, with flags that make a report the last line of stdout.

The last line of stderr then is the reason of a failure.
"""

_CLOCK_CHANGE: Final = timedelta(hours=3)
"""By how much local clocks are set at once: the most that Debian's cron makes up for."""

_KEYS: Final = ("cron", "time-zone", "run", "since", "folder")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One command line and its times; None takes the machine's zone, and the folder of the file."""

    name: str
    cron: str
    run: tuple[str, ...]
    time_zone: str | None = None
    since: datetime | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        if not SCHEDULE_NAME.fullmatch(self.name):
            raise ConfigError(
                f"a schedule's name must match ^[a-z0-9][a-z0-9_-]{{0,62}}$, got {self.name[:80]!r}; "
                "use lower-case letters, digits, - and _"
            )
        if not self.run or self.run[0] not in REPORTING_FLAGS:
            verbs = ", ".join(REPORTING_FLAGS)
            raise ConfigError(
                f"schedule {self.name!r} must run one of {verbs}, got {' '.join(self.run[:1]) or 'nothing'!r}"
            )
        if self.since is not None and self.since.tzinfo is None:
            raise ConfigError(
                f"since of schedule {self.name!r} must say its offset, got {self.since}; write "
                f"{self.since}Z for UTC"
            )
        try:
            runs_ever = (
                len(self.cron.split()) == 5
                and next(CronSim(self.cron, datetime.now(self.zone)), None) is not None
            )
        except CronSimError as error:
            raise ConfigError(f"{self._bad_cron} ({str(error).lower()})") from None
        if not runs_ever:
            raise ConfigError(self._bad_cron)

    @property
    def _bad_cron(self) -> str:
        return (
            f"cron of schedule {self.name!r} must be minute, hour, day, month and weekday that come to "
            f"pass, got {self.cron!r}; "
            "write '30 2 * * *' for every night at 2:30"
        )

    @property
    def zone(self) -> ZoneInfo:
        """The zone the expression is read in."""
        try:
            return get_localzone() if self.time_zone is None else ZoneInfo(self.time_zone)
        except (KeyError, ValueError, OSError):
            got = "none from this machine" if self.time_zone is None else repr(self.time_zone)
            raise ConfigError(
                f"time-zone of schedule {self.name!r} must be a name of the IANA database, got {got}; "
                "write Europe/Vienna or UTC"
            ) from None

    @property
    def in_words(self) -> str:
        """The expression as a person says it."""
        return CronSim(self.cron, datetime.now(UTC)).explain()

    def next_fire(self, after: datetime) -> datetime:
        """Return the first time later than ``after``, in UTC."""
        # Where clocks go back a time stands for two moments: start before the change, compare moments.
        fires = CronSim(self.cron, (after - _CLOCK_CHANGE).astimezone(self.zone))
        return next(moment for fire in fires if (moment := fire.astimezone(UTC)) > after)

    def latest_fire(self, until: datetime) -> datetime:
        """Return the last time that is not later than ``until``, in UTC."""
        fires = CronSim(self.cron, (until + _CLOCK_CHANGE).astimezone(self.zone), reverse=True)
        return next(moment for fire in fires if (moment := fire.astimezone(UTC)) <= until)


@dataclass(frozen=True, slots=True)
class ScheduleFile:
    """The file of all schedules; a missing one holds none."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.path.absolute())
        if not self.path.parent.is_dir():
            raise ConfigError(
                f"the schedule file must lie in a folder that is there, got {self.path.parent}; make it first"
            )

    @property
    def lock_path(self) -> Path:
        """What the one scheduler of this file holds."""
        return self.path.with_name(f".{self.path.name}.lock")

    @property
    def history_path(self) -> Path:
        """What ran, one JSON object a line."""
        return self.path.with_name(f"{self.path.stem}-history.jsonl")

    def read(self) -> dict[str, Schedule]:
        """Return the schedules by name, in the file's order; one that is none raises :class:`ConfigError`."""
        return {name: self._schedule(name, table) for name, table in self._tables().items()}

    def require(self, name: str, names: Mapping[str, Any]) -> None:
        """Raise :class:`ConfigError` for a name that is not among ``names``, and list those there are."""
        if name not in names:
            raise ConfigError(
                f"schedule {name!r} must stand in {self.path}; schedules there: "
                f"{', '.join(names) or 'none yet'}"
            )

    def _schedule(self, name: str, table: Any) -> Schedule:
        keys = set(table) if isinstance(table, dict) else set[str]()
        unknown = sorted(keys - set(_KEYS))
        if unknown or not {"cron", "run"} <= keys:
            fault = f"unknown: {unknown[0]}" if unknown else "cron and run are needed"
            raise ConfigError(
                f"schedule {name!r} in {self.path} must be a table of {', '.join(_KEYS)} ({fault})"
            )
        for key in keys - {"since"}:
            kind = tuple[str, ...] if key == "run" else str
            check_setting(f"{key} of schedule {name!r} in {self.path}", kind, table[key])
        if not isinstance(table.get("since"), datetime | None):
            raise ConfigError(
                f"since of schedule {name!r} in {self.path} must be a date with its time, got "
                f"{table['since']}"
            )
        return Schedule(
            name=name,
            cron=table["cron"],
            run=tuple(table["run"]),
            time_zone=table.get("time-zone"),
            since=table.get("since"),
            folder=Path(table["folder"]) if "folder" in table else None,
        )

    def _tables(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ConfigError(f"{self.path} must be valid TOML: {error}") from error
        except OSError as error:
            durable.raise_storage_error(error, f"reading {self.path}")
