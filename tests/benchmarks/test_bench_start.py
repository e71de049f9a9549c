"""How long commands take that encode nothing, each in a process of its own.

The peer is a process that imports the libraries an ingest cannot do without: PyArrow, FAISS and Lance.
``CAIRN_BENCH_ROOT`` and ``CAIRN_BENCH_SOURCE`` name a collection ``full`` and what it was made of; without
them a small one is made.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench

RUNS = 5
BIN = Path(sys.executable).parent
PEER = (sys.executable, "-c", "import pyarrow.dataset, faiss, lance")


def seconds(command: Sequence[str | Path], folder: Path) -> float:
    """Return the median wall time of so many runs, the first aside."""
    took = list[float]()
    for _ in range(RUNS + 1):
        began = time.perf_counter()
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


def test_commands_that_encode_nothing_start_at_once(tmp_path: Path) -> None:
    root = os.environ.get("CAIRN_BENCH_ROOT", str(tmp_path / "root"))
    source = os.environ.get("CAIRN_BENCH_SOURCE", str(tmp_path / "corpus"))
    if "CAIRN_BENCH_SOURCE" not in os.environ:
        subprocess.run([BIN / "cairn", "sample", source, "--kind", "topic"], check=True)
        subprocess.run([BIN / "ingest", source, "--collection", "full", "--root", root], check=True)
    goals = {
        ("ingest", source, "--collection", "full", "--root", root): 1.5,
        ("cairn", "status", "full", "--root", root): 1.5,
        ("cairn", "keys", "list", "--root", root): 0.5,
        ("cairn", "schedule", "list"): 2.0,
        ("cairn", "submit", "--help"): 2.0,
    }
    peer = seconds(PEER, tmp_path)
    print(f"\n{peer:.2f} s for PyArrow, FAISS and Lance alone")
    missed = list[str]()
    for (program, *arguments), goal in goals.items():
        took = seconds((BIN / program, *arguments), tmp_path)
        words = " ".join([program, *arguments[:2]]).replace(source, "SOURCE")
        print(f"{words}: {took:.2f} s, {took / peer:.2f} x, asked {goal} s")
        if took > goal:
            missed.append(words)
    assert not missed
