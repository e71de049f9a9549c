"""An endpoint through the whole line, from `ingest --model https://…` to searches and readiness."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.collection import load_query_encoder, open_collection
from cairn.pipeline.config import DEFAULT_MODEL
from cairn.pipeline.encode import documents, endpoint, endpoint_requests
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.endpoint import PROBES
from cairn.pipeline.encode.endpoint_requests import KEY_VARIABLE, Patience
from cairn.pipeline.errors import EndpointDownError, FingerprintMismatchError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.line import live_engine
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.ingest_settings import resolve_ingest_config
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.settings import ServeSettings
from starlette.testclient import TestClient

from tests.embedding_server import EmbeddingServer, vector_of
from tests.served_stones import wait_until
from tests.small_ingests import write_texts

TEXTS = [f"stone {number} on the old mountain path" for number in range(80)]
KEY = "secret-key-of-the-endpoint"


@pytest.fixture(autouse=True)
def surroundings(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setattr(endpoint_requests, "FIRST_PAUSE_SECONDS", 0.01)
    patience = Patience(retry_seconds=0.3, total_seconds=60.0)
    for place, name in ((endpoint, "INGEST"), (endpoint, "QUERY"), (live_engine, "WRITE")):
        monkeypatch.setattr(place, name, patience)
    write_texts("corpus.parquet", TEXTS)


def _ingest(server: EmbeddingServer, *options: str, is_quiet: bool = True) -> int:
    command = ["ingest", "corpus.parquet", "--collection", "c", "--model", server.model, *options]
    return run(cairn, [*command, *["--quiet"] * is_quiet], "cairn")


def _counts(server: EmbeddingServer) -> list[int]:
    return sorted({server.embedded[text] for text in TEXTS})


def test_tokens_of_an_endpoints_chunks_are_read_here(
    embedding_server, monkeypatch, tiny_model_folder, capsys
):
    monkeypatch.setattr(documents, "TOKEN_READER", str(tiny_model_folder))
    assert _ingest(embedding_server, "--token-bytes", "8", "--dry-run") == 0
    assert not embedding_server.embedded.keys() & set(TEXTS)
    assert _ingest(embedding_server, "--token-bytes", "8") == 0
    assert f"only {DEFAULT_MODEL}, which knows English, gives token vectors" in capsys.readouterr().err
    write_texts("corpus.parquet", [*TEXTS, "an old stone river " * 60])
    assert _ingest(embedding_server) == 0
    assert _counts(embedding_server) == [1]
    opened = open_collection("c")
    status = opened.status()
    assert (status["token_vectors"]["vector_bytes"], status["documents"]) == (8, len(TEXTS) + 1)
    found, without = (opened.search("stone 7 on the old path", late=late).hits[0] for late in (True, False))
    assert ("late" in found.scores, "late" in without.scores) == (True, False)
    generation = open_generation(opened.layout, 2)
    stored, chunk = generation.token_vectors, generation.num_chunks - 2
    (start,), (end,) = generation.spans_of(np.array([chunk]), np.array([chunk + 1]))
    text = ("an old stone river " * 60)[start:end]
    reader = DocumentEncoder(
        encoder_config({"model": str(tiny_model_folder)}), token_codebook=stored.codebook
    )
    own = stored.chunks.read(np.array([chunk])).codes
    assert len(own) > 30
    np.testing.assert_array_equal(own, reader.encode([text]).chunk_tokens.rows[:, :-1])
    settings = {"encoder": {"model": embedding_server.model, "token_bytes": 0}}
    config = resolve_ingest_config(settings, None)
    with pytest.raises(FingerprintMismatchError, match=r"token_bytes is 8, got 0"):
        build_index(["corpus.parquet"], "cairn-data", "c", config)


def test_ingest_and_search_by_an_endpoint(embedding_server, capsys):
    assert _ingest(embedding_server) == 0
    told = capsys.readouterr()
    assert "is an endpoint: it gives one vector a text and shows no states of tokens" in told.err
    assert _counts(embedding_server) == [1]
    answer = open_collection("c").search("stone 7 on the old mountain path", hybrid=False)
    assert answer.hits[0].doc_id == "d7"
    status = open_collection("c").status()
    assert "no token vectors" in " ".join(status["warnings"])
    assert status["token_vectors"] is None
    assert run(cairn, ["status", "c"], "cairn") == 0
    told = capsys.readouterr().out
    assert f"{embedding_server.model}: a vector for each chunk of at most 64 tokens" in told
    assert "--late" not in told  # it shows no states to make token vectors of
    for file in Path("cairn-data").rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes()
    before = len(embedding_server.requests)
    assert _ingest(embedding_server) == 0  # nothing changed: nothing is asked
    assert len(embedding_server.requests) == before
    embedding_server.faults = [lambda *_: (500, {}, b"")] * 99
    with pytest.raises(EndpointDownError, match="try again later"):
        open_collection("c").search("stone")


@pytest.mark.parametrize("is_quiet", [False, True])
def test_ingest_says_that_its_endpoint_does_not_answer_unless_it_is_quiet(
    embedding_server, monkeypatch, capsys, is_quiet
):
    monkeypatch.setattr(endpoint_requests, "SILENT_SECONDS", 0.0)
    embedding_server.faults = [None, lambda *_: (503, {"retry-after": "0.1"}, b"")]
    assert _ingest(embedding_server, is_quiet=is_quiet) == 0
    told = capsys.readouterr().err
    assert ("503; it is tried again for up to" in told) is not is_quiet
    assert ("answers again after" in told) is not is_quiet


def test_run_that_stopped_pays_for_nothing_twice(embedding_server, capsys):
    embedding_server.faults = [None, None, None, lambda *_: (401, {}, b"")]
    assert _ingest(embedding_server, "--endpoint-requests", "1") == 2
    assert "Traceback" not in capsys.readouterr().err
    paid = {text for text in TEXTS if embedding_server.embedded[text]}
    assert 0 < len(paid) < len(TEXTS)
    embedding_server.faults = []
    assert _ingest(embedding_server) == 0
    assert _counts(embedding_server) == [1]
    assert not list(Path("cairn-data").rglob("paid.sqlite"))


def test_unfinished_run_that_is_begun_again_with_another_model_is_named(
    embedding_server, caplog, tiny_model_folder
):
    embedding_server.faults = [None, None, lambda *_: (401, {}, b"")]
    assert _ingest(embedding_server) == 2
    assert "had other settings" not in caplog.text
    assert _ingest(embedding_server, "--model", str(tiny_model_folder)) == 0
    assert "the unfinished run of collection 'c' had other settings, such as another model" in caplog.text


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGINT], 130),
        pytest.param([signal.SIGTERM], 130, marks=pytest.mark.slow),
        pytest.param([signal.SIGINT, signal.SIGINT], -signal.SIGINT, marks=pytest.mark.slow),
        pytest.param([signal.SIGKILL], -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_run_that_is_ended_waits_for_no_server_and_asks_for_no_answer_twice(embedding_server, signals, code):
    is_over, is_asked = threading.Event(), threading.Event()

    def hang(*_) -> None:
        is_asked.set()
        is_over.wait(600.0)

    def batches(texts: list[str], _: list[np.ndarray]) -> None:
        if set(texts) & set(TEXTS) and any(embedding_server.embedded[text] for text in TEXTS):
            hang()

    embedding_server.faults = [batches] * 99
    command = [sys.executable, "-m", "cairn.cli.main", "ingest", "corpus.parquet", "--collection", "c"]
    command += ["--quiet", "--model", embedding_server.model, "--endpoint-requests", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert is_asked.wait(300.0)
            started = time.monotonic()
            for number in signals:
                process.send_signal(number)
                time.sleep(0.2)  # within the second that answers have
            assert process.wait(100.0) == code
            assert time.monotonic() - started < 60.0  # of the two minutes that an answer may take
            told = process.communicate()[1]
        finally:
            process.kill()
    assert not {"Traceback", "ignored"} & set(told.split())
    answered = {text for text in TEXTS if embedding_server.embedded[text]}
    assert 0 < len(answered) < len(TEXTS)
    embedding_server.faults = []
    is_over.set()
    assert _ingest(embedding_server) == 0
    assert {embedding_server.embedded[text] for text in answered} == {1}


def test_changed_model_behind_the_name_mixes_nothing_and_a_moved_one_goes_on(embedding_server, capsys):
    assert _ingest(embedding_server) == 0
    encoder = load_query_encoder(open_collection("c")._searcher().generation)
    embedding_server.seed = "model-b"
    write_texts("corpus.parquet", [*TEXTS, "a new river"])
    assert _ingest(embedding_server) == 2
    assert "the model behind the name has changed" in capsys.readouterr().err
    with pytest.raises(FingerprintMismatchError):
        encoder.encode_queries(["stone"])
    moved = EmbeddingServer()  # with the same model
    try:
        assert _ingest(moved) == 0
        assert set(moved.embedded) == {*PROBES, "a new river"}
        assert open_collection("c").search("a new river").hits[0].doc_id == "d80"
    finally:
        moved.stop()


def test_dry_run_tells_tokens_time_and_cost_and_sends_no_document(embedding_server, capsys):
    options = ("--dry-run", "--json", "--endpoint-price", "100000")
    assert _ingest(embedding_server, *options) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["estimated_tokens"] > 500
    assert float(plan["estimated_cost"]) == pytest.approx(plan["estimated_tokens"] / 10, rel=0.01)
    assert plan["estimated_encode_seconds"] > 0
    assert _counts(embedding_server) == [0]
    assert not Path("cairn-data").exists()


def test_server_tells_in_readyz_that_its_endpoint_does_not_answer_and_not_where_it_is(
    embedding_server, caplog
):
    caplog.set_level("INFO")
    assert _ingest(embedding_server) == 0
    settings = ServeSettings(root=Path("cairn-data"), collections=("c",), deadline_seconds=300.0)
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8400") as client:
        wait_until(lambda: client.get("/readyz").json().get("detail") != "collections are being opened")
        assert client.get("/readyz").json() == {"status": "ready"}
        asked = {"query": "stone 7 on the old mountain path"}
        assert client.post("/v1/collections/c/search", json=asked).json()["hits"][0]["doc_id"] == "d7"
        embedding_server.faults = [lambda *_: (503, {}, b"")] * 99
        problem = client.post("/v1/collections/c/search", json={"query": "river"})
        assert (problem.status_code, problem.json()["type"][-13:]) == (503, "endpoint-down")
        reason = client.get("/readyz").json()["reason"]
        assert reason.startswith("collection 'c' cannot encode queries")
        assert embedding_server.host not in reason
        assert embedding_server.host in caplog.text
        embedding_server.faults = []
        assert client.post("/v1/collections/c/search", json={"query": "river"}).status_code == 200
        assert client.get("/readyz").json() == {"status": "ready"}


def test_write_waits_for_its_endpoint_and_readyz_says_so(embedding_server):
    assert _ingest(embedding_server) == 0
    settings = ServeSettings(root=Path("cairn-data"), collections=("c",), writable=True)
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8400") as client:
        embedding_server.faults = [lambda *_: (503, {}, b"")] * 999
        document = {"doc_id": "new", "text": "a new river"}
        answer = client.post("/v1/collections/c/documents", json={"documents": [document]})
        assert answer.status_code == 202
        wait_until(lambda: "writes to collection 'c' wait" in client.get("/readyz").text)
        assert embedding_server.host not in client.get("/readyz").text
        embedding_server.faults = []
        wait_until(lambda: "writes to collection 'c' wait" not in client.get("/readyz").text)
        assert client.get("/v1/collections/c/documents/new").status_code == 200


def test_endpoint_that_made_the_vectors_encodes_queries_alone(embedding_server):
    vectors = [vector_of(text, embedding_server.seed, embedding_server.width).tolist() for text in TEXTS]
    write_texts("corpus.parquet", TEXTS, own=vectors)
    assert _ingest(embedding_server, "--vector-column", "own") == 0
    assert set(embedding_server.embedded) <= {*PROBES}
    answer = open_collection("c").search(TEXTS[7], hybrid=False)
    assert answer.hits[0].scores["document"] == pytest.approx(1.0, abs=1e-4)
    embedding_server.seed = "model-b"
    with pytest.raises(FingerprintMismatchError, match="behind the name has changed"):
        open_collection("c").search("river")
