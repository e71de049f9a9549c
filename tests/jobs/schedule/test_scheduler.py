import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Generator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cairn.jobs.schedule import scheduler as scheduler_module
from cairn.jobs.schedule.scheduler import (
    INTERRUPTED,
    KEPT_RUNS,
    ScheduledRun,
    Scheduler,
    append_run,
    first_fire,
    last_runs,
    read_history,
    require_scheduler,
)
from cairn.jobs.schedule.schedules import Schedule, ScheduleFile
from cairn.pipeline.durable import exclusive_lock
from cairn.pipeline.errors import ConfigError, SchedulerBusyError, SchedulerDownError

from tests.served_stones import wait_until

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SECONDS = 300.0
"""How long a test waits for what takes well under one where nothing else runs."""

REPORT = """
import sys
print("warning: progress nobody asked for", file=sys.stderr)
print('{"rows": 3, "indexed": 2, "generation": 7, "collection": "handbook", "seconds": 0.1}')
"""


def nightly(**changes: object) -> Schedule:
    run = ("ingest", "articles/", "--collection", "handbook")
    return Schedule(
        **{
            "name": "nightly",
            "cron": "30 2 * * *",
            "time_zone": "UTC",
            "run": run,
            "since": LONG_AGO,
            **changes,
        }
    )


def yearly(**changes: object) -> Schedule:
    """A schedule that was missed, and that no test sees coming due."""
    return nightly(cron="0 0 1 1 *", **changes)


def add(file: ScheduleFile, schedule: Schedule) -> None:
    lines = [f"[{schedule.name}]", f"since = {LONG_AGO.isoformat()}"]
    lines += [f"cron = {json.dumps(schedule.cron)}", f"run = {json.dumps(schedule.run)}"]
    if schedule.folder is not None:
        lines.append(f"folder = {json.dumps(str(schedule.folder))}")
    file.path.write_text("\n".join(lines))


def ran(hours_ago: float = 0, **changes: object) -> ScheduledRun:
    started_at = NOW - timedelta(hours=hours_ago)
    told = {
        "schedule": "nightly",
        "cron": "30 2 * * *",
        "started_at": started_at,
        "seconds": 1.0,
        "exit_code": 0,
    }
    return ScheduledRun(**{**told, **changes})


@pytest.fixture
def file(tmp_path: Path) -> ScheduleFile:
    return ScheduleFile(tmp_path / "schedules.toml")


@pytest.fixture
def make(file: ScheduleFile, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scheduler]:
    """Return a maker of schedulers whose children run a program in the place of cairn.

    ``lines`` collects their logs.
    """
    monkeypatch.setattr(scheduler_module, "STOP_SECONDS", 0.01)
    monkeypatch.setattr(scheduler_module, "RELOAD_SECONDS", 0.05)
    lines: list[str] = []

    def make_one(program: str = REPORT) -> Scheduler:
        return Scheduler(
            file=file, command=(sys.executable, "-c", program), log=lines.append, retry_seconds=0.05
        )

    make_one.lines = lines  # type: ignore[attr-defined]
    return make_one


@contextlib.contextmanager
def running(scheduler: Scheduler) -> Generator[None]:
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    try:
        yield
    finally:
        scheduler.is_stopping = True
        thread.join(SECONDS)
        assert not thread.is_alive()


def runs(file: ScheduleFile, number: int = 1) -> tuple[ScheduledRun, ...]:
    wait_until(lambda: len(read_history(file.history_path)) >= number)
    return read_history(file.history_path)


def test_missed_runs_are_made_up_for_once_with_the_counts_of_the_report(
    make: Callable[..., Scheduler], file: ScheduleFile
) -> None:
    add(file, yearly())
    with running(make()):
        (run,) = runs(file)
    assert (run.schedule, run.exit_code, run.attempts, run.error) == ("nightly", 0, 1, None)
    assert run.counts == {"rows": 3, "indexed": 2, "generation": 7}
    with running(make()):
        wait_until(lambda: sum("event=armed" in line for line in make.lines) == 2)
    assert len(read_history(file.history_path)) == 1


