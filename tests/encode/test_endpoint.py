"""An endpoint's vectors, however its server behaves: asked for once, checked, and never of another model."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.encode import endpoint, endpoint_requests
from cairn.pipeline.encode.endpoint import PROBES, EndpointEncoder
from cairn.pipeline.encode.endpoint_requests import KEY_VARIABLE, Patience, Server
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import ConfigError, EndpointDownError, FingerprintMismatchError, ModelError
from cairn.pipeline.model.folders.model_defaults import encoder_config

from tests.embedding_server import EmbeddingServer, vector_of

TEXTS = [f"stone {number} on the mountain path" for number in range(70)]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_requests, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up soon; other tests wait as long as a busy machine needs."""
    monkeypatch.setattr(endpoint, "INGEST", Patience(retry_seconds=0.1, total_seconds=60.0))
    monkeypatch.setattr(endpoint, "QUERY", Patience(retry_seconds=0.2, total_seconds=0.2))


def encoder_of(server: EmbeddingServer, **settings) -> EndpointEncoder:
    return EndpointEncoder(encoder_config({"model": server.model, **settings}))


def checked(server: EmbeddingServer, **settings) -> EndpointEncoder:
    """Return an encoder that has asked what its server gives."""
    encoder = encoder_of(server, **settings)
    encoder.check()
    return encoder


def unit(row: np.ndarray) -> np.ndarray:
    return row / np.linalg.norm(row)


@pytest.mark.parametrize("gives_base64", [True, False])
def test_vectors_are_the_servers_in_the_order_of_texts(embedding_server, gives_base64):
    embedding_server.gives_base64 = gives_base64
    encoded = encoder_of(embedding_server).encode(TEXTS)
    expected = np.stack([unit(vector_of(text, "model-a", 16)) for text in TEXTS])
    np.testing.assert_allclose(encoded.document_vectors_NV, expected, atol=1e-6)
    np.testing.assert_allclose(encoded.chunk_vectors_MV, expected, atol=1e-6)
    assert max(len(asked["input"]) for asked in embedding_server.requests) <= 32


def test_chunks_are_sent_behind_prefix_and_title_and_spans_are_the_texts_own(embedding_server):
    text = "".join(f"Old stone {number} path. " for number in range(40))
    encoder = encoder_of(embedding_server, document_prefix="passage: ", landmark_interval=32)
    encoded = encoder.encode([text], titles=["The Way"])
    spans = list(zip(encoded.start_char.tolist(), encoded.end_char.tolist(), strict=True))
    assert (spans[0][0], spans[-1][1]) == (0, len(text))
    assert len(spans) > 3
    assert all(text[start:end].endswith("path. ") for start, end in spans)
    head = "passage: The Way\n"
    sent = [each.removeprefix(head) for each in embedding_server.embedded if each.startswith(head)]
    assert len(sent) == len(spans)
    assert " ".join(sent) == text.strip()


def test_text_encoder_of_an_endpoint_encodes_both_sides(embedding_server):
    encoder = load_encoder(embedding_server.model, query_prefix="query: ", dims=8)
    assert encoder.encode_documents(TEXTS[:2]).shape == (2, 8)
    np.testing.assert_allclose(
        encoder.encode_queries(["a river"])[0], unit(vector_of("query: a river", "model-a", 8)), atol=1e-6
    )
    assert embedding_server.requests[-1]["dimensions"] == 8
    with pytest.raises(ConfigError, match="got an endpoint"):
        encoder.save("nowhere")


def test_contextual_api_gets_a_documents_chunks_as_one_list(embedding_server):
    model = f"{embedding_server.host}/v1/contextualizedembeddings#ctx"
    encoder = EndpointEncoder(
        encoder_config({"model": model, "landmark_interval": 16, "whole_text_tokens": 0})
    )
    alone = encoder.encode(["the river. " * 3])
    encoded = encoder.encode(["the river. " * 12, "a path"])
    groups = [group for asked in embedding_server.requests[1:] for group in asked["inputs"]]
    lists = [len(group) for group in groups if group[0] not in PROBES]
    assert lists[1] > 2
    assert np.diff(encoded.chunk_offsets).tolist() == lists[1:]
    assert alone.chunk_vectors_MV.shape[1] == 16
    encoder.encode_queries(["a river"])
    assert embedding_server.requests[-1]["input_type"] == "query"


