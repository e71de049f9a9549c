"""Lines by a language model: what is asked, asked once, and never worth more than a chunk's line."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode import describe, endpoint_requests
from cairn.pipeline.encode.describe import DESCRIBE_KEY_VARIABLE, Describer, document_around
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.endpoint import EndpointEncoder
from cairn.pipeline.encode.endpoint_requests import Patience
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import ConfigError, EndpointDownError
from cairn.pipeline.model.folders.model_defaults import encoder_config

from tests.embedding_server import EmbeddingServer

TEXTS = ["The ferry stays in the harbour. " * 12, "A short text."]
TITLES = ["Ferries", None]


@pytest.fixture
def tiny_model(tiny_latent_folder: Path) -> str:
    return str(tiny_latent_folder)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_requests, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(describe, "INGEST", Patience(retry_seconds=0.3, total_seconds=60.0))


def settings(server: EmbeddingServer, **more) -> EncoderConfig:
    given = {"describe": f"{server.host}/v1", "describe_model": "small", "landmark_interval": 16}
    return EncoderConfig(**{**given, **more})


def passage_of(question: str) -> str:
    return re.findall(r"<passage>\n(.*?)\n</passage>", question, re.DOTALL)[0]


def lines_of(describer: Describer, text: str = TEXTS[0], title: str | None = "Ferries") -> list[str]:
    bounds = np.arange(0, len(text) + 1, 32)
    return describer.lines([text], [title], np.array([0, len(bounds) - 1]), bounds[:-1], bounds[1:])


def test_questions_of_a_document_begin_alike_and_end_with_the_chunk(embedding_server):
    embedding_server.answer = lambda question: f"On {passage_of(question)}\nand more."
    describer = Describer(settings(embedding_server, endpoint_requests=2))
    text = "".join(f"Stone {number:02} lies on the old path.  " for number in range(20))
    lines = lines_of(describer, text[: 32 * 20])
    assert lines[3] == f"On {' '.join(text[96:128].split())} and more."
    questions = list(embedding_server.questions)[1:]
    assert len({question.partition("</document>")[0] for question in questions}) == 1
    assert questions[0].startswith("<document>\nFerries\n\nStone 00")
    asked = embedding_server.requests[-1]
    assert (asked["model"], asked["max_tokens"]) == ("small", 160)


def test_long_document_is_cut_around_the_chunk():
    text = "".join(f"{number:05} " for number in range(5_000))
    cuts = {document_around(text, start, start + 300, 3_000) for start in range(0, len(text), 60)}
    for start in range(0, len(text) - 300, 977):
        around = document_around(text, start, start + 300, 3_000)
        assert text[start : start + 300] in around
        assert around.startswith(text[:500])
        assert len(around) <= 3_000 + 12
    assert len(cuts) < len(text) / 1_000  # neighbours share a window
    assert document_around(text, 0, 300, len(text)) == text


@pytest.mark.parametrize(
    "answer",
    [
        {"message": {"content": None, "refusal": "I cannot help with that."}},
        {"message": {"content": ""}},
        {"message": {"content": "A line that was cut"}, "finish_reason": "length"},
        {"message": {"content": "word " * 200}},
        {"message": {"content": "\ud800 lone"}},
        (400, {}, json.dumps({"error": {"message": "content policy"}}).encode()),
    ],
)
def test_refusal_or_useless_answer_costs_its_chunk_the_line_alone(embedding_server, tmp_path, answer):
    def reply(question: str):
        return answer if passage_of(question).startswith("y stays") else "A line."

    embedding_server.answer = reply
    describer = Describer(settings(embedding_server))
    describer.keep_paid(tmp_path / "paid.sqlite")
    text = "The ferry stays in the harbour. " + "y stays in the old harbour path " * 2
    assert lines_of(describer, text) == ["A line.", "", ""]
    asked = len(embedding_server.requests)
    assert lines_of(describer, text) == ["A line.", "", ""]
    assert len(embedding_server.requests) == asked  # no line is an answer, too
    describer.close()


def test_lines_are_asked_for_once_across_a_failure(embedding_server, tmp_path):
    left = iter(range(4))
    text = "".join(f"Stone {number:02} lies on the old path.  " for number in range(20))[: 32 * 20]
    describer = Describer(settings(embedding_server, endpoint_requests=1))
    describer.keep_paid(tmp_path / "paid.sqlite")
    embedding_server.answer = lambda _: "A line." if next(left, None) is not None else (401, {}, b"")
    with pytest.raises(ConfigError, match=f"got no key .*put the key into {DESCRIBE_KEY_VARIABLE}"):
        lines_of(describer, text)
    describer.close()
    embedding_server.answer = lambda _: "A line."
    again = Describer(settings(embedding_server, endpoint_requests=1))
    again.keep_paid(tmp_path / "paid.sqlite")
    assert lines_of(again, text) == ["A line."] * 20
    again.close()
    probes = {question for question in embedding_server.questions if "stays in the harbour" in question}
    assert {count for question, count in embedding_server.questions.items() if question not in probes} == {1}


@pytest.mark.parametrize(
    ("reply", "error", "sentence"),
    [
        ((200, {"content-type": "text/html"}, b"<html>"), EndpointDownError, "with a chat com.*html"),
        ((200, {}, b'{"data": []}'), EndpointDownError, "must answer with a chat completion in JSON"),
        ((200, {}, b'{"choices": []}'), EndpointDownError, "must answer with a chat completion in JSON"),
        ((429, {}, b""), EndpointDownError, "must take requests, got status 429; try again later"),
        ((500, {}, b""), EndpointDownError, "must take requests, got status 500"),
        ((404, {}, b""), ConfigError, "got status 404; check the address and the model's name"),
        ((400, {}, b""), ConfigError, "got status 400; check its model"),
        (None, EndpointDownError, "must answer in 0 s, got nothing; try again later"),
    ],
)
def test_server_that_gives_no_line_ends_the_run_in_a_sentence(
    embedding_server, monkeypatch, reply, error, sentence
):
    is_over = threading.Event()
    embedding_server.answer = lambda _: reply or (is_over.wait(60.0) and "late")
    if reply is None:
        monkeypatch.setattr(describe, "INGEST", Patience(retry_seconds=0.0, total_seconds=0.1))
    with pytest.raises(error, match=sentence):
        lines_of(Describer(settings(embedding_server)))
    is_over.set()


@pytest.mark.parametrize(
    ("shorter", "longer", "found"),
    [
        (
            {"message": {"content": "<think>\nThe user"}, "finish_reason": "length"},
            "<think>\nThe user wants a line.\n</think>\n\nA line.",
            "A line.",
        ),
        ("<think>\n\n</think>\n\nA line.", "", "A line."),
        ({"message": {"content": "Hm"}, "finish_reason": "length"}, "A line.", "A line."),
        ("<think>Hm", {"message": {"content": "Hm"}, "finish_reason": "length"}, None),
        ("", (400, {}, b"{}"), None),
        ((400, {}, b"{}"), "A line.", "A line."),
    ],
)
def test_model_that_thinks_or_takes_another_bound_gives_its_line_or_is_refused_at_the_first_question(
    embedding_server, shorter, longer, found
):
    embedding_server.answer = lambda _: shorter if "max_tokens" in embedding_server.requests[-1] else longer
    describer = Describer(settings(embedding_server, endpoint_requests=1))
    if found:
        assert set(lines_of(describer)) == {found}
        return
    with pytest.raises(ConfigError, match="got none; switch the model's thinking off, or choose"):
        lines_of(describer)
    assert len(embedding_server.requests) == 2


def test_native_vectors_read_the_line_before_the_chunk_and_spans_stay(embedding_server, tiny_model):
    given = {"model": tiny_model, "landmark_interval": 16, "title_tokens": 4}
    plain, own = encoder_config(given), encoder_config({**given, "describe": f"{embedding_server.host}/v1"})
    embedding_server.answer = lambda question: "" if "A short text" in question else "ferry river stone"
    before, after = (DocumentEncoder(config).encode(TEXTS, titles=TITLES) for config in (plain, own))
    np.testing.assert_array_equal(before.start_char, after.start_char)
    np.testing.assert_array_equal(before.end_char, after.end_char)
    assert after.lines == ["ferry river stone"] * (len(after.start_char) - 1) + [""]
    assert before.lines is None
    assert not np.allclose(before.chunk_vectors_MV[0], after.chunk_vectors_MV[0], atol=1e-3)
    np.testing.assert_allclose(before.chunk_vectors_MV[-1], after.chunk_vectors_MV[-1], atol=1e-5)
    assert DocumentEncoder(plain).fingerprint != DocumentEncoder(own).fingerprint
    asked = len(embedding_server.requests)
    DocumentEncoder(own).encode_queries(["ferry"])
    assert len(embedding_server.requests) == asked


def test_endpoint_is_sent_the_line_between_title_and_chunk(embedding_server):
    embedding_server.answer = lambda question: f"On {passage_of(question).split()[0]}."
    config = encoder_config({"model": embedding_server.model, "describe": f"{embedding_server.host}/v1"})
    encoded = EndpointEncoder(config).encode(["Ferry in the harbour."], titles=["Ships"])
    assert embedding_server.embedded["Ships\nOn Ferry.\nFerry in the harbour."] == 1
    assert encoded.lines == ["On Ferry."]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"describe": "not an address"}, "must be an http or https address such as https://HOST/v1/chat"),
        ({"describe": "ftp://host/v1"}, "must be an http or https address such as https://HOST/v1/chat"),
        ({"describe": "https://me:secret@host/v1"}, f"put the key into {DESCRIBE_KEY_VARIABLE}"),
        ({"describe_model": "small"}, "describe_model must go with describe"),
        ({"describe": "https://host/v1", "attention": "full"}, "describe must go with attention chunk"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, sentence, tiny_model):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_encoder(tiny_model, **given)
