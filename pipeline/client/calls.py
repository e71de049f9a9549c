"""The methods of a collection over HTTP, which the client with ``await`` and the one without share.

Each is a generator: it yields a :class:`Call`, is sent the JSON of its answer, and returns a record. What
cannot be sent raises :class:`UsageError` first. What an answer says beyond its record is passed over.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, Final, Literal, TypeVar, Unpack, cast, get_args, get_type_hints
from urllib.parse import quote

import numpy as np
from cairn.pipeline.errors import UsageError
from cairn.pipeline.options import shown
from cairn.pipeline.search_options import PublicSearchKeywords
from cairn.pipeline.types import Document, Hit, Lineage, SearchResult
from jaxtyping import Float32

MAX_QUERIES: Final = 32
"""Queries of one request."""
MAX_INPUTS: Final = 256
MAX_INPUT_BYTES: Final = 256 << 10
"""Texts of one request for vectors: well within what a body may have, JSON's escapes included."""
STRETCH_CHARACTERS: Final = 1_000_000
"""Of a document's text, what one request may give."""
FIRST_CURSOR: Final = "*"


class SearchParameters(PublicSearchKeywords, total=False):
    """The keywords of a search over HTTP; ``rerank`` asks the server's cross-encoder, where it has one."""

    rerank: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionSummary:
    """A collection in a line; counts are None where there are none, or the key sees a part only."""

    name: str
    status: Literal["ready", "building", "unfinished", "damaged"]
    generation: int | None
    documents: int | None
    chunks: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionDescription:
    """What a collection holds and how it can be searched.

    ``filter_columns`` maps each column that filters can name to its type. ``documents`` counts those the key
    sees; ``chunks`` and ``context_documents`` are None where it sees a part of them only.
    """

    name: str
    generation: int
    created_at: str
    documents: int
    chunks: int | None
    vector_dim: int
    landmark_interval: int
    context_documents: int | None
    uses_context: bool
    is_outdated: bool
    filter_columns: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Call:
    """One request: ``body`` is JSON, None for a GET.

    ``is_of_document`` makes the answer None where there is no such document.
    """

    path: str
    body: bytes | None = None
    parameters: Mapping[str, int] | None = None
    is_of_document: bool = False

    def request(self) -> dict[str, Any]:
        """Return the keywords of httpx2's ``request``."""
        if self.body is None:
            return {"method": "GET", "url": self.path, "params": self.parameters}
        headers = {"Content-Type": "application/json"}
        return {"method": "POST", "url": self.path, "content": self.body, "headers": headers}


_Answer = TypeVar("_Answer")
Method = Generator[Call, Any, _Answer]


def collections() -> Method[list[CollectionSummary]]:
    """List the collections this key may ask, by name."""
    answer = yield Call("/v1/collections")
    return [_read(CollectionSummary, found) for found in answer["collections"]]