@pytest.mark.parametrize("most", [5, 1])
def test_batch_that_is_refused_for_its_size_is_halved_down_to_one_text(embedding_server, most):
    embedding_server.most_texts = most
    assert len(encoder_of(embedding_server).encode(TEXTS).document_vectors_NV) == len(TEXTS)
    assert all(embedding_server.embedded[text] == 1 for text in TEXTS)


def test_text_that_is_refused_makes_later_batches_no_smaller(embedding_server):
    encoder = checked(embedding_server, endpoint_requests=1)
    embedding_server.faults = [lambda texts, _: (400, {}, b"") if "bad" in texts else None] * 40
    with pytest.raises(ModelError, match="status 400"):
        encoder.encode([*TEXTS[:30], "bad"])
    encoder.encode(TEXTS[30:61])
    assert len(embedding_server.requests[-1]["input"]) == 32


@pytest.mark.parametrize("places", [2, 1])
def test_retry_after_holds_for_all_requests(embedding_server, monkeypatch, places):
    encoder = checked(embedding_server, endpoint_requests=2)
    encoder._endpoint._most_at_once = places
    pause_of, is_told = endpoint_requests._pause_of, threading.Event()
    monkeypatch.setattr(endpoint_requests, "_pause_of", lambda *failed: is_told.set() or pause_of(*failed))
    limited_at, others_at = list[float](), list[float]()

    def limit(*_):
        limited_at.append(time.monotonic())
        return 429, {"retry-after": "0.5"}, b""

    # one that is on its way by then is answered when the client knows the limit
    on_its_way = [lambda *_: is_told.wait(60.0) and None] * (places - 1)
    embedding_server.faults = [limit, *on_its_way, *[lambda *_: others_at.append(time.monotonic())] * 8]
    encoder.encode(TEXTS)
    assert others_at
    assert min(others_at) >= limited_at[0] + 0.5
    assert all(embedding_server.embedded[text] == 1 for text in TEXTS)


def test_server_that_answers_several_requests_too_late_is_asked_fewer_at_once(embedding_server, monkeypatch):
    encoder = checked(embedding_server, endpoint_requests=3)
    monkeypatch.setattr(endpoint_requests, "ANSWER_SECONDS", 1.0)
    running, most, is_over = set[int](), list[int](), threading.Event()

    def watched(*_):
        running.add(threading.get_ident())
        most.append(len(running))
        time.sleep(0.1)
        running.discard(threading.get_ident())

    embedding_server.faults = [*[lambda *_: is_over.wait(60.0) and None] * 3, *[watched] * 20]
    encoder.encode(TEXTS)
    is_over.set()
    assert set(most) == {1}


def test_server_that_was_slow_for_a_while_is_asked_as_much_as_before_again(embedding_server, monkeypatch):
    monkeypatch.setattr(endpoint_requests, "GOOD_ANSWERS", 3)
    encoder = checked(embedding_server, endpoint_requests=2)
    with monkeypatch.context() as hurried:
        hurried.setattr(endpoint_requests, "ANSWER_SECONDS", 1.0)
        is_over = threading.Event()
        embedding_server.faults = [lambda *_: is_over.wait(60.0) and None]
        encoder.encode(TEXTS)
        is_over.set()
    encoder.encode([f"in time {text}" for text in TEXTS])
    # two at once meet, which requests one after another never would
    both = threading.Barrier(2, timeout=30.0)
    embedding_server.faults = [lambda *_: both.wait() and None] * 2
    encoder.encode([f"later {text}" for text in TEXTS[:62]])
    assert not both.broken


