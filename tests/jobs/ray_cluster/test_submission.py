"""Jobs on a Ray cluster that takes them: a head with a dashboard and a token."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from cairn.jobs.ray_cluster.submission import JobServer
from cairn.pipeline.errors import ClusterError, ClusterUnreachableError, ConfigError

from tests.stored_collections import stored

TEXTS = {
    "a": "a cairn marks the way over the hill",
    "b": "the river runs past the old stone mill",
    "c": "snow lies on the ridge",
}

on_a_cluster = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


@pytest.fixture
def config(tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a job whose relative paths start from here."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(
        pa.table({"id": list(TEXTS), "text": list(TEXTS.values()), "year": [1, 2, 3]}),
        tmp_path / "corpus.parquet",
    )
    path = tmp_path / "build.toml"
    path.write_text(
        f'job = "build_index"\ncollection = "c"\nroot = "root"\n[ingest]\nsources = ["corpus.parquet"]\n'
        f'workers = 1\nmodel = "{tiny_model_folder}"\nlandmark-interval = 16\n'
    )
    return path


@pytest.mark.parametrize(
    "address", ["127.0.0.1:6379", "ray://head:10001", "auto", "http://head:dashboard", "http://"]
)
def test_address_that_is_no_dashboard_is_refused(address: str):
    with pytest.raises(ConfigError, match="must be that of its dashboard"):
        JobServer(address)


class SomethingElse(http.server.BaseHTTPRequestHandler):
    """Answers 501, whatever it is asked."""

    def log_message(self, *words: Any) -> None: ...


def test_address_of_something_else_is_one_sentence():
    server = http.server.HTTPServer(("127.0.0.1", 0), SomethingElse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(
            ClusterUnreachableError,
            match=r"a Ray cluster must answer at 'http://127\.0\.0\.1:\d+', got .501 Server Error",
        ):
            JobServer(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()


class TestOnACluster:
    pytestmark = on_a_cluster

    def test_ray_itself_is_silent_about_what_it_does(self, ray_cluster: Any):
        JobServer(ray_cluster.dashboard)
        levels = [handler.level for handler in logging.getLogger("ray").handlers]
        assert levels
        assert min(levels) >= logging.ERROR

    def test_job_that_runs_is_joined_and_goes_on_without_who_followed_it(
        self, ray_cluster: Any, config: Path, tmp_path: Path
    ):
        server = JobServer(ray_cluster.dashboard)
        first = server.submit(config)
        again = server.submit(config)
        assert (again.submission_id, first.is_new, again.is_new) == (first.submission_id, True, False)

        def interrupt(_: str) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            server.follow(first.submission_id, interrupt)
        log: list[str] = []
        outcome = server.follow(first.submission_id, log.append)
        assert outcome.exit_code == 0, log
        assert outcome.report is not None
        assert outcome.report["encoded"] == len(TEXTS)
        assert "stage=encode" in "".join(log)
        assert sorted(stored(tmp_path / "root")) == sorted(TEXTS)
        late = server.submit(config)
        assert (late.submission_id, late.is_new) == (f"{first.submission_id[:-2]}-2", True)
        assert server.follow(late.submission_id, log.append).exit_code == 0

    @pytest.mark.slow
    def test_job_that_fails_ends_with_its_exit_code_and_may_be_submitted_again(
        self, ray_cluster: Any, config: Path
    ):
        config.write_text(config.read_text().replace("corpus.parquet", "absent.parquet"))
        server = JobServer(ray_cluster.dashboard)
        log: list[str] = []
        first = server.submit(config)
        outcome = server.follow(first.submission_id, log.append)
        assert (outcome.exit_code, outcome.report) == (2, None)
        assert "error: " in "".join(log)
        again = server.submit(config)
        assert again.is_new
        assert again.submission_id != first.submission_id


class FakeClient:
    """A job as the Jobs API tells of it: over at the last look, its log half at the first and once away."""

    def __init__(self, log: str, **details: Any) -> None:
        self._log = log
        self._details = SimpleNamespace(
            **{"status": "FAILED", "driver_exit_code": 1, "message": None, **details}
        )
        self.looks = 1

    def get_job_info(self, submission_id: str) -> Any:
        self.looks -= 1
        return SimpleNamespace(status="RUNNING") if self.looks else self._details

    def get_job_logs(self, submission_id: str) -> str:
        if self.looks == 1:
            raise RuntimeError("Request failed with status code 500")
        return self._log[: len(self._log) // 2] if self.looks else self._log


@pytest.fixture
def fake_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., JobServer]]:
    def make(log: str, **details: Any) -> JobServer:
        server = JobServer.__new__(JobServer)
        server._client = FakeClient(log, **details)
        server._address = "http://head:8265"
        return server

    monkeypatch.setattr("cairn.jobs.ray_cluster.submission._POLL_SECONDS", 0.0)
    return make


@pytest.mark.parametrize(
    ("log", "details", "sentence"),
    [
        pytest.param(
            "(ModuleNotFoundError: No module named 'cairn')\n",
            {},
            "every machine of the cluster must have Cairn installed, got one without it",
            id="an image without the package",
        ),
        pytest.param(
            "",
            {"driver_exit_code": None, "message": "Failed to set up runtime environment."},
            r"job j must run to its end, got FAILED: Failed to set up runtime environment\.",
            id="a job that never ran",
        ),
    ],
)
def test_job_that_did_not_work_says_why(
    fake_server: Callable[..., JobServer], log: str, details: dict[str, Any], sentence: str
):
    with pytest.raises(ClusterError, match=sentence):
        fake_server(log, **details).follow("j", lambda _: None)


class FakeDashboard:
    """A cluster whose answers to submissions are these; ``submitted`` are those it has taken."""

    def __init__(self, *answers: Exception | None) -> None:
        self._answers = list(answers)
        self.submitted: list[str] = []

    def submit_job(self, submission_id: str, **_: Any) -> None:
        answer = self._answers.pop(0)
        if answer is not None:
            raise answer
        self.submitted.append(submission_id)

    def list_jobs(self) -> list[Any]:
        return [SimpleNamespace(submission_id=each, status="PENDING") for each in self.submitted]


NOT_READY = "No available agent to submit job, please try again later"


def failed(told: str) -> RuntimeError:
    """Return a failure as Ray's client raises it."""
    return RuntimeError(f"Request failed with status code 500: {told}.")


