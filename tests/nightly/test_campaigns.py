"""An episode of each campaign, and what a campaign says of a collection that is not as it should be."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cairn.pipeline import durable

from tests.nightly import operations, readings
from tests.nightly.__main__ import CAMPAIGNS
from tests.nightly.campaign import Tally, require, run_campaigns, run_episode
from tests.nightly.forks import Worker, forked

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.faults
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_episode_finds_no_fault(name: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.nightly", "--campaign", name, "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, f"campaign={name} seed=1 fault=none" in done.stdout) == (0, True), done.stdout


def test_fault_is_told_with_its_seed_and_the_command_that_replays_it() -> None:
    said, drawn = list[str](), list[float]()

    def episode(rng: random.Random, folder: Path, tally: Tally) -> None:
        drawn.append(rng.random())
        require(len(drawn) < 0, "always")

    summary = run_campaigns({"x": episode}, seconds=0.05, first_seed=7, say=said.append)
    replay = "make nightly CAMPAIGN=x SEED=7"
    assert summary["faults"][0] == {"campaign": "x", "seed": 7, "fault": "always", "replay": replay}
    assert f"replay: {replay}" in said
    assert run_episode("x", episode, 7, Tally()) == "always"
    assert drawn[-1] == drawn[0]


def nothing(folder: Path) -> readings.State:
    return {}


def fail() -> None:
    raise KeyError("x")


def reach(point: str) -> None:
    durable.commit_point(point)


def test_lost_document_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "OPERATIONS", 1)
    monkeypatch.setattr(readings, "all_documents", nothing)
    fault = run_episode("operations", operations.episode, 0, Tally())
    assert fault is not None
    assert fault.startswith("after operation 0, _write: lost")


def test_work_that_dies_or_fails_is_told_apart() -> None:
    assert forked(len, [1, 2]).value == 2
    assert forked(fail).fault == "KeyError: 'x'"
    assert forked(time.sleep, 60, kill=0.05).was_killed


def test_worker_dies_at_the_commit_point_of_this_work_alone_and_is_replaced() -> None:
    with Worker() as worker:
        first = worker.run(os.getpid).value
        assert not worker.run(reach, "another", kill="compacted").was_killed
        assert not worker.run(reach, "compacted").was_killed
        assert worker.run(os.getpid).value == first
        assert worker.run(reach, "compacted", kill="compacted").was_killed
        assert worker.run(os.getpid).value not in (first, os.getpid())
