"""An episode of each campaign, and what a campaign says of a collection that is not as it should be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly import operations, readings
from tests.nightly.__main__ import CAMPAIGNS
from tests.nightly.campaign import Tally, run_campaigns, run_episode

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.faults
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_episode_finds_no_fault(name: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.nightly", "--campaign", name, "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, f"campaign={name} seed=1 fault=none" in done.stdout) == (0, True), done.stdout


def nothing(folder: Path) -> readings.State:
    return {}


def test_lost_document_is_a_fault_that_is_told_with_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "OPERATIONS", 1)
    monkeypatch.setattr(readings, "all_documents", nothing)
    said, campaigns = list[str](), {"operations": operations.episode}
    summary = run_campaigns(campaigns, seconds=0.05, first_seed=7, say=said.append)
    found, replay = summary["faults"][0], "make nightly CAMPAIGN=operations SEED=7"
    assert found["fault"].startswith("after operation 0, _write: lost")
    assert (found["seed"], found["replay"], f"replay: {replay}" in said) == (7, replay, True)
    assert run_episode("operations", operations.episode, 7, Tally()) == found["fault"]
