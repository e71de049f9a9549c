"""Readings of a collection by one searcher that stays open, and what the oracle says they must give.

A document is told by its id and its version, which its year is: nothing else of the oracle is known here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search.contents import count_documents, read_document
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.search_options import SearchOptions

from tests.index import stones

State = dict[str, int]
"""The oracle: the version of each document."""
Drawn = tuple[Callable[..., Any], tuple[Any, ...], Any]

_OPEN: dict[Path, Searcher] = {}


class NoEncoder:
    """Nothing here is encoded: queries are given as vectors."""

    fingerprint = "e" * 64

    def encode_queries(self, texts: Any) -> Any:
        raise AssertionError(texts)


def draw(rng: random.Random, state: State) -> Drawn:
    """Draw a reading: a function, its arguments, and what it must return."""
    doc_id = rng.choice(sorted(state))
    filters, passing = _filter(rng, state)
    found = sorted(found for found in state if passing(found))
    drawn: list[Drawn] = [
        (nearest, (doc_id, state[doc_id]), doc_id),
        (by_word, (doc_id, filters), (passing(doc_id), [])),
        (filtered, (doc_id, state[doc_id], filters), found),
        (counted, (filters,), len(found)),
        (document, (doc_id,), state[doc_id]),
        (document, (f"{doc_id}-never-there",), None),
        (all_documents_reopened, (), state),
    ]
    return rng.choice(drawn)


def _filter(rng: random.Random, state: State) -> tuple[dict[str, Any], Callable[[str], bool]]:
    """Draw a filter, and the same as a function of an id."""
    version = rng.choice(sorted(state.values()))
    some = rng.sample(sorted(state), min(len(state), 3))
    drawn: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
        ({"type": "eq", "key": "year", "value": 2000 + version}, lambda it: state[it] == version),
        ({"type": "gte", "key": "year", "value": 2000 + version}, lambda it: state[it] >= version),
        ({"type": "lt", "key": "year", "value": 2000 + version}, lambda it: state[it] < version),
        ({"type": "in", "key": "doc_id", "value": some}, lambda it: it in some),
    ]
    one, other = rng.choice(drawn), rng.choice(drawn)
    kind = rng.choice(("one", "and", "or"))
    if kind == "one":
        return one
    both = all if kind == "and" else any
    return {"type": kind, "filters": [one[0], other[0]]}, lambda it: both((one[1](it), other[1](it)))


def searcher_of(folder: Path) -> Searcher:
    """Return the searcher of this process, opened at its first use."""
    if folder not in _OPEN:
        _OPEN[folder] = Searcher(CollectionLayout(folder, "stones"), NoEncoder())
    return _OPEN[folder]


def all_documents_reopened(folder: Path) -> State:
    """Read everything after opening the collection again."""
    _OPEN.pop(folder, None)
    return all_documents(folder)


def all_documents(folder: Path) -> State:
    """Return the documents of the generation that answers, having looked at each text and its position."""
    searcher = searcher_of(folder)
    generation = searcher.generation
    rows = generation.fetch_documents(range(generation.num_documents), ["doc_id", "text", "year"]).to_pylist()
    ids = [row["doc_id"] for row in rows]
    assert len(ids) == len(set(ids)), "doubled documents"
    assert ids == generation.doc_ids.to_pylist(), "positions of another generation"
    for row in rows:
        assert row["text"] == stones.text_of(row["doc_id"], row["year"] - 2000), "torn document"
    return {row["doc_id"]: row["year"] - 2000 for row in rows}


def nearest(folder: Path, doc_id: str, version: int) -> str:
    """Return the document nearest to a document's own vector."""
    return _search(folder, doc_id, version, granularity="document", hybrid=False, top_k=10)[0]


def filtered(folder: Path, doc_id: str, version: int, filters: dict[str, Any]) -> list[str]:
    """Return all documents that a search with a filter gives."""
    return sorted(_search(folder, doc_id, version, granularity="document", top_k=200, filters=filters))


def by_word(folder: Path, doc_id: str, filters: dict[str, Any]) -> tuple[bool, list[str]]:
    """Tell whether a document is found by its name, and which hits were doubled."""
    found = _search(folder, doc_id, 0, top_k=200, filters=filters)
    return doc_id in found, sorted({each for each in found if found.count(each) > 1})


def counted(folder: Path, filters: dict[str, Any]) -> int:
    """Count the documents that pass a filter."""
    return searcher_of(folder).reading(count_documents, filters)


def document(folder: Path, doc_id: str) -> int | None:
    """Return the version of a document, None where there is none."""
    found = searcher_of(folder).reading(read_document, doc_id)
    if found is None:
        return None
    version = found.metadata["year"] - 2000
    assert found.text == stones.text_of(doc_id, version), "torn document"
    return version


def _search(folder: Path, doc_id: str, version: int, **options: Any) -> list[str]:
    vector = stones.unit_vectors(f"{doc_id}/{version}", 1)
    queries = None if options.get("hybrid") is False else [doc_id]
    (result,) = searcher_of(folder).answer(queries, SearchOptions(**options), encoded=vector)
    return [hit.doc_id for hit in result.hits]
