from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.served_stones import serving_process

START_SECONDS = 300


def test_serve_answers_over_the_wire_and_stops_when_told(ingest: Any, tmp_path: Path) -> None:
    ingest(id=["a/%2F b", "b"], text=["a cairn marks the way", "the river runs"], year=[1, 2])
    with serving_process(tmp_path, "--encoder-threads", "1") as (process, address, log):
        with httpx2.Client(base_url=f"{address}/v1/collections", timeout=START_SECONDS) as client:
            found = client.post("/c/search", json={"query": "the river runs"})
            answer = found.json()
            assert (found.status_code, answer["generation"], answer["hits"][0]["doc_id"]) == (200, 1, "b")
            assert client.get("/c/documents/a%2F%252F%20b").json()["doc_id"] == "a/%2F b"
            assert client.get("", headers={"Host": "evil.example"}).status_code == 421
        process.send_signal(signal.SIGINT)
        assert process.wait(START_SECONDS) == 0
        said = log.read_text("utf-8")
    assert "route=/v1/collections/{name}/search status=200" in said
    assert said.endswith("stopped\n")
    assert "Traceback" not in said


def test_serve_beyond_this_machine_without_a_key_is_refused(refused: Any) -> None:
    assert refused("serve", "--host", "0.0.0.0", "--port", "0").startswith(
        "error: host must be this machine's own (127.0.0.1) while there is no API key, got '0.0.0.0'; "
        "run `cairn keys create"
    )


@pytest.mark.parametrize("option", ["--writable", "--hide-word-statistics"])
def test_serve_by_shards_refuses_what_they_cannot_do(
    monkeypatch: pytest.MonkeyPatch, refused: Any, option: str
) -> None:
    monkeypatch.setattr("cairn.cli.serve._runner", lambda *_: lambda _: None)
    assert refused("serve", "--engine", "ray", option).endswith(f"leave {option} out\n")


def test_serve_without_its_packages_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    for name in [name for name in sys.modules if name.startswith("cairn.pipeline.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install '.[serve]'" in refused("serve")