ATTEMPTED = "seen = open('attempts', 'a+'); seen.write('x'); sys.exit(75 if seen.tell() < 3 else 0)"
ENDS = {
    "quarantined before": ("print('{\"newly_quarantined\": 0}'); sys.exit(3)", {}, (0, 1, None)),
    "newly quarantined": ("print('{\"newly_quarantined\": 1}'); sys.exit(3)", {}, (3, 1, None)),
    "failed": (
        "sys.stderr.write('begun\\nerror: source a/ does not exist\\n'); sys.exit(2)",
        {},
        (2, 1, "source a/ does not exist"),
    ),
    "job that failed": (
        "sys.stderr.write('submitted\\nerror: no source\\n'); sys.exit(2 if '--json' in sys.argv else 9)",
        {"run": ("submit", "nightly.toml")},
        (2, 1, "no source"),
    ),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", {}, (137, 1, None)),
    "busy twice": (ATTEMPTED, {}, (0, 3, None)),
    "folder that vanished": ("", {"folder": Path("gone")}, (1, 1, "the command must start in")),
}


@pytest.mark.parametrize(("program", "changes", "end"), ENDS.values(), ids=ENDS)
def test_end_of_a_command_is_recorded_and_only_75_is_tried_again(
    make: Callable[..., Scheduler],
    file: ScheduleFile,
    program: str,
    changes: dict[str, object],
    end: tuple[int, int, str | None],
) -> None:
    add(file, yearly(**changes))
    with running(make(f"import os, signal, sys; {program}")):
        (run,) = runs(file)
    exit_code, attempts, error = end
    assert (run.exit_code, run.attempts) == (exit_code, attempts)
    assert (run.error or "").startswith(error or "")
    assert (run.error is None) == (error is None)
    assert run.counts == ({"newly_quarantined": exit_code // 3} if "quarantined" in program else {})
    assert sum("event=again" in line for line in make.lines) == attempts - 1


@pytest.mark.parametrize("is_relative", [False, True])
def test_command_gets_its_words_its_folder_and_the_flags_of_a_report(
    is_relative: bool, make: Callable[..., Scheduler], file: ScheduleFile
) -> None:
    corpus = file.path.parent / "corpus"
    corpus.mkdir()
    add(file, yearly(folder=Path("corpus") if is_relative else corpus))
    with running(make("import sys; open('seen', 'w').write(' '.join(sys.argv[1:]))")):
        runs(file)
    assert (corpus / "seen").read_text() == "ingest articles/ --collection handbook --json --quiet"


def test_scheduler_gives_signs_of_life_and_one_that_hangs_is_noticed_by_its_last(
    make: Callable[..., Scheduler], file: ScheduleFile
) -> None:
    with pytest.raises(SchedulerDownError, match="got none yet; start one with `cairn schedule run`"):
        require_scheduler(file)
    with running(make()):
        wait_until(file.lock_path.exists)
        os.utime(file.lock_path, (0, 0))
        wait_until(lambda: file.lock_path.stat().st_mtime > 0)
        require_scheduler(file)
    with pytest.raises(
        SchedulerDownError, match=r"got one that ended, its last sign of life \d+ seconds ago"
    ):
        require_scheduler(file)
    with exclusive_lock(file.lock_path, "the lock of the scheduler", SchedulerBusyError):
        os.utime(file.lock_path, (0, 0))
        with pytest.raises(SchedulerDownError, match=r"got its last sign of life \d.* seconds ago"):
            require_scheduler(file)


@pytest.mark.parametrize("ignores_interrupts", [False, True])
def test_stop_interrupts_or_kills_what_runs_and_the_next_start_runs_it_at_once(
    make: Callable[..., Scheduler],
    file: ScheduleFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ignores_interrupts: bool,
) -> None:
    program = "import pathlib, time; pathlib.Path('started').touch(); time.sleep(600)"
    if ignores_interrupts:
        monkeypatch.setattr(scheduler_module, "GRACE_SECONDS", 0.1)
        program = f"import signal; signal.signal(2, signal.SIG_IGN); {program}"
    add(file, yearly())
    with running(make(program)):
        wait_until((tmp_path / "started").exists)
    assert [run.exit_code for run in read_history(file.history_path)] == [INTERRUPTED]
    with running(make()):
        assert [each.exit_code for each in runs(file, 2)] == [INTERRUPTED, 0]


def test_runs_of_a_schedule_never_overlap_and_those_due_meanwhile_are_left_out(
    make: Callable[..., Scheduler], file: ScheduleFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Schedule, "next_fire", lambda self, after: after + timedelta(seconds=0.05))
    add(file, yearly())
    program = "import os, time; os.mkdir('busy'); time.sleep(0.3); os.rmdir('busy')"
    with running(make(program)):
        found = runs(file, 3)
    assert {run.exit_code for run in found[:3]} == {0}
    assert any("event=still-running" in line for line in make.lines)


def test_edit_of_the_file_is_taken_up_a_bad_one_leaves_what_was_and_is_refused_at_the_start(
    make: Callable[..., Scheduler], file: ScheduleFile
) -> None:
    with running(make()):
        add(file, yearly())
        runs(file)
        content = file.path.read_text()
        file.path.write_text(content.replace("0 0 1 1 *", "soon"))
        wait_until(lambda: any("event=refused" in line for line in make.lines))
        file.path.write_text(content.replace("nightly", "other"))
        assert [run.schedule for run in runs(file, 2)] == ["nightly", "other"]
        assert any(line == "schedule=nightly event=removed" for line in make.lines)
    file.path.write_text('[nightly]\ncron = "soon"\nrun = ["ingest", "a"]\n')
    with pytest.raises(ConfigError, match="'soon'"):
        make().run()


def at(day: int, hour: int = 2, minute: int = 30) -> datetime:
    return datetime(2026, 11, day, hour, minute, tzinfo=UTC)


@pytest.mark.parametrize(
    ("changes", "last", "now", "expected"),
    [
        pytest.param({"since": None}, None, NOW, at(22), id="no history and no since"),
        pytest.param({"since": NOW - timedelta(hours=1)}, None, NOW, at(22), id="nothing due after since"),
        pytest.param({}, None, NOW, at(21), id="one missed after since"),
        pytest.param({}, ran(24 * 7), NOW, at(21), id="a week without a scheduler is one run"),
        pytest.param({}, ran(24 * 7, cron="0 5 * * *"), NOW, at(22), id="another expression misses nothing"),
        pytest.param({}, ran(1, exit_code=INTERRUPTED), NOW, NOW, id="an interrupted one at once"),
        pytest.param({}, ran(-14.5), NOW, at(23), id="a clock set back a day runs nothing twice"),
        pytest.param({}, ran(-24 * 365), NOW, at(22), id="a clock that was a year ahead is not believed"),
        pytest.param({}, ran(9.5), NOW + timedelta(days=1), at(22), id="a clock set forward a day"),
        pytest.param({}, ran(-24), NOW + timedelta(days=1), at(23), id="set forward and run already"),
    ],
)
def test_first_fire_after_missed_interrupted_and_moved_clocks(
    changes: dict[str, object], last: ScheduledRun | None, now: datetime, expected: datetime
) -> None:
    assert first_fire(nightly(**changes), last, now) == expected


def test_history_is_bounded_keeps_the_last_run_of_a_rare_schedule_and_passes_over_what_is_no_record(
    file: ScheduleFile,
) -> None:
    path, rare, last = file.history_path, ran(schedule="yearly", counts={"rows": 3}), ran(schedule="hourly")
    append_run(path, rare)
    line = path.read_bytes()
    torn = b'{"torn\n[]\n{"started_at": "2026-11-21T02:30:00"}\n\xff\n'
    path.write_bytes(torn + line + b"".join(line.replace(b"yearly", b"hourly") for _ in range(KEPT_RUNS)))
    append_run(path, last)
    found = read_history(path)
    assert len(found) == KEPT_RUNS + 1
    assert (found[0], found[-1]) == (rare, last)
    assert last_runs(found) == {"yearly": rare, "hourly": last}
