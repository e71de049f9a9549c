"""A host that slept while a schedule was due twice makes up for it once.

The scheduler's process is frozen over two full minutes.
"""

import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cairn.jobs.schedule.history import read_history
from cairn.jobs.schedule.schedules import ScheduleFile

from tests.faults.test_schedule_kills import SCHEDULER

pytestmark = pytest.mark.faults

SECONDS = 120.0


def test_host_asleep_at_two_scheduled_times_runs_once_when_it_wakes(tmp_path: Path) -> None:
    file = ScheduleFile(tmp_path / "schedules.toml")
    file.path.write_text(
        '[often]\ncron = "* * * * *"\ntime-zone = "UTC"\nrun = ["ingest", "a", "--collection", "c"]\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", SCHEDULER, str(file.path), "print('{}')"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "event=armed" in process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    before = len(read_history(file.history_path))
    asleep_at = datetime.now(UTC)
    wake_at = asleep_at.replace(second=0, microsecond=0) + timedelta(minutes=2, seconds=1)
    while datetime.now(UTC) < wake_at:
        time.sleep(0.5)
    process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + SECONDS
    while len(read_history(file.history_path)) == before and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=SECONDS)
    made_up = [run.started_at for run in read_history(file.history_path)[before:]]
    assert [moment.replace(second=0, microsecond=0) for moment in made_up] == [wake_at.replace(second=0)]
