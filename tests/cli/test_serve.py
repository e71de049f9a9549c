from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

START_SECONDS = 300


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Return a starter of `cairn serve` on a free port: (process, address)."""
    started: list[subprocess.Popen[str]] = []

    def run_serve(*options: str) -> tuple[subprocess.Popen[str], str]:
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "PYTHONPATH": root, "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "cairn.cli.main", "serve", "--port", "0"]
        command += ["--deadline-seconds", "300", *options]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr is not None
        seen = ""
        for line in process.stderr:
            seen += line
            if found := re.search(r"at (http://\S+)", line):
                return process, found[1]
        raise AssertionError(seen)

    yield run_serve
    for process in started:
        process.kill()
        process.communicate()


def test_serve_answers_over_the_wire_and_stops_when_told(
    start: Any, call: Any, tmp_path: Path, ingest_options: list[str]
) -> None:
    rows = pa.table(
        {"id": ["a/%2F b", "b"], "text": ["a cairn marks the way", "the river runs"], "year": [1, 2]}
    )
    pq.write_table(rows, tmp_path / "c.parquet")
    assert call("ingest", "c.parquet", *ingest_options, "--quiet")[0] == 0
    process, address = start("--encoder-threads", "1")
    client = httpx2.Client(base_url=f"{address}/v1/collections", timeout=START_SECONDS)
    found = client.post("/c/search", json={"query": "the river runs"})
    answer = found.json()
    assert (found.status_code, answer["generation"], answer["hits"][0]["doc_id"]) == (200, 1, "b")
    assert client.get("/c/documents/a%2F%252F%20b").json()["doc_id"] == "a/%2F b"
    assert client.get("", headers={"Host": "evil.example"}).status_code == 421
    client.close()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 0
    assert "route=/v1/collections/{name}/search status=200" in said
    assert said.endswith("stopped\n")
    assert "Traceback" not in said


def test_serve_beyond_this_machine_without_a_key_is_refused(call: Any) -> None:
    code, _, error = call("serve", "--host", "0.0.0.0", "--port", "0")
    assert code == 2
    assert error.startswith(
        "error: host must be this machine's own (127.0.0.1) while there is no API key, got '0.0.0.0'; "
        "run `cairn keys create"
    )


@pytest.mark.parametrize(
    "options",
    [("--deadline-seconds", "0"), ("--max-requests", "0"), ("--encoder-threads", "0"), ("Bad Name",)],
)
def test_serve_with_a_setting_out_of_bounds_is_one_sentence(call: Any, options: tuple[str, ...]) -> None:
    code, _, error = call("serve", *options)
    assert (code, error.startswith("error: "), error.count("\n")) == (2, True, 1)
    assert options[0].removeprefix("--").replace("-", "_") in error.lower() or options == ("Bad Name",)


@pytest.mark.parametrize("option", ["--writable", "--hide-word-statistics"])
def test_serve_by_shards_refuses_what_they_cannot_do(
    monkeypatch: pytest.MonkeyPatch, call: Any, option: str
) -> None:
    monkeypatch.setattr("cairn.cli.serve._runner", lambda *_: lambda _: None)
    code, _, error = call("serve", "--engine", "ray", option)
    assert (code, error.endswith(f"leave {option} out\n")) == (2, True)


def test_serve_without_its_packages_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    for name in [name for name in sys.modules if name.startswith("cairn.pipeline.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, error = call("serve")
    assert (code, "pip install '.[serve]'" in error) == (2, True)
