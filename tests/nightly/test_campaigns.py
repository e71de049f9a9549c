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

from tests.nightly import hostile
from tests.nightly.campaign import FaultError, Tally, require, run_campaigns, run_episode
from tests.nightly.forks import Worker, forked

ROOT = Path(__file__).parents[2]


@pytest.mark.faults
@pytest.mark.parametrize(
    "name",
    ["operations", "ingests", "publications", "hostile", "damage", "flips", "store-kills", "store-flips"],
)
def test_episode_finds_no_fault(name: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.nightly", "--campaign", name, "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, f"campaign={name} seed=1 fault=none" in done.stdout) == (0, True), done.stdout


def test_fault_is_told_with_its_seed_and_the_command_that_replays_it() -> None:
    said = list[str]()

    def episode(rng: random.Random, folder: Path, tally: Tally) -> None:
        tally["operations"] += 1
        require(rng.random() < 0, "always")

    summary = run_campaigns({"x": episode}, seconds=0.05, first_seed=7, say=said.append)
    assert summary["faults"][0] == {
        "campaign": "x",
        "seed": 7,
        "fault": "always",
        "replay": "make nightly CAMPAIGN=x SEED=7",
    }
    assert "replay: make nightly CAMPAIGN=x SEED=7" in said
    assert summary["campaigns"]["x"]["operations"] == summary["campaigns"]["x"]["episodes"]


def test_episode_of_a_seed_draws_the_same_again() -> None:
    drawn = list[float]()
    for _ in range(2):
        run_episode("x", lambda rng, _folder, _tally: drawn.append(rng.random()), 3, Tally())
    assert drawn[0] == drawn[1]


LOSING = """
import random, sys
from pathlib import Path
from tests.nightly import operations, readings
from tests.nightly.campaign import Tally

def nothing(folder):
    return {}

operations.OPERATIONS = 1
readings.all_documents = nothing
operations.episode(random.Random(0), Path(sys.argv[1]), Tally())
"""


def fail() -> None:
    raise KeyError("x")


def test_lost_document_is_a_fault(tmp_path: Path) -> None:
    # In an interpreter of its own: FAISS and Lance do not survive a fork of a process that has used them.
    command = [sys.executable, "-W", "ignore", "-c", LOSING, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "FaultError: after operation 0, _write: lost" in done.stderr


def test_server_error_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Up:
        def __enter__(self) -> tuple[int, int]:
            return 0, 0

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(hostile.served, "server", lambda _: Up())
    monkeypatch.setattr(hostile, "_require_answer", lambda _: None)
    monkeypatch.setattr(hostile, "_send", lambda *_, **__: 500)
    with pytest.raises(FaultError, match="status 500"):
        hostile.episode(random.Random(0), tmp_path, Tally())


def test_work_that_dies_or_fails_is_told_apart() -> None:
    assert forked(len, [1, 2]).value == 2
    assert forked(fail).fault == "KeyError: 'x'"
    assert forked(time.sleep, 60, kill=0.05).was_killed


def reach(point: str) -> None:
    durable.commit_point(point)


def test_worker_dies_at_the_commit_point_of_this_work_alone() -> None:
    with Worker() as worker:
        assert not worker.run(reach, "another", kill="tagged").was_killed
        assert not worker.run(reach, "tagged").was_killed
        assert worker.run(reach, "tagged", kill="tagged").was_killed


def test_worker_that_was_killed_is_replaced_by_another() -> None:
    with Worker() as worker:
        first = worker.run(os.getpid).value
        assert worker.run(os.getpid).value == first
        assert worker.run(time.sleep, 60, kill=0.05).was_killed
        assert worker.run(os.getpid).value not in (first, os.getpid())
