from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from cairn.cli.cluster import resolve_engine
from cairn.jobs.engine import EngineConfig

from tests.served_stones import wait_until


@pytest.fixture
def ingest(corpus: str, ingest_options: list[str]) -> list[str]:
    return ["ingest", corpus, *ingest_options, "--quiet"]


def test_engine_is_ray_where_there_is_an_address_and_takes_its_workers_from_flags(
    capsys: pytest.CaptureFixture[str],
):
    assert resolve_engine({"address": "head:6379"}) == EngineConfig(name="ray", address="head:6379")
    sizes = {"worker_cpus": 4, "worker_gpus": 0.5, "shard_deadline": 90.0}
    expected = EngineConfig(name="ray", min_workers=2, max_workers=8, **sizes)
    assert resolve_engine({"engine": "ray", "workers": "2:8", **sizes}) == expected
    assert resolve_engine({"address": "head:6379", "engine": "local", "workers": "2"}).name == "local"
    assert "flags about them move nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (["--workers", "many"], 2, "workers must be a number, or two as in 2:8, got 'many'"),
        (["--workers", "4:2"], 2, "min_workers must be at most max_workers, got 4:2"),
        (["--engine", "ray", "--shard-deadline", "0"], 2, "shard_deadline must be a number above 0, got 0.0"),
        (["--address", "http://127.0.0.1:8265"], 2, ("must be HOST:PORT, ray://HOST:PORT or auto, got "
"'http://127.0.0.1:8265'")),
        (["--address", "127.0.0.1:1"], 75, ("a Ray cluster must answer at '127.0.0.1:1', got Connection "
"refused")),
        (["--address", "nowhere.invalid:6379"], 75, "a Ray cluster must answer at 'nowhere.invalid:6379'"),
    ],
)  # fmt: skip
def test_engine_that_cannot_be_had_is_one_sentence_and_nothing_is_done(
    ingest: list[str], refused: Any, tmp_path: Path, flags: list[str], code: int, sentence: str
):
    assert sentence in refused(*ingest, *flags, code=code)
    assert not (tmp_path / "cairn-data").exists()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_ray_of_our_own_is_started_with_a_token_and_gone_afterwards(ingest: list[str]):
    mark = f"cairn-test-{time.monotonic_ns()}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "cairn.cli.main", *ingest, "--engine", "ray", "--workers", "1", "--json"]
    process = subprocess.Popen(
        command, env={**environment, "CAIRN_TEST_MARK": mark}, stdout=subprocess.PIPE, text=True
    )
    modes = set()
    while process.poll() is None:
        modes |= {
            found.get("RAY_AUTH_MODE")
            for name, found in _environments(mark).items()
            if name in ("gcs_server", "raylet")
        }
        time.sleep(0.5)
    assert process.returncode == 0
    assert json.loads(process.communicate()[0])["encoded"] == 3
    assert modes == {"token"}
    wait_until(lambda: not _environments(mark))


def _environments(mark: str) -> dict[str, dict[str, str]]:
    found = {}
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get("CAIRN_TEST_MARK") == mark:
                found[process.name()] = environment
        except psutil.Error:
            continue
    return found
