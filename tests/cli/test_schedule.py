import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run
from cairn.jobs.schedule.history import ScheduledRun, append_run, read_history
from cairn.jobs.schedule.schedules import ScheduleFile

SECONDS = 600.0


@pytest.fixture
def call(quiet_folder: None, capsys: pytest.CaptureFixture[str]) -> Any:
    def invoke(*arguments: str) -> tuple[int, str, str]:
        code = run(cairn, ["schedule", *arguments], "cairn")
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    texts = ["a cairn marks the way over the hill", "the river runs past the old stone mill"]
    pq.write_table(pa.table({"id": ["a", "b"], "text": texts}), tmp_path / "corpus.parquet")
    return "corpus.parquet"


@pytest.fixture
def nightly(corpus: str) -> tuple[str, ...]:
    return (
        "add",
        "nightly",
        "--cron",
        "30 2 * * *",
        "--time-zone",
        "Europe/Vienna",
        "--",
        "ingest",
        corpus,
        "--collection",
        "c",
    )


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
    path, deadline = tmp_path / "cairn-schedules-history.jsonl", time.monotonic() + SECONDS
    while not read_history(path):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return read_history(path)


def test_schedule_is_added_listed_and_removed(call: Any, nightly: tuple[str, ...], tmp_path: Path) -> None:
    code, out, _ = call(*nightly)
    assert (code, "At 02:30 every day (Europe/Vienna), next " in out) == (0, True)
    code, out, _ = call("list", "--json")
    (listed,) = json.loads(out)
    assert {key: listed[key] for key in ("schedule", "cron", "time_zone", "run", "folder", "last")} == {
        "schedule": "nightly",
        "cron": "30 2 * * *",
        "time_zone": "Europe/Vienna",
        "run": ["ingest", "corpus.parquet", "--collection", "c"],
        "folder": None,
        "last": None,
    }
    assert "never" in call("list")[1]
    assert call("remove", "nightly")[0] == 0
    assert "no schedules in" in call("list")[1]


def test_schedule_added_from_another_folder_runs_there(
    call: Any, nightly: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("CAIRN_SCHEDULE_FILE", str(tmp_path / "elsewhere" / "all.toml"))
    assert call(*nightly)[0] == 0
    assert ScheduleFile(tmp_path / "elsewhere" / "all.toml").read()["nightly"].folder == tmp_path


JOB = 'job = "build_index"\ncollection = "{}"\nroot = "s3://indexes"\n[ingest]\nsources = ["s3://articles"]\n'


def test_schedule_of_a_job_for_a_cluster_is_added(call: Any, tmp_path: Path) -> None:
    (tmp_path / "nightly.toml").write_text(JOB.format("c"))
    assert (
        call(
            "add",
            "nightly",
            "--cron",
            "30 2 * * *",
            "--",
            "submit",
            "nightly.toml",
            "--address",
            "http://head:8265",
        )[0]
        == 0
    )


@pytest.mark.parametrize(
    ("collection", "sentence"), [(None, "No such file"), ("../c", "a collection's name must match")]
)
def test_schedule_of_a_job_that_could_not_run_is_refused(
    call: Any, tmp_path: Path, collection: str | None, sentence: str
) -> None:
    if collection:
        (tmp_path / "nightly.toml").write_text(JOB.format(collection))
    code, _, err = call("add", "nightly", "--cron", "30 2 * * *", "--", "submit", "nightly.toml")
    assert (code, err.count("\n"), sentence in err) == (2, 1, True)
    assert not (tmp_path / "cairn-schedules.toml").exists()


def test_health_without_a_scheduler_is_one_sentence_and_exit_code_1(call: Any) -> None:
    code, _, err = call("health")
    assert (code, err.count("\n"), "a scheduler must run the schedules of" in err) == (1, 1, True)


@pytest.mark.parametrize(
    ("cron", "words", "sentence"),
    [
        (
            "every night",
            ("ingest", "corpus.parquet", "--collection", "c"),
            "write '30 2 * * *' for every night at 2:30",
        ),
        ("30 2 * * *", ("ingest", "gone.parquet", "--collection", "c"), "source gone.parquet does not exist"),
        (
            "30 2 * * *",
            ("ingest", "corpus.parquet", "--collection", "../c"),
            "a collection's name must match",
        ),
        (
            "30 2 * * *",
            ("search", "corpus.parquet", "--collection", "c"),
            "must run one of ingest, plan, submit",
        ),
    ],
)
def test_schedule_that_could_not_run_is_refused_and_nothing_is_written(
    call: Any, corpus: str, tmp_path: Path, cron: str, words: tuple[str, ...], sentence: str
) -> None:
    code, _, err = call("add", "nightly", "--cron", cron, "--", *words)
    assert (code, err.count("\n"), sentence in err) == (2, 1, True)
    assert not (tmp_path / "cairn-schedules.toml").exists()


def test_history_shows_what_ran(call: Any, nightly: tuple[str, ...], tmp_path: Path) -> None:
    assert "nothing has run yet" in call("history")[1]
    call(*nightly)
    since = ScheduleFile(tmp_path / "cairn-schedules.toml").read()["nightly"].since
    assert since is not None
    for exit_code, error in ((0, None), (2, "source corpus.parquet does not exist")):
        done = ScheduledRun(
            schedule="nightly",
            cron="30 2 * * *",
            started_at=since,
            seconds=75,
            exit_code=exit_code,
            counts={"rows": 1_234},
            error=error,
        )
        append_run(tmp_path / "cairn-schedules-history.jsonl", done)
    code, out, _ = call("history", "nightly")
    assert (code, len(out.splitlines())) == (0, 3)
    assert "1 min 15 s  1,234" in out
    assert out.splitlines()[-1].endswith("source corpus.parquet does not exist")
    assert len(json.loads(call("history", "--last", "1", "--json")[1])) == 1
    code, _, err = call("history", "weekly")
    assert (code, "schedules there: nightly" in err) == (2, True)
    assert json.loads(call("list", "--json")[1])[0]["last"]["exit_code"] == 2
    in_vienna = since.astimezone(ZoneInfo("Europe/Vienna"))
    assert f"exit 2, {in_vienna:%a %Y-%m-%d %H:%M}" in call("list")[1]


def test_scheduler_says_in_one_sentence_that_the_corpus_vanished_refuses_a_second_and_ends_cleanly_on_sigterm(
    call: Any, nightly: tuple[str, ...], corpus: str, tmp_path: Path
) -> None:
    call(*nightly)
    Path(corpus).unlink()
    file = tmp_path / "cairn-schedules.toml"
    file.write_text(
        "".join(line for line in file.read_text().splitlines(True) if "since" not in line)
        + "since = 2020-01-01T00:00:00Z\n"
    )
    process = start_scheduler(tmp_path)
    (done,) = records(tmp_path, process)
    assert (done.exit_code, done.error) == (
        2,
        "source corpus.parquet does not exist; give a file, a folder, a glob or a URI",
    )
    assert call("health")[0] == 0
    code, _, err = call("run")
    assert (code, err.count("\n"), f"another scheduler (process {process.pid})" in err) == (75, 1, True)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in log
    assert [line.split()[1] for line in log.splitlines()] == [
        "event=armed",
        "event=started",
        "event=finished",
    ]
