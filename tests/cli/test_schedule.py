import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from cairn.jobs.schedule.scheduler import ScheduledRun, append_run, read_history
from cairn.jobs.schedule.schedules import ScheduleFile

from tests.served_stones import wait_until

SECONDS = 600.0


@pytest.fixture
def nightly(corpus: str, tmp_path: Path) -> Path:
    path = tmp_path / "cairn-schedules.toml"
    path.write_text(
        """
[nightly]
cron = "30 2 * * *"
time-zone = "Europe/Vienna"
run = ["ingest", "corpus.parquet", "--collection", "c"]
since = 2020-01-01T00:00:00Z
"""
    )
    return path


def start_scheduler(tmp_path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "cairn.cli.main", "schedule", "run"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def records(tmp_path: Path, process: subprocess.Popen[str]) -> tuple[ScheduledRun, ...]:
    path = tmp_path / "cairn-schedules-history.jsonl"
    wait_until(lambda: read_history(path) or process.poll() is not None)
    return read_history(path)


def test_schedules_of_the_file_are_listed(call: Any, refused: Any, nightly: Path) -> None:
    code, out, _ = call("schedule", "list", "--json")
    (listed,) = json.loads(out)
    assert {key: listed[key] for key in ("schedule", "cron", "time_zone", "run", "folder", "last")} == {
        "schedule": "nightly",
        "cron": "30 2 * * *",
        "time_zone": "Europe/Vienna",
        "run": ["ingest", "corpus.parquet", "--collection", "c"],
        "folder": None,
        "last": None,
    }
    code, out, _ = call("schedule", "list")
    assert (code, "At 02:30 every day" in out, "never" in out) == (0, True, True)
    nightly.unlink()
    assert "no schedules in" in call("schedule", "list")[1]
    assert "a scheduler must run the schedules of" in refused("schedule", "health", code=1)


def test_history_shows_what_ran(call: Any, refused: Any, nightly: Path, tmp_path: Path) -> None:
    assert "nothing has run yet" in call("schedule", "history")[1]
    since = ScheduleFile(nightly).read()["nightly"].since
    assert since is not None
    for exit_code, error in ((0, None), (2, "source corpus.parquet does not exist")):
        told = {"schedule": "nightly", "cron": "30 2 * * *", "seconds": 75, "counts": {"rows": 1_234}}
        done = ScheduledRun(**told, started_at=since, exit_code=exit_code, error=error)
        append_run(tmp_path / "cairn-schedules-history.jsonl", done)
    code, out, _ = call("schedule", "history", "nightly")
    assert (code, len(out.splitlines())) == (0, 3)
    assert "1 min 15 s  1,234" in out
    assert out.splitlines()[-1].endswith("source corpus.parquet does not exist")
    assert len(json.loads(call("schedule", "history", "--last", "1", "--json")[1])) == 1
    assert "schedules there: nightly" in refused("schedule", "history", "weekly")
    assert json.loads(call("schedule", "list", "--json")[1])[0]["last"]["exit_code"] == 2
    in_vienna = since.astimezone(ZoneInfo("Europe/Vienna"))
    assert f"exit 2, {in_vienna:%a %Y-%m-%d %H:%M}" in call("schedule", "list")[1]


def test_scheduler_says_in_one_sentence_that_the_corpus_vanished_refuses_a_second_and_ends_cleanly_on_sigterm(
    call: Any, refused: Any, nightly: Path, tmp_path: Path
) -> None:
    Path("corpus.parquet").unlink()
    process = start_scheduler(tmp_path)
    (done,) = records(tmp_path, process)
    assert (done.exit_code, done.error) == (
        2,
        "source corpus.parquet does not exist; give a file, a folder, a glob or a URI",
    )
    assert call("schedule", "health")[0] == 0
    assert f"another scheduler (process {process.pid})" in refused("schedule", "run", code=75)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in log
    events = [line.split()[1] for line in log.splitlines()]
    assert events == ["event=armed", "event=started", "event=finished"]
