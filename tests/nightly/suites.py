"""Tests of the suite as campaigns: a row of ``docs/design/reliability.md`` an episode, and the API's fuzzing.

The rows' tests kill workers, machines and drivers of a Ray cluster, schedulers and their runs.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

from tests.nightly.campaign import Tally, require

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs/design/reliability.md"
ROW = re.compile(r"^\| (\d+)\*? \|.*\| `(tests/[\w/]+\.py)` `(\w+)` \|$", re.MULTILINE)
SCHEDULER = ("scheduler", "tests/faults/test_schedule_kills.py", "killed")
API_CASES = 100
SECONDS = 1_800.0


def row_episode(rng: random.Random, folder: Path, tally: Tally) -> None:
    """Run the tests of one row, or those that kill schedulers."""
    number, file, name = rng.choice([*ROW.findall(PAGE.read_text(encoding="utf-8")), SCHEDULER])
    said = _pytest(folder, file, "-k", name)
    tally[f"row {number}"] += 1
    for count, result in re.findall(r"(\d+) (passed|skipped)", said):
        tally[result] += int(count)


def api_episode(rng: random.Random, folder: Path, tally: Tally) -> None:
    """Send some hundred requests that fit the API's description, or nearly do."""
    seed = str(rng.randrange(2**31))
    said = _pytest(
        folder, "tests/serve/test_fuzz.py", "-s", "--api-cases", str(API_CASES), "--api-seed", seed
    )
    cases = re.search(r"([\d,]+) cases;", said)
    require(cases is not None, f"no cases are told: {said[-500:]}")
    assert cases is not None
    tally["requests"] += int(cases[1].replace(",", ""))


def _pytest(folder: Path, *arguments: str) -> str:
    """Run tests of every marker; a failing one is a fault."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTEST_DEBUG_TEMPROOT": str(folder)}
    done = subprocess.run(
        [*command, *arguments],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    require(done.returncode == 0, f"{arguments}: {done.stdout[-1_500:]}")
    return done.stdout
