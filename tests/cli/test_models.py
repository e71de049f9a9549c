"""Models fetched from a hub on loopback: whole, cut short, damaged, pickled, without a tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cairn
import pytest
from cairn.pipeline.model.folders.names import model_folder
from huggingface_hub import constants

Call = Callable[..., tuple[int, str, str]]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """What the hub's API says of repositories, and their files; ``cut_bytes`` ends a body early."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.listed: dict[str, str] = {}
        self.cut_bytes: int | None = None
        self.has_hashes = True
        self.sent: list[tuple[str, str | None]] = []

    def add(self, name: str, folder: Path, **more: bytes) -> None:
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.repositories[name] = {**files, **more, "README.md": b"x", "onnx/model.onnx": b"x", "a.bin": b"x"}

    def siblings(self, name: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = []
        for file, content in self.repositories[name].items():
            each: dict[str, Any] = {"rfilename": file, "size": len(content)}
            if file.endswith(".safetensors"):
                sha256 = self.listed.get(file, hashlib.sha256(content).hexdigest())
                each |= {
                    "blobId": "0" * 40,
                    "lfs": {"sha256": sha256, "size": len(content), "pointerSize": 1},
                }
            elif self.has_hashes:
                each["blobId"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            listed.append(each)
        return listed


class _Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/(.+)/revision/main", path):
            if found[1] in self.server.repositories:
                body = {"id": found[1], "sha": COMMIT, "siblings": self.server.siblings(found[1])}
                self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
            else:
                self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        found = re.fullmatch(rf"/(.+)/resolve/{COMMIT}/(.+)", path)
        assert found is not None, path
        content = self.server.repositories[found[1]][found[2]]
        etag = hashlib.sha256(content).hexdigest()
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.command == "GET":
            self.server.sent.append((found[2], asked))
        self.answer(206 if asked else 200, content[start:], headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.server.cut_bytes
        if cut is not None and len(body) > cut:
            self.wfile.write(body[:cut])
            self.close_connection = True
        else:
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of a machine that knows this hub alone; the address is read at import."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    address = f"http://127.0.0.1:{hub.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "".join(template[1:]))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


def test_get_fetches_what_a_model_is_made_of_and_no_more(
    hub: Hub, cache: Path, call: Call, tiny_model_folder: Path
) -> None:
    hub.add("stone/small", tiny_model_folder)
    done = call("models", "get", "stone/small")
    assert done[0] == 0, done[2]
    assert done[1].startswith(f"stone/small: revision {COMMIT}, ")
    folder = model_folder("stone/small")
    assert folder == cache / "models--stone--small" / "snapshots" / COMMIT
    assert {path.name for path in folder.iterdir()} == {path.name for path in tiny_model_folder.iterdir()}
    hub.sent.clear()
    assert call("models", "get", "stone/small")[0] == 0
    assert hub.sent == []
    settings = {"encoder": {"landmark_interval": 16}}
    notes = cairn.Collection.create("notes", root=cache.parent, model="stone/small", settings=settings)
    notes.add([{"id": "a", "text": "old stone path"}])
    assert notes.status()["fingerprints"]["model_revision"] == COMMIT


def test_get_after_a_failure_fetches_what_is_missing(
    hub: Hub, cache: Path, call: Call, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the attempts of huggingface_hub
    hub.add("stone/small", tiny_model_folder)
    hub.cut_bytes = (tiny_model_folder / "model.safetensors").stat().st_size // 8
    stopped = call("models", "get", "stone/small")
    assert stopped[0] == 75, stopped[2]
    assert stopped[2].splitlines()[-1].startswith("error: the hub did not send stone/small: ")
    assert not (cache / "models--stone--small" / "refs" / "main").exists()
    hub.cut_bytes = None
    hub.sent.clear()
    done = call("models", "get", "stone/small")
    assert done[0] == 0, done[2]
    assert {file for file, _ in hub.sent} == {"model.safetensors", "tokenizer.json"}


def test_get_removes_a_file_of_another_hash_and_asks_for_none_without(
    hub: Hub, cache: Path, call: Call, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("stone/small", tiny_model_folder)
    hub.has_hashes = False
    done = call("models", "get", "stone/small")
    assert done[0] == 1
    assert "config.json of stone/small must be listed with its hash, got none" in done[2]
    assert hub.sent == []
    hub.has_hashes = True
    hub.listed["model.safetensors"] = "f" * 64
    done = call("models", "get", "stone/small")
    assert done[0] == 1
    assert f"model.safetensors of stone/small must have the hash {'f' * 64}, got " in done[2]
    hub.listed.clear()
    assert call("models", "get", "stone/small")[0] == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    told = "error: a download must be allowed, got HF_HUB_OFFLINE=1; unset it\n"
    assert call("models", "get", "stone/another") == (2, "", told)


def test_get_gives_a_cde_model_the_tokenizer_of_its_backbone(
    hub: Hub, cache: Path, call: Call, tiny_model_folder: Path
) -> None:
    hub.add("google-bert/bert-base-uncased", tiny_model_folder)
    hub.add("jxm/cde", tiny_model_folder)
    config = {"architecture": "transductive", "embedder": "nomic-ai/nomic-bert-2048"}
    hub.repositories["jxm/cde"]["config.json"] = json.dumps(config).encode()
    del hub.repositories["jxm/cde"]["tokenizer.json"]
    done = call("models", "get", "jxm/cde")
    assert done[0] == 0, done[2]
    assert done[1].endswith("its tokenizer is that of google-bert/bert-base-uncased\n")
    given = model_folder("jxm/cde") / "tokenizer.json"
    assert given.read_bytes() == (tiny_model_folder / "tokenizer.json").read_bytes()


def test_get_refuses_what_cannot_be_read(
    hub: Hub, cache: Path, refused: Any, tiny_model_folder: Path
) -> None:
    hub.add("stone/pickled", tiny_model_folder)
    del hub.repositories["stone/pickled"]["model.safetensors"]
    hub.add("stone/wordless", tiny_model_folder)
    del hub.repositories["stone/wordless"]["tokenizer.json"]
    for name, config in {"stone/torn": b'{"a"', "stone/list": b"[1]"}.items():
        hub.add(name, tiny_model_folder)
        del hub.repositories[name]["tokenizer.json"]
        hub.repositories[name]["config.json"] = config
    said = {
        "stone/torn": "config.json of stone/torn must be a JSON object",
        "stone/list": "config.json of stone/list must be a JSON object",
        "stone/pickled": "must be in safetensors, got only a.bin, which is pickled",
        "stone/wordless": "must hold tokenizer.json, got none",
        "stone/none": "must be a model on the hub, got none of that name",
        "../etc": "must be called ORG/NAME",
    }
    for name, sentence in said.items():
        assert sentence in refused("models", "get", name)
    assert {file for file, _ in hub.sent if file.endswith(".bin")} == set()


def test_models_lists_those_here_and_public_ones(call: Call) -> None:
    code, out, _ = call("models", "--json")
    listed = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert [listed[name]["here"] for name in ("cairn-minilm", "cairn-lmk")] == ["installed", "installed"]
    assert listed["jxm/cde-small-v2"] == {
        "name": "jxm/cde-small-v2",
        "here": None,
        "million_parameters": 306,
        "width": 768,
        "brings": "English",
        "can": ["states", "context"],
    }
    known: dict[str, list[str]] = {"cairn-lmk": ["states", "landmarks"], "none": []}
    assert {name: listed[name]["can"] for name in known} == known
    assert "states, landmarks" in call("models")[1]


def test_download_of_an_existing_collection_is_of_the_model_it_was_built_with(
    tmp_path: Path, tiny_model_folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat")
    wanted: list[str] = []
    monkeypatch.setattr("cairn.pipeline.model.folders.download.download_if_missing", wanted.append)
    ingest = ["ingest", str(tmp_path / "a.txt"), "--collection", "c", "--root", str(tmp_path / "root")]
    settings = ["--landmark-interval", "8", "--context-documents", "2", "--quiet"]

    assert call(*ingest, "--model", str(tiny_model_folder), "--download", *settings)[0] == 0
    assert call(*ingest, "--download", "--quiet")[0] == 0

    assert wanted == [str(tiny_model_folder)] * 2
