"""`cairn submit`: what a terminal shows of a cluster's jobs, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cairn.jobs.job import read_job
from cairn.jobs.ray_cluster.submission import JobOutcome, Submission


class FakeServer:
    """A cluster that runs one job, as :class:`cairn.jobs.ray_cluster.submission.JobServer` tells of it."""

    outcome: Any = JobOutcome(exit_code=0, report={"encoded": 3})
    submission = Submission(submission_id="cairn-build_index-c-0-1", is_new=True)

    def __init__(self, address: str) -> None:
        self.address = address

    def submit(self, path: Path) -> Submission:
        return self.submission

    def follow(self, submission_id: str, write: Callable[[str], object]) -> JobOutcome:
        write("stage=encode done=3\n")
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeServer]:
    class Server(FakeServer):
        pass

    monkeypatch.setattr("cairn.jobs.ray_cluster.submission.JobServer", Server)
    return Server


def test_submit_shows_the_log_or_the_report_and_ends_with_the_exit_code_of_the_job(server: Any, call: Any):
    server.outcome = JobOutcome(exit_code=3, report={"encoded": 3})
    assert call("submit", "build.toml") == (3, "stage=encode done=3\n", "submitted cairn-build_index-c-0-1\n")
    server.submission = Submission(submission_id="cairn-build_index-c-0-1")
    assert call("submit", "build.toml")[2] == "joined cairn-build_index-c-0-1\n"
    code, out, error = call("submit", "build.toml", "--json")
    assert (code, json.loads(out)) == (3, {"encoded": 3})
    assert "stage=encode" in error


def test_submit_detached_does_not_follow(server: Any, call: Any):
    assert call("submit", "build.toml", "--detach")[1] == "submitted cairn-build_index-c-0-1\n"
    assert json.loads(call("submit", "build.toml", "--detach", "--json")[1]) == {
        "submission_id": "cairn-build_index-c-0-1",
        "is_new": True,
    }


def test_interrupt_detaches_and_says_how_to_come_back(server: Any, call: Any):
    server.outcome = KeyboardInterrupt()
    code, _, error = call("submit", "build.toml")
    assert code == 130
    assert "detached; cairn-build_index-c-0-1 goes on" in error


def test_example_is_written_once_and_is_a_job(call: Any, refused: Any, tmp_path: Path):
    code, said, _ = call("submit", "--example", "build_index")
    assert (code, "cairn submit build_index.toml" in said) == (0, True)
    assert read_job(tmp_path / "build_index.toml").subject == "python-docs"
    told = refused("submit", "--example", "build_index")
    assert "build_index.toml must not be there yet" in told


def test_submit_without_a_cluster_is_one_sentence(refused: Any):
    told = refused("submit", "build.toml", "--address", "http://127.0.0.1:1", code=75)
    assert told.startswith("error: a Ray cluster must answer at 'http://127.0.0.1:1'")
