"""Lines by a language model through the whole line, from `ingest --describe` to searches and status."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import EncoderConfig, IngestConfig
from cairn.pipeline.encode import describe, endpoint_requests
from cairn.pipeline.encode.describe import DESCRIBE_KEY_VARIABLE
from cairn.pipeline.encode.endpoint_requests import Patience
from cairn.pipeline.line.compatibility import stored_settings
from cairn.pipeline.line.ingest_settings import resolve_ingest_config
from cairn.pipeline.line.pending import work_key
from cairn.pipeline.line.recontextualise import recontextualise

from tests.embedding_server import EmbeddingServer
from tests.small_ingests import write_texts

KEY = "secret-key-of-the-describer"
TEXTS = [f"stone {number} lies on the old mountain path beside the river" for number in range(12)]


@pytest.fixture(autouse=True)
def surroundings(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DESCRIBE_KEY_VARIABLE, KEY)
    monkeypatch.setattr(endpoint_requests, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(describe, "INGEST", Patience(retry_seconds=0.3, total_seconds=60.0))
    write_texts("corpus.parquet", TEXTS)


@pytest.fixture
def ingest(embedding_server: EmbeddingServer, tiny_model_folder: Path) -> Callable[..., int]:
    embedding_server.answer = lambda question: f"zebra{''.join(re.findall('stone [0-9]+', question)[:1])}."

    def call(*options: str, model: str = str(tiny_model_folder)) -> int:
        own = ["--model", model, "--describe", f"{embedding_server.host}/v1", "--describe-model", "small"]
        chosen = () if Path("cairn-data/c/CURRENT").exists() else ("--landmark-interval", "8", *own)
        command = ["ingest", "corpus.parquet", "--collection", "c", "--quiet", *chosen, *options]
        return run(cairn, command, "cairn")

    return call


def answered(server: EmbeddingServer) -> dict[str, int]:
    return {question: count for question, count in server.questions.items() if "stone" in question}


@pytest.mark.parametrize("is_endpoint", [False, True])
def test_lines_are_found_by_words_and_never_shown(embedding_server, ingest, is_endpoint, capsys):
    assert ingest(*(["--model", embedding_server.model] if is_endpoint else [])) == 0
    capsys.readouterr()
    keys = {headers.get("Authorization") for headers in embedding_server.headers}
    assert keys == ({f"Bearer {KEY}", None} if is_endpoint else {f"Bearer {KEY}"})
    collection = open_collection("c")
    num_chunks = collection.status()["chunks"]
    assert len(answered(embedding_server)) == num_chunks
    assert set(answered(embedding_server).values()) == {1}
    hits = collection.search("zebrastone", top_k=12, passages=3).hits
    assert {hit.doc_id for hit in hits} == {f"d{k}" for k in range(12)}
    assert all("zebra" not in passage.text for hit in hits for passage in hit.passages)
    assert run(cairn, ["status", "c"], "cairn") == 0
    told = capsys.readouterr().out
    assert f"behind a line by small at {embedding_server.host}/v1" in told
    for file in Path("cairn-data").rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes()


def test_update_asks_for_the_chunks_of_what_changed_and_a_new_context_or_partitions_for_none(
    embedding_server, ingest
):
    assert ingest() == 0
    embedding_server.questions.clear()
    assert ingest() == 0
    assert not embedding_server.questions
    write_texts("corpus.parquet", [*TEXTS[:-1], "another stone 77 was laid in spring"])
    assert ingest() == 0
    assert answered(embedding_server)
    assert all("another stone 77" in question for question in answered(embedding_server))
    before = len(embedding_server.requests)
    config = resolve_ingest_config({}, stored_settings("cairn-data", "c"))
    assert recontextualise("cairn-data", "c", config).encoded == 12
    assert run(cairn, ["repartition", "c", "2"], "cairn") == 0
    assert len(embedding_server.requests) == before
    assert len(open_collection("c").search("zebrastone", top_k=12).hits) == 12


@pytest.mark.parametrize("change", [None, "address", "columns", "settings"])
def test_run_that_stopped_pays_for_no_line_twice(embedding_server, ingest, capsys, change):
    answer, left = embedding_server.answer, iter(range(6))
    embedding_server.answer = lambda question: (
        answer(question) if next(left, None) is not None else (403, {}, b"")
    )
    assert ingest("--endpoint-requests", "1") == 2
    told = capsys.readouterr().err
    assert f"put the key into {DESCRIBE_KEY_VARIABLE}" in told
    assert "Traceback" not in told
    assert len(answered(embedding_server)) == 5
    embedding_server.answer = answer
    options = []
    if change == "address":
        options = ["--describe", embedding_server.host.replace("127.0.0.1", "localhost") + "/v1"]
    elif change == "columns":
        write_texts("corpus.parquet", TEXTS, year=list(range(len(TEXTS))))
    elif change == "settings":
        options = ["--context-documents", "4"]
    assert ingest(*options) == 0
    assert len(answered(embedding_server)) == open_collection("c").status()["chunks"]
    assert set(answered(embedding_server).values()) == {1}
    assert not list(Path("cairn-data").rglob("paid.sqlite"))


def test_encoded_shards_are_taken_over_from_a_server_that_moved_and_not_without_lines():
    keys = [
        work_key(IngestConfig(encoder=EncoderConfig(describe=describe, describe_model=model)), "", 1)
        for describe, model in (
            ("http://old/v1", "small"), ("http://new/v1", "small"), ("http://new/v1", ""), (None, ""),
        )
    ]  # fmt: skip
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_chunks_without_a_line_are_counted_and_named(embedding_server, ingest, capsys):
    answer = embedding_server.answer
    embedding_server.answer = lambda question: "" if "stone 3 " in question else answer(question)
    assert ingest() == 0
    told = capsys.readouterr().err
    assert re.search(r"3 of 36 chunks have no line, as .* are indexed without: d3#0, d3#1, d3#2\n", told)
    assert open_collection("c").search("stone 3", top_k=1, hybrid=True).hits


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(None, None), ("late", "must answer in 0 s"), ("busy", "must take requests, got status 503")],
)
def test_dry_run_tells_lines_tokens_and_time_where_the_server_answers_and_sends_no_text(
    embedding_server, ingest, capsys, monkeypatch, fault, reason
):
    is_over = threading.Event()

    def faulty(_: str) -> tuple[int, dict[str, str], bytes]:
        assert fault == "busy" or is_over.wait(300.0)
        return 503, {}, b""

    if fault is not None:
        total = 0.2 if fault == "late" else 60.0
        monkeypatch.setattr(endpoint_requests, "QUERY", Patience(retry_seconds=0.2, total_seconds=total))
        embedding_server.answer = faulty
    assert ingest("--dry-run", "--json", "--model", embedding_server.model) == 0
    is_over.set()
    plan = json.loads(capsys.readouterr().out)
    assert plan["estimated_lines"] >= 12
    assert plan["estimated_line_tokens"] > 100 * plan["estimated_lines"]
    assert ("estimated_line_seconds" in plan) == (reason is None)
    told = [each for each in plan["warnings"] if "time that lines take is left out" in each]
    assert [reason in each for each in told] == [True] * (reason is not None)
    assert not answered(embedding_server)


def test_lines_stay_with_a_collection_wherever_they_are_written(embedding_server, ingest, capsys):
    assert ingest() == 0
    second = EmbeddingServer()
    second.answer = embedding_server.answer
    try:
        write_texts("corpus.parquet", [*TEXTS, "a new stone 99"])
        assert ingest("--describe", f"{second.host}/v1") == 0
        assert any("stone 99" in question for question in second.questions)
    finally:
        second.stop()
    assert ingest("--describe-model", "large") == 2
    assert "encoder.describe_model is 'small', got 'large'" in capsys.readouterr().err
