"""What the frameworks search, write and filter by, and what they get.

Passages of a collection, best first, with the place each was cut from. A store writes a collection of this
machine, or of a writable server.
"""

from __future__ import annotations

import contextlib
import json
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast
from uuid import uuid4

import numpy as np
import pyarrow as pa
from cairn.pipeline.client import errors
from cairn.pipeline.errors import ConfigError, FilterError, UsageError
from cairn.pipeline.search_options import SearchParameters
from cairn.pipeline.types import (
    RESERVED_COLUMNS,
    ColumnSummary,
    Document,
    Hit,
    ListedDocument,
    Passage,
    SearchResult,
)
from pydantic import ValidationError

if TYPE_CHECKING:
    from cairn.pipeline.client.clients import CairnClient, RemoteCollection
    from cairn.pipeline.collection import Collection

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")

LANGCHAIN_COLUMN: Final = "langchain_metadata"
HAYSTACK_COLUMN: Final = "haystack_meta"
LLAMA_COLUMN: Final = "llama_node"
"""Where the stores of frameworks keep what their documents came with, as JSON."""


class Readable(Protocol):
    """What can be read of a collection without ranking."""

    def read_document(self, doc_id: str) -> Document | None:
        """Return a document by its id, None where there is none."""
        ...

    def columns(self) -> list[ColumnSummary]:
        """Describe the columns that filters can name."""
        ...

    def count(self, filters: Mapping[str, Any] | None = None) -> int:
        """Count the documents that match a filter."""
        ...

    def list_documents(
        self, filters: Mapping[str, Any] | None = None, *, after: str | None = None
    ) -> Iterator[ListedDocument]:
        """Yield the documents that match a filter, in the order of their ids."""
        ...


class Searchable(Readable, Protocol):
    """A collection that can be searched: of this machine, or behind the API; records are the same."""

    @property
    def name(self) -> str:
        """The collection's name."""
        ...

    def search(self, query: str, *_: Any, **parameters: Any) -> SearchResult:
        """Rank documents, each with its best passages; keywords are :class:`SearchParameters`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundPassage:
    """A passage as a framework's document: ``metadata`` is its document's, and where it stands there.

    To the document's columns are added ``doc_id``, ``title``, ``start_char``, ``end_char``, ``page``,
    ``score``, ``scores`` (the parts of the document's score), ``highlights`` and ``title_highlights`` (of
    :class:`Passage`, as dictionaries), ``collection``, ``generation`` and the answer's ``warnings``, in place
    of columns of these names. What a framework's store kept as JSON is unpacked. ``passage_id`` names
    document and span.
    """

    passage_id: str
    doc_id: str
    text: str
    score: float
    start_char: int
    end_char: int
    metadata: Mapping[str, Any]


def find_passages(
    collection: Searchable, query: str, num_passages: int, parameters: SearchParameters
) -> list[FoundPassage]:
    """Return the best passages of the documents a search ranks first.

    They are ordered by their own score, with ``mmr`` by the order of their documents, which ties keep, too.
    ``parameters`` are those of the search; as many documents are ranked as passages are wanted, each gives up
    to ``passages`` (3).
    """
    if not 1 <= num_passages <= 200:
        raise ConfigError(f"the number of passages must be from 1 to 200, got {num_passages}")
    if "top_k" in parameters:
        raise ConfigError(
            "top_k must be left out, got one among the search's parameters; the retriever's own number "
            "of passages sets it"
        )
    result = collection.search(query, **{**parameters, "top_k": num_passages})
    found = [_found(collection.name, result, hit, passage) for hit in result.hits for passage in hit.passages]
    if parameters.get("mmr") is None:
        found.sort(key=lambda passage: -passage.score)
    return found[:num_passages]


def _found(collection: str, result: SearchResult, hit: Hit, passage: Passage) -> FoundPassage:
    place = {"doc_id": hit.doc_id, "title": hit.title, **asdict(passage)}
    del place["text"]
    judged = {
        "scores": dict(hit.scores),
        "collection": collection,
        "generation": result.generation,
        "warnings": list(result.warnings),
    }
    return FoundPassage(
        passage_id=f"{hit.doc_id}#{passage.start_char}-{passage.end_char}",
        doc_id=hit.doc_id,
        text=passage.text,
        score=passage.score,
        start_char=passage.start_char,
        end_char=passage.end_char,
        metadata={**_unpacked(hit.metadata), **place, **judged},
    )


def _unpacked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata with what a store kept whole in the place of its column; of a node, columns have it."""
    own = {name: value for name, value in metadata.items() if name != LLAMA_COLUMN}
    for name in (LANGCHAIN_COLUMN, HAYSTACK_COLUMN):
        kept = kept_whole(own.get(name))
        if kept is not None or own.get(name) is None:
            own.pop(name, None)
        own |= kept or {}
    return own


