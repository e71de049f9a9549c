"""Kill the scheduler, its child, or both in the middle of a scheduled ingest, and stop it politely.

The next run finishes the work.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.jobs.schedule.scheduler import ScheduledRun, read_history
from cairn.jobs.schedule.schedules import ScheduleFile
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.line.build_index import build_index

from tests.served_stones import wait_until
from tests.small_ingests import settings, text_of, write_rows

pytestmark = pytest.mark.slow
SECONDS = 600.0
"""How long a test waits for what takes a few; a busy machine needs more."""
# The ingest of the command line, with small shards, which at commit point argv[1] sends the signals of
# argv[2], "child" or "scheduler" by name and by number. It goes on once the scheduler is gone: one that stops
# politely interrupts it before.
CHILD = """
import os, sys, time
from dataclasses import replace
from cairn.cli.main import cairn, run
from cairn.pipeline import durable
from cairn.pipeline.line import ingest_settings
resolve = ingest_settings.resolve_ingest_config
ingest_settings.resolve_ingest_config = lambda *given: replace(resolve(*given), shard_characters=300)
scheduler = os.getppid()
def disturb(name):
    if name == sys.argv[1] and not os.path.exists("disturbed"):
        open("disturbed", "w").close()
        for word in sys.argv[2].split():
            whom, number = word.split("=")
            os.kill(os.getpid() if whom == "child" else scheduler, int(number))
        while os.getppid() == scheduler:
            time.sleep(0.01)
durable.observe_commit_points(disturb)
sys.exit(run(cairn, sys.argv[3:], "cairn"))
"""
SCHEDULER = """
import signal, sys
from pathlib import Path
from cairn.jobs.schedule.scheduler import Scheduler
from cairn.jobs.schedule.schedules import ScheduleFile
command = (sys.executable, "-c", sys.argv[2], *sys.argv[3:])
scheduler = Scheduler(file=ScheduleFile(Path(sys.argv[1])), command=command, log=print, retry_seconds=0.2)
signal.signal(signal.SIGTERM, lambda *_: setattr(scheduler, "is_stopping", True))
scheduler.run()
"""


POINTS = ("context-written", "shard-written", "chunks-added")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("scheduled")
    rows = [{"id": f"d{number}", "text": text_of(number, 12 + number % 9)} for number in range(30)]
    source = write_rows(folder / "corpus.parquet", rows)
    build_index([source], folder / "undisturbed", "c", settings(tiny_model_folder, shard_characters=300))
    return {
        "corpus": folder / "corpus.parquet",
        "model": tiny_model_folder,
        "seen": contents(folder / "undisturbed"),
    }


def contents(root: Path) -> dict[str, int]:
    generation = open_generation(CollectionLayout(root, "c"))
    chunks = np.bincount(generation.chunk_documents, minlength=generation.num_documents).tolist()
    return dict(zip(generation.doc_ids.to_pylist(), chunks, strict=True))


def write_schedule(folder: Path, world: dict[str, Any]) -> ScheduleFile:
    words = ["ingest", world["corpus"], "--collection", "c", "--model", world["model"]]
    words += ["--landmark-interval", "16", "--num-clusters", "2", "--context-documents", "4"]
    run = ", ".join(f'"{word}"' for word in words)
    file = ScheduleFile(folder / "schedules.toml")
    file.path.write_text(
        f'[yearly]\ncron = "0 0 1 1 *"\ntime-zone = "UTC"\nrun = [{run}]\nsince = 2020-01-01T00:00:00Z\n'
    )
    return file


def start(file: ScheduleFile, *disturbance: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CAIRN_ROOT": str(file.path.parent / "cairn-data")}
    return subprocess.Popen(
        [sys.executable, "-c", SCHEDULER, str(file.path), CHILD, *disturbance],
        env=environment,
        stdout=subprocess.DEVNULL,
    )


def next_run(file: ScheduleFile, number: int) -> ScheduledRun:
    """Run a scheduler until the history has ``number`` records, stop it by SIGTERM; return the last one."""
    process = start(file, "no-such-point", "")
    wait_until(lambda: len(read_history(file.history_path)) >= number or process.poll() is not None)
    process.terminate()
    assert process.wait(SECONDS) == 0
    return read_history(file.history_path)[-1]


def require_whole(file: ScheduleFile, world: dict[str, Any]) -> None:
    root = file.path.parent / "cairn-data"
    assert contents(root) == world["seen"]
    assert verify_collection(CollectionLayout(root, "c")) == []


KILLED, STOPPED = -signal.SIGKILL, 0


@pytest.mark.parametrize(
    ("point", "disturbance", "ended", "exit_codes", "is_done"),
    [
        # A child whose scheduler is killed finishes: the next run finds nothing to do.
        *((point, {"scheduler": signal.SIGKILL}, KILLED, [], True) for point in POINTS),
        ("chunks-added", {"scheduler": signal.SIGKILL, "child": signal.SIGKILL}, KILLED, [], False),
        ("chunks-added", {"child": signal.SIGKILL}, STOPPED, [137], False),
        ("shard-written", {"scheduler": signal.SIGTERM}, STOPPED, [130], False),
    ],
)
def test_next_run_finishes_what_a_killed_or_stopped_scheduler_or_child_left(
    world: dict[str, Any],
    tmp_path: Path,
    point: str,
    disturbance: dict[str, int],
    ended: int,
    exit_codes: list[int],
    is_done: bool,
) -> None:
    file = write_schedule(tmp_path, world)
    process = start(file, point, " ".join(f"{whom}={number:d}" for whom, number in disturbance.items()))
    if "scheduler" not in disturbance:
        wait_until(lambda: read_history(file.history_path))
        process.terminate()
    assert process.wait(SECONDS) == ended
    assert [run.exit_code for run in read_history(file.history_path)] == exit_codes
    if exit_codes == [137]:
        file.history_path.unlink()  # a year passes
        exit_codes = []
    assert is_done or not CollectionLayout(tmp_path / "cairn-data", "c").exists()
    run = next_run(file, len(exit_codes) + 1)
    assert (run.exit_code, run.counts["unchanged" if is_done else "indexed"]) == (0, 30)
    assert run.counts["encoded"] in (range(30) if point == "shard-written" and not is_done else [0])
    require_whole(file, world)


@pytest.mark.faults
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
    wait_until(lambda: len(read_history(file.history_path)) > before)
    process.terminate()
    process.communicate(timeout=SECONDS)
    made_up = [run.started_at for run in read_history(file.history_path)[before:]]
    assert [moment.replace(second=0, microsecond=0) for moment in made_up] == [wake_at.replace(second=0)]
