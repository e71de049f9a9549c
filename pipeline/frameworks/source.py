"""What the frameworks search, and what they get.

Passages of a collection, best first, with the place each was cut from.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.search_options import SearchParameters
from cairn.pipeline.types import ColumnSummary, Document, Hit, ListedDocument, Passage, SearchResult

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
    place = {
        "doc_id": hit.doc_id,
        "title": hit.title,
        "start_char": passage.start_char,
        "end_char": passage.end_char,
        "page": passage.page,
    }
    judged = {
        "score": passage.score,
        "scores": dict(hit.scores),
        "highlights": [asdict(each) for each in passage.highlights],
        "title_highlights": [asdict(each) for each in passage.title_highlights],
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
    own = dict(metadata)
    whole = [own.pop(name, None) for name in (LLAMA_COLUMN, LANGCHAIN_COLUMN, HAYSTACK_COLUMN)]
    for kept in filter(None, whole[1:]):
        own |= json.loads(kept)
    return own


def open_source(
    collection: str, *, root: str | Path | None = None, url: str | None = None, api_key: str | None = None
) -> Searchable:
    """Return a collection to search: behind the API at ``url`` if any, else under ``root``."""
    if url is None:
        from cairn.pipeline.collection import open_collection

        return open_collection(collection, root=root)
    if root is not None:
        raise ConfigError("a collection must be under a root or behind a URL, got both; leave one out")
    from cairn.pipeline.client import CairnClient

    client = CairnClient(url, api_key=api_key)
    source = client.collection(collection)
    weakref.finalize(source, client.close)  # only this source has the client
    return source
