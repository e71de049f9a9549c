"""What shards are asked, the parts of generations that one process holds, and what each answers.

Positions in questions and answers are the shard's own, counted from 0.

A part is opened when it is first asked for, and closed when it is no longer asked for. Every question names
its generation, so a search that began with one is answered from it to the end, whatever is published
meanwhile.
"""

from __future__ import annotations

import datetime as dt
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from cairn.pipeline.errors import IntegrityError, StorageError, TryAgainError
from cairn.pipeline.index.generation import Generation, Kept, open_parts, table_errors
from cairn.pipeline.index.layout import Checks, CollectionLayout
from cairn.pipeline.index.segments.segment import VectorIndex
from cairn.pipeline.lexical.bm25 import Totals
from cairn.pipeline.lexical.tokenizer import Variants
from cairn.pipeline.search.filters import matching_documents
from cairn.pipeline.search.fusion import LateQuery, Windows, window_max_sim
from cairn.pipeline.search.reader import (
    BM25Scores,
    Found,
    LocalBM25,
    LocalReader,
    LocalScores,
    WindowScores,
    best_documents,
    best_passages,
    bm25_documents,
    chunk_positions,
    is_in_documents,
    merge_nominees,
    words_asked,
)
from cairn.pipeline.vector_index.faiss_index import NO_POSITION
from jaxtyping import Bool, Float32, Int64


class PartKey(NamedTuple):
    """What one shard has of a generation: partitions from ``first`` up to ``end``.

    ``manifest`` is the hash of the generation's manifest. With ``skips_lost`` damaged partitions are left
    out.
    """

    collection: str
    generation: int
    manifest: str
    first: int
    end: int
    skips_lost: bool = False


class Question(NamedTuple):
    """A call of :class:`~cairn.pipeline.search.shards.parts.ShardPart` for the part that a shard has.

    One that ``waits`` is asked again until there is no more time; another once of each replica.
    """

    shard: int
    key: PartKey
    method: str
    arguments: tuple[Any, ...]
    waits: bool = True


class ShardUnreachableError(TryAgainError):
    """No replica of a shard answers."""


Ask = Callable[[Sequence[Question]], list[Any]]
"""Asks all questions at once, and returns the answers in their order.

Raises :class:`ShardUnreachableError` where no replica of a shard answers.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class WordTotals:
    """Sums over the collection that BM25 needs: of texts and titles, and of windows of each size."""

    documents: tuple[Totals, Totals]
    passages: Mapping[int, tuple[Totals, Totals]]

    def __add__(self, other: WordTotals) -> WordTotals:
        """Return the sums of two parts, asked for the same terms and sizes."""
        return WordTotals(
            documents=_added(self.documents, other.documents),
            passages={size: _added(each, other.passages[size]) for size, each in self.passages.items()},
        )


def _added(one: tuple[Totals, Totals], other: tuple[Totals, Totals]) -> tuple[Totals, Totals]:
    return one[0] + other[0], one[1] + other[1]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartFacts:
    """What is to be known of a part when it is opened; ``rows`` are no documents, with their columns.

    ``missing`` are its partitions that are not there, with the reason.
    """

    num_documents: int
    num_chunks: int
    rows: pa.Table
    has_tokens: bool
    has_sparse: bool
    missing: Mapping[str, str]


class MetDocuments(NamedTuple):
    """Documents and the chunks they have, from ``firsts`` up to ``ends``."""

    documents: Int64[np.ndarray, " A"]
    firsts: Int64[np.ndarray, " A"]
    ends: Int64[np.ndarray, " A"]

    def places_of(
        self, documents: Int64[np.ndarray, " B"]
    ) -> tuple[Int64[np.ndarray, " B"], Bool[np.ndarray, " B"]]:
        """Return where documents stand among these, which ascend, or would stand, and which of them do."""
        places = np.searchsorted(self.documents, documents)
        return places, np.append(self.documents, -1)[places] == documents


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """A query whose words are scored, with the totals of the collection; passages of ``size`` chunks rank."""

    query: str
    totals: WordTotals
    size: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredAtOnce:
    """Which scores a search is to bring with it: of what is likely to be a candidate of the whole collection.

    The shard has ``share`` of the documents, so few of the best of all are not among so many of its own.
    ``others`` are candidates in any case.
    """

    parts: Sequence[str]
    size: int | None
    share: float
    others: Int64[np.ndarray, " B"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SearchAsked:
    """One search of a shard: the documents and chunks nearest to a vector, None of an index not asked.

    Only ``allowed`` documents count, None for all. ``num_best`` documents and passages are wanted by
    ``words``, where these are given. ``doc_id`` may be the id of a document of this shard.
    """

    vector_V: Float32[np.ndarray, " V"]
    num_documents: int | None
    num_chunks: int | None
    allowed: Int64[np.ndarray, " A"] | None
    words: Words | None
    num_best: int
    scored: ScoredAtOnce | None
    doc_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BestWords:
    """A shard's best documents and passages by BM25, and the highest BM25 of passages of each size."""

    documents: Found
    passages: Found
    highs: Mapping[int, float]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartScores:
    """Scores of ``documents``, which ascend; None of what was not asked for."""

    documents: Int64[np.ndarray, " N"]
    document_N: Float32[np.ndarray, " N"] | None
    chunk_N: Float32[np.ndarray, " N"] | None
    word_N: Float32[np.ndarray, " N"] | None
    passage_N: Float32[np.ndarray, " N"] | None
    windows: WindowScores | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartFound:
    """The answer to :class:`SearchAsked`: of ``num_chunks`` that count, and the documents that it names.

    ``named`` is the document whose id was given.
    """

    num_chunks: int
    met: MetDocuments
    documents: Found | None
    chunks: Found | None
    words: BestWords | None
    scored: PartScores | None
    named: int | None = None


