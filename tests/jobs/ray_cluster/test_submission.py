"""Jobs on a Ray cluster that takes them: a head with a dashboard and a token."""

from __future__ import annotations

import http.server
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from cairn.jobs.job import main
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

    def test_jobs_without_the_token_answer_401(self, ray_cluster: Any):
        url = f"{ray_cluster.dashboard}/api/jobs/"
        tokens = (
            {},
            *({"Authorization": f"Bearer {each}"} for each in ("b" * 64, os.environ["RAY_AUTH_TOKEN"])),
        )
        assert [requests.get(url, headers=headers).status_code for headers in tokens] == [401, 403, 200]

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

    @pytest.mark.slow
    def test_job_that_ray_gives_another_clusters_address_is_one_sentence(
        self,
        ray_cluster: Any,
        config: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ):
        monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
        arguments = ["--config", str(config), "--cluster", "0" * 56]
        with pytest.raises(SystemExit, match="1"):
            main("build_index", arguments)
        error = capsys.readouterr().err
        assert (
            "must run on the cluster it was submitted to, got another one's address "
            f"'{ray_cluster.address}' from Ray" in error
        )
        assert not Path("root").exists()


class FakeClient:
    """A job that is over, as the Jobs API tells of it."""

    def __init__(self, log: str, **details: Any) -> None:
        self._log = log
        self._details = SimpleNamespace(
            **{"status": "FAILED", "driver_exit_code": 1, "message": None, **details}
        )
        self.drops = 0

    def get_job_info(self, submission_id: str) -> Any:
        self.drops -= 1
        return self._details if self.drops < 0 else SimpleNamespace(status="RUNNING")

    async def tail_job_logs(self, submission_id: str) -> Any:
        half = len(self._log) // 2
        yield self._log[:half]
        if self.drops > 0:
            raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")
        yield self._log[half:]


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
    """A cluster whose answers to submissions are these, one after another."""

    def __init__(self, *answers: str | None, status_code: int = 200) -> None:
        self._answers = list(answers)
        self.status_code = status_code
        self.submitted: list[str] = []

    def submit_job(self, submission_id: str, **_: Any) -> None:
        answer = self._answers.pop(0)
        if answer is not None:
            raise RuntimeError(f"Request failed with status code 500: {answer}.")
        self.submitted.append(submission_id)

    def list_jobs(self) -> list[Any]:
        return []

    def _do_request(self, method: str, address: str) -> Any:
        assert (method, address) == ("GET", "/cluster_id")
        answer = requests.Response()
        answer.status_code, answer._content = self.status_code, b'{"data": {"clusterId": "c1"}}'
        return answer


def test_cluster_that_gets_ready_is_waited_for(
    fake_server: Callable[..., JobServer], config: Path, monkeypatch: pytest.MonkeyPatch
):
    server = fake_server("")
    server._client = FakeDashboard("No available agent to submit job, please try again later.", None)
    submission = server.submit(config)
    assert (submission.is_new, server._client.submitted) == (True, [submission.submission_id])
    monkeypatch.setattr("cairn.jobs.ray_cluster.submission.AGENT_SECONDS", 0.0)
    server._client = FakeDashboard("No available agent to submit job, please try again later.")
    with pytest.raises(
        ClusterUnreachableError,
        match="a machine of the cluster must be ready for jobs within 0 seconds, got none",
    ):
        server.submit(config)


def test_submission_that_arrives_and_whose_answer_is_lost_is_followed_and_sent_once(
    fake_server: Callable[..., JobServer], config: Path
):
    class Losing(FakeDashboard):
        def submit_job(self, submission_id: str, **_: Any) -> None:
            self.submitted.append(submission_id)
            raise ConnectionError("reset by peer")

        def list_jobs(self) -> list[Any]:
            return [SimpleNamespace(submission_id=each, status="PENDING") for each in self.submitted]

    server = fake_server("")
    server._client = Losing()
    submission = server.submit(config)
    assert server._client.submitted == [submission.submission_id]
    assert not submission.is_new


@pytest.mark.parametrize(
    ("answer", "status_code", "sentence"),
    [
        (
            "disk is full",
            200,
            "the dashboard of a Ray cluster must answer at 'http://head:8265', got .*disk is full",
        ),
        (None, 503, "a Ray cluster must answer at 'http://head:8265', got '503 Server Error"),
    ],
)
def test_cluster_that_refuses_a_job_or_does_not_say_which_it_is_gets_none(
    fake_server: Callable[..., JobServer], config: Path, answer: str | None, status_code: int, sentence: str
):
    server = fake_server("")
    server._client = FakeDashboard(answer, status_code=status_code)
    with pytest.raises((ClusterError, ClusterUnreachableError), match=sentence):
        server.submit(config)
    assert server._client.submitted == []


def test_lost_connection_is_made_again_and_no_line_is_written_twice(fake_server: Callable[..., JobServer]):
    server = fake_server('stage=encode\n{"encoded": 3}\n', status="SUCCEEDED", driver_exit_code=0)
    server._client.drops = 2
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