def test_connections_that_fail_take_no_place_away(embedding_server, monkeypatch):
    import httpx2

    encoder = checked(embedding_server, endpoint_requests=2)
    post, blips = httpx2.AsyncClient.post, iter(range(3))

    async def post_after_blips(client, *arguments, **settings):
        if next(blips, None) is not None:
            raise httpx2.ConnectTimeout("no route for a moment")
        return await post(client, *arguments, **settings)

    monkeypatch.setattr(httpx2.AsyncClient, "post", post_after_blips)
    both = threading.Barrier(2, timeout=30.0)
    embedding_server.faults = [lambda *_: both.wait() and None] * 2
    encoder.encode(TEXTS[:62])
    assert not both.broken


def test_answer_that_cannot_be_used_is_asked_for_three_times(embedding_server):
    encoder = encoder_of(embedding_server)
    embedding_server.faults = [PASSING["HTML"]] * 9
    with pytest.raises(EndpointDownError, match="ask who runs it"):
        encoder.check()
    assert len(embedding_server.requests) == 3


PASSING = {
    "500": lambda *_: (500, {}, b"oops"),
    "HTML": lambda *_: (200, {"content-type": "text/html"}, b"<html>sign in</html>"),
    "dropped item": lambda _, found: found[:-1],
    "NaN": lambda _, found: [found[0] * np.nan, *found[1:]],
    "zero vector": lambda _, found: [found[0] * 0, *found[1:]],
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_bad_answer_that_comes_once_is_asked_for_again(embedding_server, fault):
    encoder = checked(embedding_server)
    embedding_server.faults = [fault]
    assert np.isfinite(encoder.encode(TEXTS[:3]).document_vectors_NV).all()


LASTING = {
    "500": (PASSING["500"], EndpointDownError, "must take requests, got status 500"),
    "HTML": (PASSING["HTML"], EndpointDownError, r"vectors in JSON, got something else \(text/html\)"),
    "deep JSON": (lambda *_: (200, {}, b"[" * 200_000), EndpointDownError, "got something else"),
    "huge number": (
        lambda *_: (200, {}, b'{"data": [%s]}' % b",".join([b'{"embedding": [1%s]}' % (b"0" * 400)] * 4)),
        EndpointDownError,
        "got something else",
    ),
    "dropped item": (PASSING["dropped item"], EndpointDownError, "a vector for each of 4 texts, got 3"),
    "NaN": (PASSING["NaN"], ModelError, "finite and not zero"),
    "zero vector": (PASSING["zero vector"], ModelError, "finite and not zero"),
    "other width": (
        lambda _, found: [row[:7] for row in found],
        FingerprintMismatchError,
        "16 numbers, got 7",
    ),
    "no key": (lambda *_: (401, {}, b"no"), ConfigError, f"put the key into {KEY_VARIABLE}"),
    "no such model": (
        lambda *_: (404, {}, b'{"error": {"message": "no model tiny"}}'),
        ConfigError,
        r"status 404 \(no model tiny\); check the address",
    ),
    "refused text": (lambda *_: (400, {}, b"{}"), ModelError, "got status 400; check its model"),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("fault", "error", "sentence"), LASTING.values(), ids=LASTING)
def test_bad_answer_that_stays_ends_in_one_sentence(embedding_server, fault, error, sentence):
    encoder = checked(embedding_server)
    embedding_server.faults = [fault] * 99
    with pytest.raises(error, match=sentence) as raised:
        encoder.encode(TEXTS[:3])
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("impatient")
def test_query_that_is_answered_late_ends_at_its_deadline_and_the_outage_is_told(embedding_server):
    encoder = checked(embedding_server)
    assert encoder.outage is None
    embedding_server.latency_seconds = 20.0
    started = time.monotonic()
    with pytest.raises(EndpointDownError, match="must answer in"):
        encoder.encode_queries(["a river"])
    assert time.monotonic() - started < 20.0
    assert "must answer in" in encoder.outage


@pytest.mark.parametrize("is_gone", [True, False])
def test_encoder_that_is_closed_waits_for_no_server(embedding_server, tmp_path, is_gone):
    encoder = checked(embedding_server, endpoint_requests=2)
    encoder.keep_paid(tmp_path / "paid.sqlite")
    is_over, is_asked = threading.Event(), threading.Event()
    if is_gone:
        embedding_server.faults = [lambda *_: is_asked.set() or (503, {"retry-after": "50"}, b"")] * 99
    else:
        embedding_server.faults = [None, *[lambda *_: is_asked.set() or (is_over.wait(60.0) and None)] * 99]
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(encoder.encode, TEXTS)
        assert is_asked.wait(30.0)
        started = time.monotonic()
        encoder.close(60.0 if is_gone else 1.0)
        assert isinstance(running.exception(), EndpointDownError)
        assert time.monotonic() - started < 20.0  # of which one second is for answers on their way
    with pytest.raises(EndpointDownError, match="its limit" if is_gone else "before its run is ended"):
        encoder.encode_queries(["a river"])
    is_over.set()


def test_answer_that_is_on_its_way_when_the_encoder_is_closed_is_kept(embedding_server, tmp_path):
    encoder = checked(embedding_server, endpoint_requests=1)
    encoder.keep_paid(tmp_path / "paid.sqlite")
    is_closing, is_asked = threading.Event(), threading.Event()
    embedding_server.faults = [lambda *_: is_asked.set() or (is_closing.wait(60.0) and None)]
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(encoder.encode, TEXTS)
        assert is_asked.wait(30.0)
        closing = threads.submit(encoder.close, 60.0)
        is_closing.set()
        closing.result()
        assert isinstance(running.exception(), EndpointDownError)
    again = encoder_of(embedding_server)
    again.keep_paid(tmp_path / "paid.sqlite")
    again.encode(TEXTS)
    again.close()
    assert all(embedding_server.embedded[text] == 1 for text in TEXTS)


def test_silence_of_a_server_and_its_end_are_each_said_once(embedding_server, monkeypatch, caplog):
    monkeypatch.setattr(endpoint_requests, "SILENT_SECONDS", 0.0)
    encoder = checked(embedding_server, endpoint_requests=1)
    embedding_server.faults = [lambda *_: (503, {}, b"")] * 5
    encoder.encode(TEXTS)
    silent, answers = (each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    where = f"the endpoint tiny at {embedding_server.host}/v1/embeddings"
    assert silent == f"{where} must take requests, got status 503; it is tried again for up to 15 min"
    assert answers.startswith(f"{where} answers again after ")


def test_server_that_hangs_is_said_while_it_is_waited_for(embedding_server, monkeypatch, caplog):
    monkeypatch.setattr(endpoint_requests, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(endpoint_requests, "SILENT_SECONDS", 0.0)
    encoder = encoder_of(embedding_server)
    until = time.monotonic() + 60.0

    def hang(*_) -> None:
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)

    embedding_server.faults = [hang]
    encoder.check()
    silent, answers = (record.getMessage() for record in caplog.records)
    assert re.search(r"must answer, got nothing for \d+ s; it is tried again for up to 15 min$", silent)
    assert "answers again after" in answers


def test_query_ends_at_its_deadline_where_a_name_is_looked_up_for_long(monkeypatch):
    encoder = EndpointEncoder(encoder_config({"model": "http://models.invalid/v1/embeddings"}))
    is_over = threading.Event()
    monkeypatch.setattr(endpoint, "QUERY", Patience(retry_seconds=0.2, total_seconds=0.2))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: is_over.wait(60.0))
    started = time.monotonic()
    with pytest.raises(EndpointDownError, match="must answer in 0 s, got nothing; try again later"):
        encoder.encode_queries(["a river"])
    assert time.monotonic() - started < 20.0
    assert "must answer" in encoder.outage
    is_over.set()


def test_ingest_whose_endpoint_was_never_reached_gives_up_soon(monkeypatch):
    monkeypatch.setattr(endpoint_requests, "REACH_SECONDS", 0.2)
    config = encoder_config({"model": "http://127.0.0.1:9/v1/embeddings"})
    started = time.monotonic()
    sentence = r"127\.0\.0\.1:9/v1/embeddings must be reachable, got ConnectError; check the address"
    with pytest.raises(EndpointDownError, match=sentence):
        EndpointEncoder(config).check()
    assert time.monotonic() - started < endpoint.INGEST.retry_seconds / 3


def test_other_model_behind_the_name_is_refused(embedding_server):
    encoder = encoder_of(embedding_server)
    before = encoder.fingerprint
    embedding_server.seed = "model-b"
    with pytest.raises(FingerprintMismatchError, match="the model behind the name has changed"):
        encoder.check()
    assert encoder_of(embedding_server).fingerprint != before


def test_model_that_changes_in_the_middle_is_noticed_at_its_first_answer(embedding_server, tmp_path):
    encoder = checked(embedding_server, endpoint_requests=1)
    encoder.keep_paid(tmp_path / "paid.sqlite")
    before = dict.fromkeys(TEXTS[:31], 1)

    def change(*_) -> None:
        embedding_server.seed = "model-b"

    embedding_server.faults = [change]
    with pytest.raises(FingerprintMismatchError, match="the model behind the name has changed"):
        encoder.encode(TEXTS)
    embedding_server.seed = "model-a"
    encoder.encode(TEXTS)
    encoder.close()
    assert {text: embedding_server.embedded[text] for text in before} == before
    assert max(embedding_server.embedded[text] for text in TEXTS) == 2


@pytest.mark.parametrize("num_wrong", [1, 2])
def test_answer_of_one_wrong_server_among_several_is_never_kept(embedding_server, tmp_path, num_wrong):
    def other_model(texts, _):
        return [vector_of(text, "model-b", embedding_server.width) for text in texts]

    encoder = encoder_of(embedding_server, endpoint_requests=1)
    right = encoder.encode(TEXTS[:31]).document_vectors_NV
    encoder.keep_paid(tmp_path / "paid.sqlite")
    embedding_server.faults = [other_model, None, *[other_model] * (num_wrong - 1)]
    if num_wrong == 2:
        with pytest.raises(FingerprintMismatchError, match="the model behind the name has changed"):
            encoder.encode(TEXTS[:31])
    np.testing.assert_allclose(encoder.encode(TEXTS[:31]).document_vectors_NV, right, atol=1e-6)
    encoder.close()


def test_check_of_an_ingest_obeys_retry_after_and_that_of_a_query_gives_up(embedding_server):
    encoder = encoder_of(embedding_server)
    embedding_server.faults = [lambda *_: (429, {"retry-after": "0.1"}, b"")]
    encoder.check()
    assert encoder.outage is None
    embedding_server.faults = [lambda *_: (429, {"retry-after": "30"}, b"")]
    encoder.check_quietly()
    assert "status 429" in encoder.outage


def test_key_goes_into_one_header_and_into_no_sentence(embedding_server, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret-key-1")
    encoder = checked(embedding_server)
    assert embedding_server.headers[-1]["Authorization"] == "Bearer secret-key-1"
    told = b'{"error": {"message": "bad secret-key-1"}}'
    for status in (401, 404, 422):
        embedding_server.faults = [lambda *_, status=status: (status, {}, told)] * 2
        with pytest.raises((ConfigError, ModelError)) as raised:
            encoder.encode(["one text"])
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "model",
    [
        "https://me:key@host/v1/embeddings",
        "https://host/v1/embeddings?api_key=abc",
        "https:///v1",
        "http://[x",
    ],
)
def test_address_that_cannot_be_stored_or_is_none_is_refused_without_its_value(model):
    with pytest.raises(ConfigError) as raised:
        EndpointEncoder(encoder_config({"model": model}))
    assert "key@" not in str(raised.value)
    assert "abc" not in str(raised.value)


def test_setting_of_a_backbone_is_refused(embedding_server):
    with pytest.raises(ConfigError, match="layers must go with a model that runs here"):
        encoder_of(embedding_server, layers=2)


@pytest.mark.parametrize("first", [[], [(413, {}, b"")]], ids=["batches", "halves of one"])
def test_answers_before_a_failure_are_paid_for_and_not_asked_for_again(embedding_server, tmp_path, first):
    texts = TEXTS[:31] if first else TEXTS
    encoder = checked(embedding_server, endpoint_requests=1)
    encoder.keep_paid(tmp_path / "paid.sqlite")
    replies = [*first, None, (401, {}, b"")]
    embedding_server.faults = [lambda *_, reply=reply: reply for reply in replies]
    with pytest.raises(ConfigError, match="status 401"):
        encoder.encode(texts)
    encoder.keep_paid(None)
    assert set(embedding_server.embedded) - set(PROBES)
    encoder.keep_paid(tmp_path / "paid.sqlite")
    again = encoder.encode([*texts, texts[0]])
    encoder.close()
    assert all(embedding_server.embedded[text] == 1 for text in texts)
    np.testing.assert_array_equal(again.document_vectors_NV[0], again.document_vectors_NV[-1])


@pytest.mark.parametrize("beside", [None, (503, {}, b"")])
def test_answer_beside_a_request_that_fails_is_kept_and_no_other_asked_for(
    embedding_server, tmp_path, monkeypatch, beside
):
    encoder = checked(embedding_server, endpoint_requests=2)
    encoder.keep_paid(tmp_path / "paid.sqlite")
    both, is_told, read = threading.Barrier(2, timeout=60.0), threading.Event(), Server._refuse

    def refused(server: Server, response: Any) -> None:
        is_told.set()
        read(server, response)

    monkeypatch.setattr(Server, "_refuse", refused)

    def refuse(*_) -> tuple[int, dict[str, str], bytes]:
        both.wait()
        return 401, {}, b""

    def answer_later(*_) -> tuple[int, dict[str, str], bytes] | None:
        both.wait()
        is_told.wait(60.0)  # the client knows of the refusal by then
        return beside

    embedding_server.faults = [refuse, answer_later]
    with pytest.raises(ConfigError, match="status 401"):
        encoder.encode(TEXTS)
    assert len(embedding_server.requests) == 3
    assert any(embedding_server.embedded[text] for text in TEXTS) is (beside is None)
    encoder.encode(TEXTS)
    encoder.close()
    assert all(embedding_server.embedded[text] == 1 for text in TEXTS)


FORKED = """
import os, signal, sys
import numpy as np
from cairn.pipeline.encode.endpoint import EndpointEncoder
from cairn.pipeline.model.folders.model_defaults import encoder_config

encoder = EndpointEncoder(encoder_config({"model": sys.argv[1]}))
expected = encoder.encode_queries(["a river"])
child = os.fork()
signal.alarm(60)
np.testing.assert_array_equal(encoder.encode(["a river"]).document_vectors_NV, expected)
if child:
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(encoder.encode_queries(["a river"]), expected)
"""


def test_encoder_goes_on_in_a_process_that_was_forked_and_in_its_parent(embedding_server):
    command = [sys.executable, "-c", FORKED, embedding_server.model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_file_of_paid_vectors_that_is_damaged_is_begun_again(embedding_server, tmp_path):
    path = tmp_path / "paid.sqlite"
    path.write_bytes(b"not a database" * 100)
    encoder = encoder_of(embedding_server)
    encoder.keep_paid(path)
    assert len(encoder.encode(TEXTS[:2]).document_vectors_NV) == 2
    encoder.close()


def test_text_that_several_threads_need_at_once_is_paid_for_once(embedding_server, tmp_path):
    embedding_server.latency_seconds = 0.05
    encoder = checked(embedding_server)
    encoder.keep_paid(tmp_path / "paid.sqlite")
    embedding_server.faults = [lambda *_: (401, {}, b"")]  # who fails leaves its texts to those who wait
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(encoder.encode, TEXTS[:3]) for _ in range(4)]
    encoder.close()
    assert sum(run.exception() is not None for run in running) == 1
    assert all(embedding_server.embedded[text] == 1 for text in TEXTS[:3])
