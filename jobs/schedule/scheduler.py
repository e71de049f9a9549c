"""The scheduler: one process for a schedule file, which starts each command as a child when it is due.

    file ──▶ when each is due ──▶ child process ──▶ history
      ▲ read again when it changes   75: again, until the next run is due

One run of a schedule at a time; what came due while one ran, while the host slept or while no scheduler ran
is one run. A child does all the work and can be killed at any moment, as this process can: the next run goes
on. It outlives a killed scheduler, and its writer lock keeps the next run waiting (75) until it has finished.

The history has the newest records, one JSON object a line, beside the file. Only its scheduler writes it,
whole and atomically; any process may read it. A schedule's last run is kept however old it is: it says which
runs were missed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from cairn.jobs.schedule.schedules import REPORTING_FLAGS, Schedule, ScheduleFile
from cairn.pipeline.durable import exclusive_lock, is_locked, raise_storage_error, storage_errors, write_bytes
from cairn.pipeline.errors import CairnError, SchedulerBusyError, SchedulerDownError, TryAgainError

STOP_SECONDS: Final = 0.2
"""How long a request to stop, or a schedule that is due, may go unnoticed."""
RELOAD_SECONDS: Final = 5.0
"""How long an edit of the file may."""
HEALTHY_SECONDS: Final = 60.0
"""How long ago the sign of life of a scheduler in health may be; it gives one every ``RELOAD_SECONDS``.

