"""Requests of the search API as data, and its answers as records.

What the client with ``await`` and the one without share.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, cast
from urllib.parse import quote

import numpy as np
from cairn.pipeline.client.errors import BLANK_TYPE, NotFoundError, ServerFailedError
from cairn.pipeline.client.records import CollectionDescription, CollectionSummary, SearchParameters
from cairn.pipeline.errors import UsageError
from cairn.pipeline.types import Document, Highlight, Hit, Lineage, LineageRun, Passage, SearchResult
from jaxtyping import Float32

MAX_QUERIES: Final = 32
"""Queries of one request."""
MAX_INPUTS: Final = 256
MAX_INPUT_BYTES: Final = 256 << 10
"""Texts of one request for vectors: well within what a body may have, JSON's escapes included."""
STRETCH_CHARACTERS: Final = 1_000_000
"""Of a document's text, what one request may give."""
FIRST_CURSOR: Final = "*"

InputType = Literal["query", "document"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request: ``body`` is JSON, None for a GET."""

    path: str
    body: bytes | None = None
    parameters: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def method(self) -> str:
        """Return GET, or POST where there is a body."""
        return "GET" if self.body is None else "POST"


def list_call() -> Call:
    """Ask for the collections."""
    return Call(path="/v1/collections")


def describe_call(name: str) -> Call:
    """Ask what a collection holds."""
    return Call(path=f"/v1/collections/{_quoted(name, 'the name of a collection')}")


def document_call(name: str, doc_id: str, start_char: int) -> Call:
    """Ask for a document's text from a character on."""
    parameters = {"start_char": start_char, "max_characters": STRETCH_CHARACTERS}
    return Call(
        path=f"/v1/collections/{_quoted(name, 'the name of a collection')}/documents/"
        f"{_quoted(doc_id, 'doc_id')}",
        parameters=parameters,
    )


def lineage_call(name: str, doc_id: str) -> Call:
    """Ask where a document came from."""
    path = f"{describe_call(name).path}/lineage/{_quoted(doc_id, 'doc_id')}"
    return Call(path=path)


def click_call(name: str, query: str, doc_id: str, rank: int | None) -> Call:
    """Say that a hit was opened."""
    body = {"query": _text(query, "query"), "doc_id": _text(doc_id, "doc_id"), "rank": rank}
    return Call(path=f"{describe_call(name).path}/clicks", body=_json(body))


def search_call(name: str, query: str, parameters: SearchParameters, cursor: str | None = None) -> Call:
    """Ask for the documents that answer a query."""
    body = {"query": _text(query, "query"), **parameters}
    return _search_call(name, body if cursor is None else {**body, "cursor": cursor})


def batch_call(name: str, queries: Sequence[str], parameters: SearchParameters) -> Call:
    """Ask for the documents that answer each of several queries."""
    return _search_call(name, {"query": list(queries), **parameters})


def _search_call(name: str, body: Mapping[str, Any]) -> Call:
    if isinstance(body.get("filters"), str):
        raise UsageError(
            "filters must be a mapping such as {'year': 2020} or {'type': 'gte', 'key': 'year', "
            "'value': 2020}, got a text; expressions such as year>=2020 are for the command line"
        )
    return Call(path=f"/v1/collections/{_quoted(name, 'the name of a collection')}/search", body=_json(body))


def embed_call(name: str, texts: Sequence[str], input_type: InputType) -> Call:
    """Ask for the vectors of texts."""
    body = {
        "model": _text(name, "the name of a collection"),
        "input": list(texts),
        "input_type": input_type,
        "encoding_format": "base64",
    }
    return Call(path="/v1/embeddings", body=_json(body))


def query_batches(queries: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut a list of queries into what one request may hold."""
    queries = _texts(queries, "queries")
    for start in range(0, len(queries), MAX_QUERIES):
        yield queries[start : start + MAX_QUERIES]


def input_batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut a list of texts into what one request may hold."""
    batch: list[str] = []
    num_bytes = 0
    for text in _texts(texts, "texts"):
        size = len(text.encode(errors="replace"))
        if batch and (len(batch) == MAX_INPUTS or num_bytes + size > MAX_INPUT_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(text)
        num_bytes += size
    if batch:
        yield batch


def summaries_of(answer: Any) -> list[CollectionSummary]:
    """Read the list of collections."""
    with _reading():
        return [CollectionSummary(**_known(CollectionSummary, found)) for found in answer["collections"]]


def description_of(answer: Any) -> CollectionDescription:
    """Read what a collection holds."""
    with _reading():
        columns = {column["name"]: column["type"] for column in answer["filter_columns"]}
        return CollectionDescription(**_known(CollectionDescription, answer, filter_columns=columns))


def results_of(answer: Any) -> list[SearchResult]:
    """Read the answers to a list of queries."""
    with _reading():
        return [result_of(one) for one in answer["answers"]]


def result_of(answer: Any) -> SearchResult:
    """Read the answer to a query."""
    with _reading():
        return SearchResult(
            query=answer["query"],
            generation=answer["generation"],
            hits=[_hit(hit) for hit in answer["hits"]],
            warnings=tuple(answer.get("warnings", ())),  # an older server has none
        )


def next_cursor_of(answer: Any) -> str | None:
    """Read what asks for the next page."""
    with _reading():
        return answer["next_cursor"]


def vectors_of(answer: Any) -> Float32[np.ndarray, "N V"]:
    """Read vectors, in the order of their texts."""
    with _reading():
        rows = sorted(answer["data"], key=lambda row: row["index"])
        return np.stack(
            [np.frombuffer(base64.b64decode(row["embedding"], validate=True), dtype="<f4") for row in rows]
        ).astype(np.float32)


def lineage_of(answer: Any) -> Lineage:
    """Read where a document came from."""
    with _reading():
        run = answer["run"] and LineageRun(**_known(LineageRun, answer["run"]))
        return Lineage(**_known(Lineage, answer, run=run))


def is_logged(answer: Any) -> bool:
    """Read whether a click was logged."""
    with _reading():
        return bool(answer["logged"])


class DocumentReading:
    """A document's text, stretch after stretch.

    Begun again where the collection changes in between, as the text may have.
    """

    def __init__(self, name: str, doc_id: str) -> None:
        self._name, self._doc_id = name, doc_id
        self._stretches: list[Any] = []

    def next_call(self) -> Call | None:
        """Ask for what is still missing, None where the document is complete."""
        if not self._stretches:
            return document_call(self._name, self._doc_id, 0)
        with _reading():
            last = self._stretches[-1]
            return (
                None
                if last["end_char"] >= last["num_characters"]
                else document_call(self._name, self._doc_id, last["end_char"])
            )

    def take(self, stretch: Any) -> None:
        """Take the answer to the last call."""
        with _reading():
            is_new = not self._stretches or stretch["generation"] != self._stretches[0]["generation"]
            self._stretches = (
                ([stretch] if stretch["start_char"] == 0 else []) if is_new else [*self._stretches, stretch]
            )

    def document(self) -> Document:
        """Put the stretches together."""
        with _reading():
            text = "".join(stretch["text"] for stretch in self._stretches)
            return Document(**_known(Document, self._stretches[0], text=text))


def is_unknown_document(error: NotFoundError) -> bool:
    """Tell a document that is not there from a collection that is not there."""
    return error.type.endswith(":unknown-document")


def _hit(hit: Any) -> Hit:
    return Hit(**_known(Hit, hit, passages=tuple(_passage(passage) for passage in hit["passages"])))


def _passage(passage: Any) -> Passage:
    found = {
        name: tuple(
            Highlight(**_known(Highlight, each, query_words=tuple(each["query_words"])))
            for each in passage.get(name, [])  # an older server names none
        )
        for name in ("highlights", "title_highlights")
    }
    return Passage(**_known(Passage, {**passage, **found}))


def _known(kind: type, answer: Any, **replaced: Any) -> dict[str, Any]:
    """Take the fields a record has: a newer server may say more."""
    return {each.name: answer[each.name] for each in fields(kind)} | replaced


@contextlib.contextmanager
def _reading() -> Generator[None]:
    """Turn whatever a foreign answer does to its reader into one error."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _foreign_answer() from error


def _foreign_answer() -> ServerFailedError:
    title = "the answer is not one of Cairn's search API"
    return ServerFailedError(
        status=200, type=BLANK_TYPE, title=title, detail="check the base URL, and both versions"
    )


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{what} must be a text, got a value of type {type(value).__name__}")
    return value


def _texts(values: Any, what: str) -> list[str]:
    """Return a list of texts; a bare text is refused, whose characters are texts as well."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UsageError(f"{what} must be a list of texts, got a value of type {type(values).__name__}")
    return [_text(value, f"{what}[{number}]") for number, value in enumerate(cast("Iterable[Any]", values))]


def _quoted(part: str, what: str) -> str:
    if not _text(part, what):
        raise UsageError(f"{what} must have at least one character, got none")
    # Dots, too: a client may take a segment of dots for a way up.
    return quote(part, safe="", errors="replace").replace(".", "%2E")


def _json(body: Mapping[str, Any]) -> bytes:
    return (
        "{" + ", ".join(f"{json.dumps(name)}: {_member(name, value)}" for name, value in body.items()) + "}"
    ).encode()


def _member(name: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{name} must be JSON without NaN, got {str(error)[:80]!r}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    raise TypeError(f"a value of type {type(value).__name__}")