def kept_whole(value: Any) -> dict[str, Any] | None:
    """Return metadata that a store kept as JSON; None of what is none, as the document came another way."""
    try:
        found = json.loads(value)
    except (TypeError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def faults_of(error: ValidationError) -> str:
    """Return what pydantic says is wrong, without what was sent."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    told = ((".".join(map(str, fault["loc"])), fault["msg"]) for fault in faults)
    return "; ".join(f"{place}: {sentence}" if place else sentence for place, sentence in told)


def open_source(
    collection: str, *, root: str | Path | None = None, url: str | None = None, api_key: str | None = None
) -> Searchable:
    """Return a collection to search: behind the API at ``url`` if any, else under ``root``."""
    if url is None:
        from cairn.pipeline.collection import open_collection

        return open_collection(collection, root=root)
    if root is not None:
        raise ConfigError("a collection must be under a root or behind a URL, got both; leave one out")
    from cairn.pipeline.client.clients import CairnClient

    client = CairnClient(url, api_key=api_key)
    source = client.collection(collection)
    weakref.finalize(source, client.close)  # only this source has the client
    return source


@dataclass(frozen=True, slots=True)
class WrittenCollection:
    """What a store does with its collection, which may hold nothing yet, and answers nothing then."""

    collection: Collection | RemoteCollection
    is_remote: bool

    @classmethod
    def of(
        cls,
        collection: str | RemoteCollection,
        *,
        root: str | Path | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> WrittenCollection:
        """Return a collection by its name under a root, or one behind the API."""
        if not isinstance(collection, str):
            if root is not None or settings is not None:
                raise ConfigError(
                    "a collection behind the API must come without root and settings, got some; give the "
                    "settings to CairnClient.create"
                )
            return cls(collection, is_remote=True)
        from cairn.pipeline.collection import Collection, collections_root
        from cairn.pipeline.index.layout import CollectionLayout

        # What it writes is what it searches, whatever else the name may answer from.
        layout = CollectionLayout.at(collections_root(root), collection)
        return cls(Collection(layout, settings=settings), is_remote=False)

    @property
    def local(self) -> Collection:
        """The collection of this machine; one behind the API raises :class:`UsageError`."""
        if self.is_remote:
            raise UsageError("this must be asked of a collection of this machine, got one behind the API")
        return cast("Collection", self.collection)

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing was ever published; of a server, its answers tell."""
        return not self.is_remote and not self.local.layout.exists()

    def add(self, rows: pa.Table | Sequence[Mapping[str, Any]]) -> None:
        """Add documents with ``id``, ``title``, ``text`` and metadata, or replace those of the same ids.

        A collection that there is not is made.
        """
        if self.is_remote:
            collection = cast("RemoteCollection", self.collection)
            given = cast("Any", rows).to_pylist() if isinstance(rows, pa.Table) else rows
            documents = [{name: row[name] for name in row if row[name] is not None} for row in given]
            try:
                collection.add(documents)
            except errors.NotFoundError:
                with contextlib.suppress(errors.ConflictError):  # another has made it meanwhile
                    cast("CairnClient", collection.client).create(collection.name)
                collection.add(documents)
            return
        report = self.local.add(rows)
        if report.quarantined:
            counts = sorted(report.quarantine_reasons.items())
            reasons = ", ".join(f"{reason}: {count}" for reason, count in counts)
            raise UsageError(
                f"every text must be one that can be indexed, got {report.quarantined} that cannot "
                f"({reasons}); the others are in"
            )

    def delete(self, wanted: Sequence[str] | Mapping[str, Any]) -> int:
        """Delete documents by their ids, or those that match a filter tree; return how many there were."""
        return self._read(lambda: self.collection.delete(wanted).deleted, 0) if wanted else 0

    def read(self, doc_ids: Iterable[str]) -> list[Document]:
        """Return the documents of these ids that are there, each once, in the order asked."""
        wanted = dict.fromkeys(doc_ids)
        found = [self._read(lambda own=each: self.collection.read_document(own), None) for each in wanted]
        return [each for each in found if each is not None]

    def hits(self, query: str | Sequence[float], options: Mapping[str, Any]) -> Sequence[Hit]:
        """Rank documents for a query, or for a vector of the collection's own encoder."""
        if isinstance(query, str):
            return self._read(lambda: self.collection.search(query, **options).hits, [], is_search=True)
        if self.is_remote:  # which wants a text, and would put a document first whose id it is
            alone = {**options, "query_vector": list(query), "hybrid": False, "late": False}
            return self.hits(uuid4().hex, alone)
        vectors = np.asarray([query], np.float32)
        return self._read(lambda: self.local.search_vectors(vectors, **options)[0].hits, [], is_search=True)

    def ids(self, filters: Mapping[str, Any] | None = None) -> list[str]:
        """Return the ids of the documents that match a filter tree, all without one."""
        if not self.is_remote:
            return [] if self.is_empty else self.local.documents.ids(filters)
        remote = cast("RemoteCollection", self.collection)
        return self._read(lambda: [each.doc_id for each in remote.list_documents(filters)], [])

    def _read(self, call: Callable[[], _Found], nothing: _Found, *, is_search: bool = False) -> _Found:
        """Return what a call reads, and ``nothing`` of a collection of which nothing is published.

        A search of one that is not there is warned of; other calls come before a first add as well.
        """
        if self.is_remote:
            try:
                return call()
            except (errors.ConflictError, errors.NotFoundError) as error:
                if not error.type.endswith((":collection-empty", ":unknown-collection")):
                    raise
                is_there = error.type.endswith(":collection-empty")
        elif self.is_empty:
            is_there = self.local.layout.is_begun()
        else:
            return call()
        if is_search and not is_there:
            _warn_of_unknown(self.collection.name)
        return nothing


@cache
def _warn_of_unknown(name: str) -> None:
    log.warning("there is no collection %r, so a search finds nothing; check the name or add texts", name)


def row_of(doc_id: str, text: str | None, metadata: Mapping[str, Any], **kept: str) -> dict[str, Any]:
    """Return a document as a collection takes it, with what a store keeps in columns of its own.

    Of metadata, columns have what can be filtered by.
    """
    columns = {
        name: value
        for name, value in metadata.items()
        if name not in RESERVED_COLUMNS and name != "id" and (_is_plain(value) or _is_list_of_texts(value))
    }
    return {**columns, "id": doc_id, "title": title_of(metadata), "text": text, **kept}


def title_of(metadata: Mapping[str, Any]) -> str | None:
    """Return a metadata ``title`` that is a text."""
    title = metadata.get("title")
    return title if isinstance(title, str) and title.strip() else None


def as_json(value: Any, what: str) -> str:
    """Return metadata as JSON; what is none raises :class:`UsageError`."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} must be JSON without NaN, got {str(error)[:80]!r}") from None


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bool | int | float)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


COMPARISONS: Final = {"==": "eq", "!=": "ne", ">": "gt", ">=": "gte", "<": "lt", "<=": "lte", "in": "in"}
"""What frameworks call comparisons, as Cairn does."""
_OPPOSITES: Final = {
    "eq": "ne",
    "ne": "eq",
    "gt": "lte",
    "lte": "gt",
    "lt": "gte",
    "gte": "lt",
    "in": "nin",
    "nin": "in",
    "and": "or",
    "or": "and",
    "is_null": "is_not_null",
    "is_not_null": "is_null",
}


def as_cairn_has_it(tree: Mapping[str, Any], *, is_negated: bool = False) -> dict[str, Any]:
    """Return a filter tree of a framework, which may have ``{"type": "not", "filter": …}``, as Cairn's.

    In Cairn a null matches no comparison, as in SQL. In Haystack and LlamaIndex a document without a value is
    unlike every value.
    """
    kind = tree["type"]
    if kind == "not":
        return as_cairn_has_it(tree["filter"], is_negated=not is_negated)
    if is_negated and kind not in _OPPOSITES:
        raise FilterError(
            f"a filter must not negate {kind}, got NOT around one; say which values there may be"
        )
    own = {**tree, "type": _OPPOSITES[kind] if is_negated else kind}
    if "filters" in tree:
        own["filters"] = [as_cairn_has_it(each, is_negated=is_negated) for each in tree["filters"]]
    if "value" not in tree or (kind in ("ne", "nin")) == is_negated:
        return own
    return {"type": "or", "filters": [own, {"type": "is_null", "key": tree["key"]}]}