One that ended is noticed without them, as the kernel drops its lock.
"""
GRACE_SECONDS: Final = 30.0
"""What an interrupted child has to end in before it is killed."""
FIRST_RETRY_SECONDS: Final = 30.0
LONGEST_RETRY_SECONDS: Final = 600.0
BELIEVED_CLOCK_ERROR: Final = timedelta(days=1)
"""A run that is recorded further in the future than this was started by a wrong clock, and says nothing."""

KEPT_RUNS: Final = 1_000
"""Records in the file: some 300 kB, three years of a nightly run."""

INTERRUPTED: Final = 130
"""Exit code of a run that the scheduler or Ctrl-C stopped: it is run again at once."""

_FAILED = 1
_DONE_WITH_QUARANTINE = 3


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
        raise_storage_error(error, f"reading {path}")
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
    with storage_errors("writing the schedules' history"):
        write_bytes(path, "".join(lines).encode())


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


def first_fire(schedule: Schedule, last: ScheduledRun | None, now: datetime) -> datetime:
    """Return when a schedule is to run first: at once after an interrupted or missed run, else when next due.

    Before the first run, times after ``since`` count as missed. An expression that is newer than the last run
    has missed nothing.
    """
    if last is not None and last.cron != schedule.cron:
        return schedule.next_fire(now)
    if last is not None and last.exit_code == INTERRUPTED:
        return now
    done_until = schedule.since if last is None else last.started_at
    if done_until is None or done_until > now + BELIEVED_CLOCK_ERROR:
        return schedule.next_fire(now)
    missed = schedule.latest_fire(now)
    return missed if missed > done_until else schedule.next_fire(max(now, done_until))


def require_scheduler(file: ScheduleFile) -> None:
    """Raise :class:`SchedulerDownError` where no scheduler of this file runs, or its sign of life is old."""
    try:
        age_seconds = abs(time.time() - file.lock_path.stat().st_mtime)
        is_running = is_locked(file.lock_path)
    except FileNotFoundError:
        age_seconds, is_running = None, False
    except OSError as error:
        raise_storage_error(error, f"reading {file.lock_path}")
    if not is_running or age_seconds is None or age_seconds > HEALTHY_SECONDS:
        ended = "" if is_running else "one that ended, "
        got = (
            "none yet"
            if age_seconds is None
            else f"{ended}its last sign of life {age_seconds:,.0f} seconds ago"
        )
        raise SchedulerDownError(
            f"a scheduler must run the schedules of {file.path}, got {got}; start one with `cairn "
            "schedule run`"
        )


@dataclass(slots=True, eq=False)
class Scheduler:
    """Runs the schedules of one file until it is stopped.

    ``command`` is what stands before a schedule's own words, such as ``(sys.executable, "-m",
    "cairn.cli.main")``; ``log`` takes a line an event.
    """

    file: ScheduleFile
    command: Sequence[str]
    log: Callable[[str], None]
    parallel: int = 4
    retry_seconds: float = FIRST_RETRY_SECONDS
    is_stopping: bool = False
    """Set it from a signal handler or another thread."""
    _stopped: threading.Event = field(default_factory=threading.Event)
    _children: set[subprocess.Popen[bytes]] = field(default_factory=set[subprocess.Popen[bytes]])
    _children_lock: threading.Lock = field(default_factory=threading.Lock)
    _history_lock: threading.Lock = field(default_factory=threading.Lock)
    _armed: dict[str, Schedule] = field(default_factory=dict[str, Schedule])
    _due: dict[str, datetime] = field(default_factory=dict[str, datetime])
    _runs: dict[str, Future[None]] = field(default_factory=dict[str, Future[None]])

    def run(self) -> None:
        """Hold the file's lock and run schedules until ``is_stopping``; then interrupt the children and wait.

        Raises :class:`SchedulerBusyError` where another scheduler has the file, and :class:`ConfigError` for
        a file with a bad schedule.
        """
        with (
            exclusive_lock(self.file.lock_path, "the lock of the scheduler", self._busy),
            ThreadPoolExecutor(self.parallel) as pool,
        ):
            self._give_sign_of_life()
            signature = self._signature()
            self._arm(self.file.read())
            try:
                self._watch(pool, signature)
            finally:
                self._interrupt_children()

    def _busy(self, by_whom: str) -> TryAgainError:
        return SchedulerBusyError(
            f"the schedules of {self.file.path} are being run by another scheduler{by_whom}; stop that "
            "one first"
        )

    def _watch(self, pool: ThreadPoolExecutor, signature: tuple[int, int, int] | None) -> None:
        look_again = time.monotonic() + RELOAD_SECONDS
        while not self.is_stopping:
            self._start_due(pool)
            time.sleep(STOP_SECONDS)
            if time.monotonic() < look_again:
                continue
            look_again = time.monotonic() + RELOAD_SECONDS
            self._give_sign_of_life()
            if signature != (signature := self._signature()):
                try:
                    self._arm(self.file.read())
                except CairnError as error:
                    self.log(f'event=refused error="{error}"; the schedules from before hold')

    def _start_due(self, pool: ThreadPoolExecutor) -> None:
        """Start what is due; times that passed meanwhile, as while the host slept, count as one."""
        now = datetime.now(UTC)
        for name, due in self._due.items():
            if due <= now:
                schedule = self._armed[name]
                self._due[name] = schedule.next_fire(now)
                if name in self._runs and not self._runs[name].done():
                    self._say(name, "still-running")
                else:
                    self._runs[name] = pool.submit(self._run, schedule)

    def _give_sign_of_life(self) -> None:
        try:
            os.utime(self.file.lock_path)
        except OSError as error:
            self.log(f'event=no-sign-of-life error="{error.strerror}"')

    def _signature(self) -> tuple[int, int, int] | None:
        with contextlib.suppress(OSError):
            found = self.file.path.stat()
            return found.st_ino, found.st_mtime_ns, found.st_size
        return None

    def _arm(self, schedules: Mapping[str, Schedule]) -> None:
        last, now = last_runs(read_history(self.file.history_path)), datetime.now(UTC)
        for name in self._armed.keys() - schedules.keys():
            del self._due[name]
            self._say(name, "removed")
        for name, schedule in schedules.items():
            if self._armed.get(name) != schedule:
                self._due[name] = fire = first_fire(schedule, last.get(name), now)
                self._say(name, "armed", next=fire.astimezone(schedule.zone).isoformat(timespec="minutes"))
        self._armed = dict(schedules)

    def _run(self, schedule: Schedule) -> None:
        started_at, started_seconds = datetime.now(UTC), time.monotonic()
        give_up_at = schedule.next_fire(started_at)
        self._say(schedule.name, "started")
        attempts, delay = 0, self.retry_seconds
        while True:
            attempts += 1
            exit_code, report, error = self._attempt(schedule)
            is_late = datetime.now(UTC) + timedelta(seconds=delay) >= give_up_at
            if exit_code != TryAgainError.exit_code or is_late or self._stopped.is_set():
                break
            self._say(schedule.name, "again", exit_code=exit_code, in_seconds=round(delay), error=error)
            self._stopped.wait(delay)
            delay = min(2 * delay, LONGEST_RETRY_SECONDS)
        if exit_code == _DONE_WITH_QUARANTINE and report.get("newly_quarantined") == 0:
            exit_code = 0  # the same rows as before, which someone has seen or leaves as they are
        run = ScheduledRun(
            schedule=schedule.name,
            cron=schedule.cron,
            started_at=started_at,
            seconds=time.monotonic() - started_seconds,
            exit_code=exit_code,
            attempts=attempts,
            counts=report,
            error=None if exit_code in (0, _DONE_WITH_QUARANTINE) else error,
        )
        facts = {
            "exit_code": exit_code,
            "seconds": round(run.seconds, 1),
            "attempts": attempts,
            **report,
            "error": run.error,
        }
        self._say(schedule.name, "finished", **facts)
        try:
            with self._history_lock:
                append_run(self.file.history_path, run)
        except CairnError as storage_error:
            self._say(schedule.name, "not-recorded", error=str(storage_error))

    def _attempt(self, schedule: Schedule) -> tuple[int, dict[str, int], str | None]:
        """Run the command once; return exit code, numbers of its report and last line of its stderr."""
        folder = self.file.path.parent / (schedule.folder or "")
        command = [*self.command, *schedule.run, *REPORTING_FLAGS[schedule.run[0]]]
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaints:
            with self._children_lock:
                if self._stopped.is_set():
                    return INTERRUPTED, {}, None
                try:
                    # A session of its own: a Ctrl-C in this terminal must reach it once, by this process.
                    child = subprocess.Popen(  # noqa: S603 (the words are the user's own command line)
                        command,
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=complaints,
                        start_new_session=True,
                    )
                except OSError as error:
                    return _FAILED, {}, f"the command must start in {folder}, got: {error.strerror}"
                self._children.add(child)
            exit_code = child.wait()
            with self._children_lock:
                self._children.discard(child)
            if self._stopped.is_set() and exit_code not in (0, _DONE_WITH_QUARANTINE):
                exit_code = INTERRUPTED
            error = _last_line(complaints)
            return (
                exit_code if exit_code >= 0 else 128 - exit_code,
                _numbers(_last_line(output)),
                error and error.removeprefix("error: "),
            )

    def _interrupt_children(self) -> None:
        """Let what runs end as if by Ctrl-C, and kill what does not: a killed run is made up for, too."""
        with self._children_lock:
            self._stopped.set()
            children = list(self._children)
        for child in children:
            child.send_signal(signal.SIGINT)
        deadline = time.monotonic() + GRACE_SECONDS
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            child.kill()

    def _say(self, name: str, event: str, **facts: object) -> None:
        known = {key: value for key, value in facts.items() if value is not None}
        words = [
            f"{key}={value if isinstance(value, int | float) else json.dumps(value)}"
            for key, value in known.items()
        ]
        self.log(" ".join([f"schedule={name}", f"event={event}", *words]))


def _last_line(stream: Any) -> str | None:
    stream.seek(0)
    lines = stream.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def _numbers(report: str | None) -> dict[str, int]:
    try:
        found: Any = json.loads(report or "{}")
    except ValueError:
        return {}
    return (
        {key: value for key, value in found.items() if isinstance(value, int)}
        if isinstance(found, dict)
        else {}
    )