@dataclass(frozen=True, slots=True)
class CollectionCalls:
    """What can be asked of the collection of this name."""

    name: str

    def describe(self) -> Method[CollectionDescription]:
        """Say what it holds and how it may be asked."""
        answer = yield Call(self._path)
        columns = {column["name"]: column["type"] for column in answer["filter_columns"]}
        return _read(CollectionDescription, {**answer, "filter_columns": columns})

    def search(self, query: str, **parameters: Unpack[SearchParameters]) -> Method[SearchResult]:
        """Rank documents for a query, each with its best passages."""
        return _read(SearchResult, (yield self._search(query, parameters)))

    def search_batch(
        self, queries: Sequence[str], **parameters: Unpack[SearchParameters]
    ) -> Method[list[SearchResult]]:
        """Answer several queries; each 32 of them are one request, answered from one generation."""
        results: list[SearchResult] = []
        queries = _texts(queries, "queries")
        for start in range(0, len(queries), MAX_QUERIES):
            answer = yield self._search(queries[start : start + MAX_QUERIES], parameters)
            results += [_read(SearchResult, one) for one in answer["answers"]]
        return results

    def page(
        self, query: str, parameters: SearchParameters, cursor: str
    ) -> Method[tuple[SearchResult, str | None]]:
        """Give one page of a ranking, and the cursor of the next."""
        answer = yield self._search(query, parameters, cursor=cursor)
        return _read(SearchResult, answer), answer["next_cursor"]

    def read_document(self, doc_id: str) -> Method[Document | None]:
        """Return a document with its whole text, None where there is none."""
        path = f"{self._path}/documents/{_quoted(doc_id, 'doc_id')}"
        stretches: list[Any] = []
        while not stretches or stretches[-1]["end_char"] < stretches[-1]["num_characters"]:
            start = stretches[-1]["end_char"] if stretches else 0
            parameters = {"start_char": start, "max_characters": STRETCH_CHARACTERS}
            stretch = yield Call(path, parameters=parameters, is_of_document=True)
            if stretch is None:
                return None
            # Where the collection changed in between, the text may have: it is read again.
            is_same = not stretches or stretch["generation"] == stretches[0]["generation"]
            stretches = [*stretches, stretch] if is_same else []
        text = "".join(stretch["text"] for stretch in stretches)
        return _read(Document, {**stretches[0], "text": text})

    def lineage(self, doc_id: str) -> Method[Lineage | None]:
        """Say where a document came from, None where there is none."""
        answer = yield Call(f"{self._path}/lineage/{_quoted(doc_id, 'doc_id')}", is_of_document=True)
        return None if answer is None else _read(Lineage, answer)

    def click(self, query: str, doc_id: str, *, rank: int | None = None) -> Method[bool]:
        """Tell the server's feedback log that a hit was opened; false where the server keeps none.

        ``rank`` is its place in the answer, from 1.
        """
        body = {"query": query, "doc_id": doc_id, "rank": rank}
        return bool((yield Call(f"{self._path}/clicks", _json(body)))["logged"])

    def encode_queries(self, texts: Sequence[str]) -> Method[Float32[np.ndarray, "N V"]]:
        """Embed texts as the collection's queries, L2-normalised; the key needs the scope embed."""
        return self._encode(texts, "query")

    def encode_documents(self, texts: Sequence[str]) -> Method[Float32[np.ndarray, "N V"]]:
        """Embed texts as the collection's documents, L2-normalised; the key needs the scope embed."""
        return self._encode(texts, "document")

    def _encode(self, texts: Sequence[str], input_type: str) -> Method[Float32[np.ndarray, "N V"]]:
        asked = {"model": self.name, "input_type": input_type}
        vectors: list[np.ndarray] = []
        for batch in _batches(_texts(texts, "texts")):
            answer = yield Call(
                "/v1/embeddings", _json({**asked, "input": batch, "encoding_format": "base64"})
            )
            rows = sorted(answer["data"], key=lambda row: row["index"])
            vectors += [
                np.frombuffer(base64.b64decode(row["embedding"], validate=True), "<f4") for row in rows
            ]
        if vectors:
            return np.stack(vectors).astype(np.float32)
        described = yield from self.describe()
        return np.zeros((0, described.vector_dim), np.float32)

    @property
    def _path(self) -> str:
        return f"/v1/collections/{_quoted(self.name, 'the name of a collection')}"

    def _search(self, query: str | Sequence[str], parameters: SearchParameters, **more: str) -> Call:
        if isinstance(parameters.get("filters"), str):
            raise UsageError(
                "filters must be a mapping such as {'year': 2020} or {'type': 'gte', 'key': 'year', "
                "'value': 2020}, got a text; expressions such as year>=2020 are for the command line"
            )
        return Call(f"{self._path}/search", _json({"query": query, **parameters, **more}))


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut a list of texts into what one request may hold."""
    start = num_bytes = 0
    for end, text in enumerate(texts):
        size = len(text.encode(errors="replace"))
        if end > start and (end - start == MAX_INPUTS or num_bytes + size > MAX_INPUT_BYTES):
            yield texts[start:end]
            start, num_bytes = end, 0
        num_bytes += size
    if texts:
        yield texts[start:]


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _read(kind: Any, answer: Any) -> Any:
    """Read an answer as a record, and the records within it."""
    if is_dataclass(kind) and isinstance(kind, type):
        return kind(**{name: _read(hint, answer[name]) for name, hint in _hints(kind).items()})
    if isinstance(answer, list):
        made = [_read(get_args(kind)[0], each) for each in cast("list[Any]", answer)]
        return made if get_args(kind)[0] is Hit else tuple(made)
    inner = [each for each in get_args(kind) if is_dataclass(each)]
    return _read(inner[0], answer) if inner and answer is not None else answer


def _texts(values: Any, what: str) -> list[str]:
    """Return a list of texts; a bare text is refused, whose characters are texts as well."""
    is_list = isinstance(values, Iterable) and not isinstance(values, str)
    texts = list(cast("Iterable[Any]", values)) if is_list else []
    if not is_list or not all(isinstance(text, str) for text in texts):
        wrong = next((text for text in texts if not isinstance(text, str)), values)
        raise UsageError(f"{what} must be a list of texts, got a value of type {type(wrong).__name__}")
    return texts


def _quoted(part: str, what: str) -> str:
    if not isinstance(part, str) or not part:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"{what} must be a text of at least one character, got {shown(part)}")
    # Dots, too: a client may take a segment of dots for a way up.
    return quote(part, safe="", errors="replace").replace(".", "%2E")


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a request must be JSON without NaN, got {str(error)[:80]!r}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    raise TypeError(f"a value of type {type(value).__name__}")