@pytest.mark.parametrize(
    ("told", "error", "sentence", "exit_code"),
    [
        (
            "disk is full",
            ClusterError,
            "the dashboard of a Ray cluster must answer at 'http://head:8265', got .*disk is full",
            1,
        ),
        (
            NOT_READY,
            ClusterUnreachableError,
            "must be ready for jobs within 0 seconds, got none; try again, .* --dashboard-agent-listen-port",
            75,
        ),
    ],
)
def test_cluster_that_refuses_a_job_or_does_not_get_ready_says_so(
    fake_server: Callable[..., JobServer],
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: str,
    error: type[Exception],
    sentence: str,
    exit_code: int,
):
    monkeypatch.setattr("cairn.jobs.ray_cluster.submission.AGENT_SECONDS", 0.0)
    server = fake_server("")
    server._client = FakeDashboard(failed(told))
    with pytest.raises(error, match=sentence) as caught:
        server.submit(config)
    assert caught.value.exit_code == exit_code


def test_cluster_that_gets_ready_is_waited_for(fake_server: Callable[..., JobServer], config: Path):
    server = fake_server("")
    server._client = FakeDashboard(failed(NOT_READY), None)
    submission = server.submit(config)
    assert submission.is_new
    assert server._client.submitted == [submission.submission_id]


def test_submission_that_arrives_and_whose_answer_is_lost_is_followed_and_sent_once(
    fake_server: Callable[..., JobServer], config: Path
):
    class Losing(FakeDashboard):
        def submit_job(self, submission_id: str, **_: Any) -> None:
            self.submitted.append(submission_id)
            super().submit_job(submission_id)

    server = fake_server("")
    server._client = Losing(ConnectionError("reset by peer"))
    submission = server.submit(config)
    assert server._client.submitted == [submission.submission_id]
    assert not submission.is_new


def test_log_is_written_as_it_grows_and_no_line_twice(fake_server: Callable[..., JobServer]):
    server = fake_server('stage=encode\n{"encoded": 3}\n', status="SUCCEEDED", driver_exit_code=0)
    server._client.looks = 3
    written: list[str] = []
    outcome = server.follow("j", written.append)
    assert "".join(written) == 'stage=encode\n{"encoded": 3}\n'
    assert (outcome.exit_code, outcome.report) == (0, {"encoded": 3})


def test_cluster_that_goes_away_while_a_job_is_followed_is_one_sentence(
    fake_server: Callable[..., JobServer], monkeypatch: pytest.MonkeyPatch
):
    def gone(submission_id: str) -> Any:
        raise requests.ConnectionError("Connection refused")

    server = fake_server("stage=encode\n")
    monkeypatch.setattr(server._client, "get_job_info", gone)
    with pytest.raises(
        ClusterUnreachableError,
        match="a Ray cluster must answer at 'http://head:8265', got 'Connection refused'",
    ):
        server.follow("j", lambda _: None)