METHODS: Final = frozenset(
    {"facts", "count", "search", "score", "max_sim", "chunks_of", "read_column", "matching"}
    | {"reader.read_sparse", "reader.token_matches", "reader.read_passages"}
    | {"part.position_of", "part.owners_of", "part.spans_of"}
    | {"part.chunks.reconstruct", "part.documents.reconstruct"}
)
"""What may be asked: of a part, its reader, its generation and its vectors."""
_NONE: Final = np.empty(0, np.int64)
UNUSED_SECONDS: Final = 60.0
"""A part of another generation is closed so long after the last question: longer than any request takes."""
LOOK_SECONDS: Final = 30.0
"""Between two looks for damage in rows that could not be read."""
KEPT_SCORES: Final = 16
"""BM25 of all documents or passages for the last queries, 4 bytes each: candidates are looked up in it."""


class ShardPart:
    """Answers for one part; safe to share between threads."""

    def __init__(self, part: Generation) -> None:
        self.part, self.reader = part, LocalReader(part)
        self._kept = Kept[tuple[str, int | None], BM25Scores](KEPT_SCORES)
        self._look_at, self._damage = 0.0, None
        self._look_lock = threading.Lock()

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Answer a question; damage that it meets raises :class:`IntegrityError`."""
        self.part.require_whole()
        try:
            with table_errors("reading what a search asks for", self.part.layout):
                return attrgetter(method)(self)(*arguments)
        except StorageError:
            with self._look_lock:
                if time.monotonic() >= self._look_at:
                    self._damage = self.part.damage_of_rows()
                    self._look_at = time.monotonic() + LOOK_SECONDS
            if self._damage is not None:
                raise self._damage.with_traceback(None) from None
            raise

    def facts(self) -> PartFacts:
        """Describe the part."""
        part = self.part
        return PartFacts(
            num_documents=part.num_documents,
            num_chunks=part.num_chunks,
            rows=part.document_schema.empty_table(),
            has_tokens=part.token_vectors is not None,
            has_sparse=part.has_sparse,
            missing=part.missing,
        )

    def count(self, terms: Sequence[str], sizes: Sequence[int]) -> WordTotals:
        """Count the texts, titles and chunks that hold each term, and what lengths there are."""
        return WordTotals(
            documents=self.part.document_bm25.totals(terms),
            passages={size: self.part.passage_bm25.totals(terms, size) for size in sizes},
        )

    def search(self, asked: SearchAsked) -> PartFound:
        """Search by a vector, and by words where these are given."""
        allowed_chunks, num_chunks = None, self.part.num_chunks
        if asked.allowed is not None and asked.num_chunks is not None:
            allowed_chunks = chunk_positions(self.part, asked.allowed)
            num_chunks = len(allowed_chunks)
        documents = _nearest(self.part.documents, asked.vector_V, asked.num_documents, asked.allowed)
        chunks = _nearest(self.part.chunks, asked.vector_V, asked.num_chunks, allowed_chunks)
        words = None
        if asked.words is not None and asked.num_best:
            words = self._best_words(asked.words, asked.allowed, asked.num_best)
        named = None if asked.doc_id is None else self.part.position_of(asked.doc_id)
        lists = [
            words.documents[0] if words else _NONE,
            documents[0] if documents else _NONE,
            self.part.owners_of(words.passages[0] if words else _NONE),
            self.part.owners_of(chunks[0] if chunks else _NONE),
            _NONE if named is None else np.array([named]),
        ]
        wanted = [asked.num_best, asked.num_documents or 0, asked.num_best, asked.num_chunks or 0, 1]
        return PartFound(
            num_chunks=num_chunks,
            met=self.chunks_of(np.unique(np.concatenate(lists))),
            documents=documents,
            chunks=chunks,
            words=words,
            scored=None if asked.scored is None else self._score_likely(asked, asked.scored, lists, wanted),
            named=named,
        )

    def _score_likely(
        self,
        asked: SearchAsked,
        scored: ScoredAtOnce,
        lists: Sequence[Int64[np.ndarray, " _"]],
        wanted: Sequence[int],
    ) -> PartScores:
        """Score the best of lists of which the collection has so many ``wanted`` in all."""
        likely = [each[: _likely(count, scored.share)] for each, count in zip(lists, wanted, strict=True)]
        positions = merge_nominees(self.part, [scored.others, *likely], 0)
        return self.score(positions, asked.vector_V, scored.parts, asked.words, scored.size)

    def chunks_of(self, documents: Int64[np.ndarray, " A"]) -> MetDocuments:
        """Return which chunks some documents have."""
        return MetDocuments(documents, *self.part.chunks_of(documents))

    def read_column(self, name: str) -> pa.Table:
        """Return a column of all documents."""
        return pa.table({name: self.part.read_column(name)})

    def matching(
        self, filters: Mapping[str, Any] | None, restriction: Mapping[str, Any] | None, seconds: float | None
    ) -> Int64[np.ndarray, " A"]:
        """Return the documents that match both filters, ascending."""
        timeout = None if seconds is None else dt.timedelta(seconds=seconds)
        found = matching_documents(self.part, filters, restriction, timeout)
        assert found is not None, "a filter is asked for"
        return found

    def score(
        self,
        positions: Int64[np.ndarray, " N"],
        vector_V: Float32[np.ndarray, " V"],
        parts: Sequence[str],
        words: Words | None,
        window_size: int | None,
    ) -> PartScores:
        """Score candidates, and their windows where ``window_size`` is given."""
        scores = self._scores(positions, vector_V, words)
        every = np.arange(len(positions))
        return PartScores(
            documents=positions,
            document_N=scores.documents() if "document" in parts else None,
            chunk_N=scores.chunks() if "chunk" in parts else None,
            word_N=None if words is None else scores.words(),
            passage_N=None if words is None else scores.passages(),
            windows=None if window_size is None else scores.windows(every, window_size),
        )

    def _scores(
        self,
        positions: Int64[np.ndarray, " N"],
        vector_V: Float32[np.ndarray, " V"],
        words: Words | None,
    ) -> LocalScores:
        if words is None:
            return LocalScores(self.part, positions, vector_V, None)
        bm25 = LocalBM25(
            words.size, partial(self._passage_scores, words), partial(self._document_scores, words)
        )
        return LocalScores(self.part, positions, vector_V, bm25)

    def max_sim(self, query: LateQuery, windows: Windows) -> Float32[np.ndarray, " W"]:
        """Return MaxSim of windows."""
        stored = self.part.token_vectors
        assert stored is not None, "a projected query needs token vectors"
        return window_max_sim(stored, query, windows)

    def _best_words(self, words: Words, allowed: Int64[np.ndarray, " A"] | None, num_best: int) -> BestWords:
        """Return the best allowed documents and passages by BM25."""
        found_M = {each: self._passage_scores(words, each).scores_M for each in words.totals.passages}
        if allowed is not None:
            is_allowed_M = is_in_documents(self.part, allowed)
            found_M = {each: scores_M * is_allowed_M for each, scores_M in found_M.items()}
        return BestWords(
            documents=best_documents(self.part, self._document_scores(words), allowed, num_best),
            passages=best_passages(self.part, BM25Scores(scores_M=found_M[words.size]), num_best),
            highs={each: float(scores_M.max(initial=0.0)) for each, scores_M in found_M.items()},
        )

    def _document_scores(self, words: Words) -> BM25Scores:
        """Return BM25 of all documents, whatever a filter allows; the last ones are kept."""
        score = partial(bm25_documents, self.part, few=None, totals=words.totals.documents)
        return self._kept_scores(words, None, score)

    def _passage_scores(self, words: Words, size: int) -> BM25Scores:
        """Return BM25 of all windows by first chunk, whatever a filter allows; the last ones are kept."""

        def score(own: Mapping[Variants, int]) -> BM25Scores:
            totals = words.totals.passages[size]
            return BM25Scores(scores_M=self.part.passage_bm25.scores(own, size, totals))

        return self._kept_scores(words, size, score)

    def _kept_scores(
        self, words: Words, size: int | None, score: Callable[[Mapping[Variants, int]], BM25Scores]
    ) -> BM25Scores:
        key = words.query, size
        scores = self._kept.get(key)
        if scores is None:
            scores = score(words_asked(words.query, self.part.query_languages))
            self._kept.add(key, scores, 1)
        return scores


def _likely(count: int, share: float) -> int:
    """Return how many of the best of all a shard may have: three deviations above its share."""
    return math.ceil(count * share + 3.0 * math.sqrt(count * share * (1.0 - share)))


def _nearest(
    index: VectorIndex,
    vector_V: Float32[np.ndarray, " V"],
    num_wanted: int | None,
    allowed: Int64[np.ndarray, " A"] | None,
) -> Found | None:
    if num_wanted is None:
        return None
    num_found = min(num_wanted, index.num_vectors if allowed is None else len(allowed))
    (scores_K,), (positions_K,) = index.search(vector_V[None], num_found, allowed)
    is_found_K = positions_K != NO_POSITION
    return positions_K[is_found_K], scores_K[is_found_K]


class HeldParts:
    """Answers questions about the collections under ``root``; safe to share between threads.

    With ``verify``, every file of a collection is hashed when the first part of it is opened.
    """

    def __init__(self, root: Path, *, verify: bool = False) -> None:
        self._root, self._verify = root, verify
        self._parts: dict[PartKey, ShardPart] = {}
        self._asked_at: dict[PartKey, float] = {}
        self._opening: dict[str, threading.Lock] = {}
        """One a collection: a part of another may be copied for minutes."""
        self._damaged_files: set[str] = set()
        """Files of Lance that were found damaged: hashed before a part with one is opened again."""

    def answer(self, key: PartKey, method: str, arguments: tuple[Any, ...]) -> Any:
        """Answer a question, opening its part first where it is not held.

        One that is found damaged is no longer held: it opens again when it is whole.
        """
        if method not in METHODS:
            raise AssertionError(f"a shard has no method {method!r}")
        self._asked_at[key] = time.monotonic()
        part = self._parts.get(key) or self._open(key)
        try:
            return part.answer(method, arguments)
        except IntegrityError:
            self._damaged_files |= {name for each in part.part.lance_files for name in each.damaged}
            self._parts.pop(key, None)
            raise

    def _open(self, key: PartKey) -> ShardPart:
        with self._opening.setdefault(key.collection, threading.Lock()):
            known = self._parts.get(key)
            if known is not None:
                return known
            layout = CollectionLayout.at(self._root, key.collection, range(key.first, key.end))
            is_first = all(held.collection != key.collection for held in list(self._parts))
            checks = Checks(
                verify=self._verify and is_first, suspects=self._damaged_files, skips_lost=key.skips_lost
            )
            generation = open_parts(layout, key.generation, range(key.first, key.end), checks)
            if layout.hash_of_manifest(key.generation) != key.manifest:
                raise StorageError(
                    f"generation {key.generation} of {key.collection!r} must be the same for every process "
                    "of a search, got two; let all see one root folder"
                )
            part = self._parts[key] = ShardPart(generation)
            self._close_unused(key)
            return part

    def _close_unused(self, opened: PartKey) -> None:
        before = time.monotonic() - UNUSED_SECONDS
        for key in list(self._parts):
            if key.collection == opened.collection and self._asked_at[key] < before:
                self._parts.pop(key, None)
                del self._asked_at[key]
