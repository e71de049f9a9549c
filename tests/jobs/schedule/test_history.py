from datetime import UTC, datetime, timedelta
from pathlib import Path

from cairn.jobs.schedule.history import KEPT_RUNS, ScheduledRun, append_run, last_runs, read_history

START = datetime(2026, 11, 21, 2, 30, tzinfo=UTC)


def run(schedule: str = "nightly", hours: int = 0) -> ScheduledRun:
    counts = {"rows": 3, "generation": 7}
    return ScheduledRun(
        schedule=schedule,
        cron="30 2 * * *",
        started_at=START + timedelta(hours=hours),
        seconds=1.5,
        exit_code=0,
        counts=counts,
    )


def test_history_gives_back_what_was_appended_oldest_first(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    runs = (run(), run("weekly", 1), run(hours=24))
    for each in runs:
        append_run(path, each)
    assert read_history(path) == runs
    assert last_runs(runs) == {"nightly": runs[2], "weekly": runs[1]}


def test_history_is_bounded_and_keeps_the_last_run_of_a_rare_schedule(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append_run(path, run("yearly"))
    line = path.read_bytes()
    path.write_bytes(line + b"".join(line.replace(b"yearly", b"hourly") for _ in range(KEPT_RUNS)))
    append_run(path, run("hourly", 5))
    found = read_history(path)
    assert len(found) == KEPT_RUNS + 1
    assert found[0].schedule == "yearly"
    assert found[-1] == run("hourly", 5)


def test_history_passes_over_lines_that_are_no_record(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append_run(path, run())
    path.write_bytes(b'{"torn\n[]\n{"started_at": "2026-11-21T02:30:00"}\n\xff\n' + path.read_bytes())
    assert read_history(path) == (run(),)
