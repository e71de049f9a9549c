"""Queries written by a language model, against a server on the loopback."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.errors import ConfigError, TryAgainError
from cairn.pipeline.lab.train import query_writer
from cairn.pipeline.lab.train.contrastive import train
from cairn.pipeline.lab.train.documents import read_document_pairs
from cairn.pipeline.lab.train.query_writer import KEY_VARIABLE, QueryWriter
from cairn.pipeline.lab.train.settings import QueryWriterConfig, TrainConfig

from tests.lab.train.conftest import LOOP_SETTINGS

Answer = tuple[int, Any]
PAUSE_SECONDS = 0.1


def completion(content: str | None, **message: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": content, **message}}]}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_writer, "FIRST_WAIT_SECONDS", 0.001)


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[str, list[dict[str, Any]]]]]:
    """Return a starter of a server that gives these answers in turn, the last one again and again."""
    servers: list[ThreadingHTTPServer] = []

    def start(*answers: Answer) -> tuple[str, list[dict[str, Any]]]:
        asked: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
                status, answer = answers[min(len(asked), len(answers)) - 1]
                drips = isinstance(answer, list)
                whole = answer if isinstance(answer, bytes) or drips else json.dumps(answer).encode()
                pieces = whole if drips else [whole]
                self.send_response(status)
                self.send_header("Content-Length", str(sum(map(len, pieces))))
                self.end_headers()
                with contextlib.suppress(OSError):
                    for piece in pieces:
                        time.sleep(PAUSE_SECONDS if drips else 0.0)
                        self.wfile.write(piece)

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def writer(url: str, folder: Path) -> QueryWriter:
    return QueryWriter(QueryWriterConfig(query_writer=url, query_writer_model="m"), folder)


def documents(path: Path) -> Path:
    sections = [
        f"# Part {number}\n\n" + f"The stone of number {number} lies by the river. " * 8
        for number in range(3)
    ]
    pq.write_table(pa.table({"title": ["Stones"], "text": ["\n\n".join(sections)]}), path)
    return path


def test_pairs_have_the_queries_that_were_written(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    url, asked = serve(
        (200, completion('{"query": "where does the  first stone lie"}')),
        (200, completion('```json\n{"query": "second stone"}\n```')),
        (200, completion("I cannot help with that.")),
    )
    ask = writer(f"{url}/v1", tmp_path).write
    pairs = read_document_pairs([documents(tmp_path / "d.parquet")], 256, ask)
    assert pairs.queries == ("where does the first stone lie", "second stone")
    assert all(document.startswith("The stone of number") for document in pairs.documents)
    assert pairs.skipped == {"query writer answered without a query": 1, "short section": 1}
    assert {(each["path"], each["key"], each["model"]) for each in asked} == {
        ("/v1/chat/completions", "Bearer secret", "m")
    }
    assert asked[0]["messages"][1]["content"].startswith("Title: Stones\n\nThe stone of number 0")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (completion(None, refusal="no"), "query writer refused"),
        (completion('{"query": ""}'), "query writer answered without a query"),
        (completion('{"query": 3}'), "query writer answered without a query"),
        (completion("[" * 5_000), "query writer answered without a query"),
        ({"choices": []}, "query writer answered without a query"),
        (b"<html>", "query writer answered without a query"),
        (b" " * (1 << 19), "query writer answered without a query"),
    ],
    ids=["refusal", "empty", "number", "nested", "none", "html", "large"],
)
def test_answer_without_a_query_costs_one_pair(serve: Any, tmp_path: Path, answer: Any, reason: str):
    url, asked = serve((200, answer), (200, completion('{"query": "next"}')))
    ask = writer(url, tmp_path)
    assert ask.write("", "one") == reason
    assert ask.write("", "two") == ("next", "two")
    assert len(asked) == 2


def test_what_was_written_is_not_asked_for_again(serve: Any, tmp_path: Path):
    url, asked = serve((200, completion('{"query": "first"}')), (200, completion("no")))
    first = [writer(url, tmp_path).write("", text) for text in ("one", "two")]
    path = tmp_path / "written_queries.jsonl"
    path.write_bytes(path.read_bytes() + b'{"key": "cut o')
    again = writer(url, tmp_path)
    assert [again.write("", text) for text in ("one", "two")] == first
    assert len(asked) == 2
    again.write("", "three")
    assert len(path.read_text().splitlines()) == 3


def test_fault_of_the_server_is_tried_again_a_bounded_number_of_times(serve: Any, tmp_path: Path):
    url, asked = serve((503, {}), (429, {}), (200, completion('{"query": "third"}')), (500, {}))
    ask = writer(url, tmp_path)
    assert ask.write("", "one") == ("third", "one")
    assert [ask.write("", text) for text in ("two", "three")] == ["query writer gave no answer"] * 2
    assert len(asked) == 9
    with pytest.raises(TryAgainError, match=r"gave no answer for 3 sections in a row \(status 500\)"):
        ask.write("", "four")
    path = tmp_path / "written_queries.jsonl"
    assert len(path.read_text().splitlines()) == 1  # nothing is kept of a server that is down


def test_section_without_an_answer_is_not_asked_for_again_once_the_server_answered(
    serve: Any, tmp_path: Path
):
    url, asked = serve((400, {}), (200, completion('{"query": "second"}')), (302, {}))
    ask = writer(url, tmp_path)
    found = [ask.write("", text) for text in ("one", "two", "three")]
    assert found == ["query writer gave no answer", ("second", "two"), "query writer gave no answer"]
    ask.finish()
    assert [writer(url, tmp_path).write("", text) for text in ("one", "two", "three")] == found
    assert len(asked) == 3


def test_answer_that_drips_is_given_up(tmp_path: Path, serve: Any):
    url, asked = serve((200, [b" "] * 20))
    config = QueryWriterConfig(query_writer=url, query_writer_model="m", query_writer_timeout_seconds=0.2)
    started = time.monotonic()
    assert QueryWriter(config, tmp_path).write("", "one") == "query writer gave no answer"
    assert time.monotonic() - started < 3 * 20 * PAUSE_SECONDS
    assert len(asked) == 3


def test_wrong_key_ends_the_run_and_shows_no_key(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    url, asked = serve((401, {}))
    with pytest.raises(ConfigError, match=r"got status 401 .* CAIRN_QUERY_WRITER_KEY") as error:
        writer(url.replace("//", "//user:word@"), tmp_path).write("", "one")
    assert "secret" not in str(error.value)
    assert "word" not in str(error.value)
    assert len(asked) == 1
    monkeypatch.setenv(KEY_VARIABLE, "two\nlines")
    with pytest.raises(ConfigError, match="must be one line of printable ASCII"):
        writer(url, tmp_path)


def test_address_without_a_model_or_without_documents_is_refused(
    tiny_model_folder: Path, pairs_file: Path, tmp_path: Path
):
    with pytest.raises(ConfigError, match="query_writer_model must be given together"):
        QueryWriterConfig(query_writer="http://127.0.0.1:1")
    writes = QueryWriterConfig(query_writer="http://127.0.0.1:1", query_writer_model="m")
    with pytest.raises(ConfigError, match="query_writer must go with documents"):
        train(
            [pairs_file],
            tmp_path / "run",
            TrainConfig(steps=1),
            base=str(tiny_model_folder),
            query_writer=writes,
        )


def test_run_goes_on_with_the_queries_that_were_written(
    serve: Any, tiny_model_folder: Path, tmp_path: Path, one_thread: None
):
    url, asked = serve((200, completion('{"query": "the old stone"}')))
    writes = QueryWriterConfig(query_writer=url, query_writer_model="m")
    config = TrainConfig(
        **{**LOOP_SETTINGS, "steps": 1, "batch_pairs": 3, "heldout_pairs": 0, "max_document_tokens": 128}
    )
    sources = [documents(tmp_path / "d.parquet")]
    for resumed_at in (0, 1):
        report = train(
            [], tmp_path / "run", config, base=str(tiny_model_folder), documents=sources, query_writer=writes
        )
        assert report.resumed_at == resumed_at
    assert len(asked) == 3
