"""Answer queries over one collection from its newest whole generation: the public face of stage 6.

    queries ─▶ encoder ─▶ vectors ─▶ filter, BM25, ranking, hits      on one thread, from one generation

Options are checked where they arrive. The query encoder arrives as a protocol: this package loads no model.
Safe to use from several threads when the encoder is.

A new generation is opened when ``CURRENT`` changes; the old one stays if the new one is damaged. A generation
that is damaged while it is served is replaced within the call that notices; what is known to be damaged is
not read, though much of it may be whole. A search takes one generation and keeps it until its answer is
complete; an old generation is closed after the last search that uses it. Checking for a publication costs one
``stat``. A damaged generation is tried again at most every :data:`RETRY_SECONDS`. For a collection in an
object store, a thread keeps this machine's copy up to date.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, Unpack

import numpy as np
from cairn.pipeline.config import NO_MODEL
from cairn.pipeline.errors import (
    CairnError,
    FingerprintMismatchError,
    IntegrityError,
    PartitionsMissingError,
    StorageError,
    UsageError,
)
from cairn.pipeline.index.files import use_lance
from cairn.pipeline.index.generation import (
    Elsewhere,
    Generation,
    OpenOne,
    open_generation,
    open_latest_intact_generation,
)
from cairn.pipeline.index.layout import Checks, CollectionLayout
from cairn.pipeline.index.replica import REFRESH_SECONDS, note_outage
from cairn.pipeline.lexical.bm25 import FewDocuments
from cairn.pipeline.options import shown
from cairn.pipeline.search.calibration import BEING_MEASURED, Calibration, measured
from cairn.pipeline.search.filters import (
    check_filters,
    matching_documents,
    require_columns,
    text_order_warnings,
)
from cairn.pipeline.search.fusion import LateQuery
from cairn.pipeline.search.hits import Explanation, make_hits
from cairn.pipeline.search.ranking import PreparedSearch, rank_queries, window_size
from cairn.pipeline.search.reader import Alone, IndexReader, LocalReader
from cairn.pipeline.search.rerank import reranked, widened
from cairn.pipeline.search.shards.sharded_generation import ShardedGeneration
from cairn.pipeline.search.shards.sharded_reader import ShardedReader
from cairn.pipeline.search_options import MAX_BATCH_QUERIES, MAX_QUERY_BYTES, SearchKeywords, SearchOptions
from cairn.pipeline.types import (
    EncodedQueries,
    Hit,
    QueryEncoder,
    Reranker,
    SearchResult,
    TokenQueryEncoder,
)
from jaxtyping import Float, Float32, Int64
from threadpoolctl import ThreadpoolController

log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""A repair in place leaves ``CURRENT`` as it is; until it is noticed the older generation serves."""

Stamp = tuple[int, int, int]
LoadEncoder = Callable[[Generation], QueryEncoder]
_Answer = TypeVar("_Answer")
_Asked = ParamSpec("_Asked")


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A generation with the encoder that made it and what reads its segments.

    ``timeout`` bounds reading a filter's documents.
    """

    generation: Generation
    encoder: QueryEncoder
    reader: IndexReader
    timeout: dt.timedelta | None = None

    def matching(
        self, restriction: Mapping[str, Any] | None = None, filters: Mapping[str, Any] | None = None
    ) -> Int64[np.ndarray, " A"]:
        """Return the positions of the documents that match both, ascending."""
        found = matching_documents(self.generation, filters, restriction, self.timeout)
        return np.arange(self.generation.num_documents) if found is None else found

    @property
    def encodes_no_queries(self) -> bool:
        """Tell whether documents brought their vectors, and texts are ranked by words alone."""
        return self.generation.manifest.settings["encoder"]["model"] == NO_MODEL

    def reachable(self) -> Served:
        """Return it without what lies on shards that do not answer now."""
        whole = self.generation
        left = whole.reachable() if isinstance(whole, ShardedGeneration) else whole
        return self if left is whole else replace(self, generation=left, reader=_reader_of(left))


def of_whole(
    method: Callable[Concatenate[Any, Served, _Asked], _Answer],
) -> Callable[Concatenate[Any, _Asked], _Answer]:
    """Hand a method the newest whole generation, which it takes behind ``self``.

    Where it meets damage and another generation is whole, it is handed that one: the one place where a call
    falls back.
    """

    @wraps(method)
    def reading(own: Searcher, *args: _Asked.args, **named: _Asked.kwargs) -> _Answer:
        served = own.take()
        try:
            return method(own, served, *args, **named)
        except PartitionsMissingError:
            raise
        except (IntegrityError, StorageError):
            if not own.is_replaced(served.generation):
                raise
            return method(own, own.take(), *args, **named)

    return reading


Vectors = Float[np.ndarray, "Q V"] | EncodedQueries
Encode = Callable[[QueryEncoder, Sequence[str]], Vectors]
EncodeSparse = Callable[[Generation, Sequence[str]], Sequence[Mapping[int, float]]]
"""Returns the weights of queries' tokens by a generation's sparse encoder."""
KEPT_CALIBRATIONS: Final = 256
"""Of readers who are to see nothing of others' documents: some numbers each, measured in a second."""


class Searcher:
    """Searches one collection, from its newest intact generation with the encoder that made it.

    ``encoder`` is the one encoder there is, or loads that of a generation. ``encode`` gives the vectors of
    queries that come without them, ``encode_sparse`` their weights by the sparse encoder of a generation that
    has one; without it such a collection is searched without. ``timeout_seconds`` bounds reading a filter's
    documents. ``verify`` hashes every file when it is opened first, also those that this machine has hashed
    before. ``open_one`` opens a generation elsewhere than here, and raises :class:`StorageError` where the
    one before is to be served on. Safe to ask from several threads.
    """

    def __init__(
        self,
        layout: CollectionLayout,
        encoder: QueryEncoder | LoadEncoder,
        *,
        timeout_seconds: float | None = None,
        open_one: OpenOne | None = None,
        encode_sparse: EncodeSparse | None = None,
        verify: bool = False,
        encode: Encode | None = None,
    ) -> None:
        layout.require_exists()
        use_lance()
        self._process = os.getpid()
        self._layout = layout
        self._current_path = layout.current_path
        self._timeout = None if timeout_seconds is None else dt.timedelta(seconds=timeout_seconds)
        self._load_encoder = (lambda _: encoder) if isinstance(encoder, QueryEncoder) else encoder
        self._encode_sparse = encode_sparse
        self._encode = encode or encode_for_search
        self._calibrating = threading.Lock()
        self._calibrations: dict[str, Calibration] = {}
        self._lock, self._look_lock = threading.Lock(), threading.Lock()
        self._look_at = 0.0
        self._stamp = self._read_stamp()
        self._open_one = open_one
        generation = open_latest_intact_generation(layout, Checks(verify=verify), open_one)
        loaded = self._load_encoder(generation)
        require_encoder(generation, loaded)
        self._served = Served(generation, loaded, _reader_of(generation), self._timeout)
        self._describe(generation)
        self._refusal: FingerprintMismatchError | None = None
        self._damage: IntegrityError | None = None
        self._damaged_files: frozenset[str] = frozenset()
        """Files of Lance that were found damaged: hashed before a generation with one is served again."""
        if layout.replica is not None:
            threading.Thread(
                target=_follow, args=[weakref.ref(self), layout], name="cairn-follow", daemon=True
            ).start()

    def search(self, query: str, **options: Unpack[SearchKeywords]) -> SearchResult:
        """Answer one query; the keywords are those of :class:`SearchOptions`."""
        return self.answer([query], SearchOptions(**options))[0]

    def _answer(
        self,
        served: Served,
        queries: Sequence[str] | None,
        options: SearchOptions,
        reranker: Reranker | None = None,
        encoded: Vectors | None = None,
    ) -> list[SearchResult]:
        """Answer several queries in one pass of the encoder and one search of each vector index.

        ``encoded`` are the queries' vectors where they are known. Then ``queries`` may be None: there is no
        BM25, and the answers' ``query`` is empty.
        """
        if queries is not None:
            check_queries(queries)
            if isinstance(encoded, list | np.ndarray) and len(queries) != len(encoded):
                raise UsageError(
                    f"there must be one query text a vector, got {len(queries)} texts and {len(encoded)} "
                    "vectors"
                )
        if options.partial:
            served = served.reachable()
        else:
            served.generation.require_all()
        generation, dim = served.generation, served.generation.manifest.vector_dim
        chosen = options if reranker is None else widened(options)
        search, encoded = self._prepared(served, queries, chosen, encoded)
        vectors_QV = encoded.vectors_QV if isinstance(encoded, EncodedQueries) else encoded
        by_words = queries is not None and served.encodes_no_queries and not np.any(vectors_QV)
        if by_words:
            search = replace(search, options=_words_alone(chosen, has_sparse=search.sparse is not None))
        explanations, late = None, None
        if isinstance(encoded, EncodedQueries) and (explanations := _explanations(search, encoded)):
            late = [each and each.late for each in explanations]
            if generation.shows_states:  # else another model's words are known
                unknown = [place for place, tokens in enumerate(encoded.tokens) if not len(tokens.ids_T)]
                search = replace(search, unknown=unknown)
        vectors = np.zeros((len(vectors_QV), dim), np.float32) if by_words else unit_vectors(vectors_QV, dim)
        with _blas_threads().limit(limits=1):  # threads that share a small product spin
            rankings = rank_queries(search, vectors, late)
            hits = make_hits(search, rankings, explanations)
        if by_words:
            hits = [tuple(map(_by_words, found)) for found in hits]
        generation.require_whole()  # a file written into meanwhile gives wrong scores
        warnings: Sequence[str] = ()
        if options.filters:
            warnings = text_order_warnings(options.filters, generation.document_schema)
        if generation.missing:
            names = ", ".join(generation.missing)
            warnings = (*warnings, f"the answer leaves out the documents of the partition(s) {names}")
        texts = [""] * len(hits) if queries is None else queries
        results = [
            SearchResult(
                query=text,
                generation=generation.number,
                hits=found,
                warnings=(*warnings, *ranking.warnings),
            )
            for text, found, ranking in zip(texts, hits, rankings, strict=True)
        ]
        if chosen.min_probability is not None:
            calibration = self._calibration(served, chosen)
            results = [
                replace(result, warnings=(*result.warnings, BEING_MEASURED))
                if calibration is None
                else calibration.apply(result, chosen.min_probability)
                for result in results
            ]
        return results if reranker is None else [reranked(result, reranker, options) for result in results]

    answer = of_whole(_answer)

    def _prepared(
        self,
        served: Served,
        queries: Sequence[str] | None,
        options: SearchOptions,
        encoded: Vectors | None,
    ) -> tuple[PreparedSearch, Vectors]:
        """Encode, and read what the filter allows."""
        generation, settings = served.generation, served.generation.manifest.settings
        asks_of_columns = options.asks_of_columns
        if asks_of_columns:  # refused before encoding
            require_columns(options, generation.document_schema)
            check_filters(generation, options.filters, options.restriction)
        window, ranking_window = window_size(options.chunk_tokens, settings), window_size(None, settings)
        has_sparse_say = options.hybrid and options.weight("sparse") > 0.0 and generation.has_sparse
        with ThreadPoolExecutor(1, thread_name_prefix="cairn-sparse") as beside:
            weights = None
            if queries is not None and self._encode_sparse is not None and has_sparse_say:
                weights = beside.submit(self._encode_sparse, generation, queries)
            if encoded is None:
                assert queries is not None, "texts or vectors are asked for"
                encoded = self._encode(served.encoder, queries)
                generation.require_whole()  # the encoder may have taken its time
            sparse = None if weights is None else weights.result()
        allowed = alone = None
        if asks_of_columns:
            allowed = matching_documents(generation, options.filters, options.restriction, served.timeout)
        if options.hide_word_statistics and options.restriction is not None:
            if isinstance(generation, Elsewhere):
                raise UsageError(
                    "word statistics must be hidden in a search of one process, got a search in shards; "
                    "serve the collection without shards"
                )
            visible = allowed
            if options.filters:  # which move no count
                visible = matching_documents(generation, None, options.restriction, served.timeout)
            assert visible is not None, "a restriction asks for something"
            few = FewDocuments.of(visible, generation.chunk_offsets)
            alone = Alone(few, generation.languages_of(visible), generation.mean_of_chunks(visible))
        search = PreparedSearch(
            generation=generation,
            reader=served.reader,
            options=options,
            queries=queries,
            window=window,
            ranking_window=ranking_window,
            allowed=allowed,
            sparse=sparse,
            alone=alone,
        )
        return search, encoded

    def _calibration(self, served: Served, asked: SearchOptions) -> Calibration | None:
        """Return how raw scores become probabilities.

        Measured once for an encoder, and again when the collection has doubled or halved: of what a search
        may find, where nothing of the rest may show. While one thread measures, others take what was measured
        before, None at first.
        """
        if served.encodes_no_queries:
            raise UsageError(
                "min_probability must be asked of a collection whose queries are encoded, got one without a "
                "model for them; leave it out"
            )
        restriction = asked.restriction if asked.hide_word_statistics else None
        options = SearchOptions(
            passages=0, restriction=restriction, hide_word_statistics=True, partial=asked.partial
        )
        allowed = served.matching(restriction)
        key = served.encoder.fingerprint + json.dumps(restriction, sort_keys=True)
        is_first = self._calibrating.acquire(blocking=False)
        try:
            kept = self._calibrations.get(key)
            if is_first and (kept is None or not kept.holds_for(len(allowed))):
                for oldest in list(self._calibrations)[: max(len(self._calibrations) - KEPT_CALIBRATIONS, 0)]:
                    del self._calibrations[oldest]
                ask = partial(self._answer, served, options=options)
                kept = self._calibrations[key] = measured(served.generation, allowed, ask)
            return kept
        finally:
            if is_first:
                self._calibrating.release()

    @property
    def generation(self) -> Generation:
        """The generation that the next call would answer from, where it has all its partitions."""
        found = self.take().generation
        found.require_all()
        return found

    @property
    def last_generation(self) -> Generation:
        """The generation that answered last, without a look at what has become of it."""
        return self._served.generation

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know.

        A sentence while an older generation than the published one is served or files of this one are
        damaged, nothing when all is well.
        """
        return () if self._warning is None else (self._warning,)

    @property
    def is_answering(self) -> bool:
        """Tell whether calls are answered: not where all generations are damaged, or lack partitions."""
        return self._damage is None and not self.last_generation.missing

    @of_whole
    def reading(
        self,
        served: Served,
        read: Callable[Concatenate[Served, _Asked], _Answer],
        *args: _Asked.args,
        **named: _Asked.kwargs,
    ) -> _Answer:
        """Return what ``read`` reads of the newest whole generation, and is asked for.

        Where that lacks partitions, :class:`PartitionsMissingError` is raised.
        """
        served.generation.require_all()
        return read(served, *args, **named)

    def take(self) -> Served:
        """Return the generation to answer one call from; a newly published one is taken up.

        While one thread opens a new generation, the others go on with the old one, or wait where its tables
        went away with it. A new generation made by another encoder than there is raises
        :class:`FingerprintMismatchError`.
        """
        if os.getpid() != self._process:
            use_lance()
        if self._is_due() and self._lock.acquire(blocking=not self.last_generation.folder.exists()):
            try:
                if self._is_due():
                    self._take_up()
            finally:
                self._lock.release()
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        served, damage = self._served, self._damage
        if damage is None:
            try:
                served.generation.require_whole()
            except IntegrityError as error:
                damage = error
            else:
                return served
        return self._fall_back(served.generation, damage)

    def is_replaced(self, failed: Generation) -> bool:
        """Look for a publication or damage after a read failed; tell whether another generation answers now.

        Hashes what the failed one reads of Lance, at most every :data:`RETRY_SECONDS`. Raises the
        :class:`IntegrityError` of damage that leaves no generation to answer.
        """
        with contextlib.suppress(CairnError):
            self.take()
        with self._look_lock:
            if self.last_generation is failed and self._damage is None and time.monotonic() >= self._look_at:
                self._look_at = self._next_retry()
                error = failed.damage_of_rows()
                if error is not None:
                    with contextlib.suppress(IntegrityError):
                        self._fall_back(failed, error)
        if self.last_generation is failed and self._damage is not None:
            raise self._damage.with_traceback(None)
        return self.last_generation is not failed

    def _fall_back(self, damaged: Generation, error: IntegrityError) -> Served:
        """Serve the newest whole generation in the place of one that was damaged while it was served.

        Where there is none, ``error`` is raised; :meth:`_take_up` looks again every :data:`RETRY_SECONDS`.
        """
        with self._lock:
            if self.last_generation is damaged and self._damage is None:
                self._damaged_files |= {name for each in damaged.lance_files for name in each.damaged}
                try:
                    checks = Checks(suspects=self._damaged_files)
                    opened = open_latest_intact_generation(self._layout, checks, self._open_one)
                    self._serve(opened)
                except (IntegrityError, StorageError):
                    self._damage, self._retry_at = error, self._next_retry()
                    raise error from None
                log.warning(
                    "search.fell_back collection=%s damaged=%d generation=%d",
                    self._layout.name,
                    damaged.number,
                    opened.number,
                )
        served = self._served
        if served.generation is damaged:
            raise error
        return served

    def _is_due(self) -> bool:
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            return True
        return self._read_stamp() != self._stamp

    def _take_up(self) -> None:
        stamp = self._read_stamp()
        generation = self.last_generation
        try:
            checks = Checks(suspects=self._damaged_files)
            if self._damage is None:
                opened = open_generation(self._layout, checks=checks, open_one=self._open_one)
            else:  # nothing answers: an older one that is whole again will do
                opened = open_latest_intact_generation(self._layout, checks, self._open_one)
            self._serve(opened)
        except (IntegrityError, StorageError) as error:
            self.is_outdated = self._is_behind(generation)
            self._warning = (
                f"generation {generation.number} is still served, the published one is not: {error}"
            )
            self._retry_at = self._next_retry()
            self._stamp = stamp
            log.warning("search.take_up_failed collection=%s served=%d", self._layout.name, generation.number)
            return
        self._stamp = stamp
        self._damaged_files = frozenset() if opened.warning is None else self._damaged_files
        log.info("search.taken_up collection=%s generation=%d", self._layout.name, opened.number)

    def _serve(self, opened: Generation) -> None:
        """Answer from a generation with its encoder; where that is not there, every call is refused."""
        encoder = self._served.encoder
        try:
            if encoder.fingerprint != opened.manifest.fingerprints["encoder"]:
                encoder = self._load_encoder(opened)
            require_encoder(opened, encoder)
        except FingerprintMismatchError as error:
            self._refusal = error
        else:
            self._served = Served(opened, encoder, _reader_of(opened), self._timeout)
            self._refusal = None
        self._damage = None
        self._describe(opened)

    def _describe(self, opened: Generation) -> None:
        """Note what the user should know of a generation, and when to look for a better one."""
        self._warning: str | None = opened.warning
        self.is_outdated = self._is_behind(opened)
        self._retry_at = None if opened.warning is None else self._next_retry()

    def _is_behind(self, generation: Generation) -> bool:
        try:
            return self._layout.current_generation_number() not in (None, generation.number)
        except IntegrityError:  # what was published cannot be told
            return False

    def _read_stamp(self) -> Stamp | None:
        try:
            found = self._current_path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    @staticmethod
    def _next_retry() -> float:
        return time.monotonic() + RETRY_SECONDS


def _reader_of(generation: Generation) -> IndexReader:
    return ShardedReader(generation) if isinstance(generation, ShardedGeneration) else LocalReader(generation)


def require_encoder(generation: Generation, encoder: QueryEncoder) -> None:
    """Raise :class:`FingerprintMismatchError` unless this encoder made the generation."""
    expected = generation.manifest.fingerprints["encoder"]
    if encoder.fingerprint != expected:
        raise FingerprintMismatchError(
            f"the query encoder must be the one collection {generation.layout.name!r} was built with "
            f"({expected[:12]}…), got {encoder.fingerprint[:12]}…; open the collection with its own model "
            "and settings, or build it again"
        )


def _follow(searcher: weakref.ref[Searcher], layout: CollectionLayout) -> None:
    """Keep a copy up to date while it is being searched; failures are noted as outages of its store."""
    while True:
        time.sleep(REFRESH_SECONDS)
        if searcher() is None:
            return
        try:
            layout.refresh()
        except CairnError as error:
            note_outage(layout.replica.uri if layout.replica else layout.name, error)


def _words_alone(options: SearchOptions, *, has_sparse: bool) -> SearchOptions:
    """Return the options of a search in which vectors have no say; refuse those that need them."""
    if not has_sparse and not (options.hybrid and options.weight("bm25") > 0.0):
        raise UsageError(
            "a text must be searched by BM25 where nothing encodes queries, got a search without it; give a "
            "vector, or leave BM25 in"
        )
    weights = {**(options.weights or {}), "document": 0.0, "chunk": 0.0}
    return replace(options, granularity="chunk", weights=weights)


def _by_words(hit: Hit) -> Hit:
    """Return a hit without its cosine with a query that nothing encodes, which is 0."""

    def without(scores: Mapping[str, float]) -> dict[str, float]:
        return {part: score for part, score in scores.items() if part != "chunk"}

    passages = [replace(passage, scores=without(passage.scores)) for passage in hit.passages]
    return replace(hit, scores=without(hit.scores), passages=passages)


@cache
def _blas_threads() -> ThreadpoolController:
    """Return the BLAS libraries whose threads are their own; looking for them takes some milliseconds.

    One with OpenMP's threads, as FAISS's may be, is left out: to limit it would limit FAISS, too.
    """
    return ThreadpoolController().select(threading_layer=["pthreads", "intel", "gnu", "tbb"])


def encode_for_search(encoder: QueryEncoder, queries: Sequence[str]) -> Vectors:
    """Encode queries, with the states of their tokens where the encoder shows them."""
    if not isinstance(encoder, TokenQueryEncoder):
        return encoder.encode_queries(list(queries))
    vectors_QV, tokens = encoder.encode_query_tokens(list(queries))
    return EncodedQueries(vectors_QV=vectors_QV, tokens=tokens)


def _explanations(search: PreparedSearch, encoded: EncodedQueries) -> list[Explanation | None] | None:
    """Return each query as token vectors judge it; None where they have no say."""
    stored = search.generation.token_vectors
    if stored is None or search.queries is None or not search.options.late:
        return None
    queries = [LateQuery.of(tokens, stored.codebook) for tokens in encoded.tokens]
    return [
        None if late is None else Explanation.of(search, stored.codebook, text, tokens, late)
        for text, tokens, late in zip(search.queries, encoded.tokens, queries, strict=True)
    ]


def check_queries(queries: Sequence[str]) -> None:
    """Refuse anything that is not a list of non-empty texts of bounded size."""
    if isinstance(queries, str):
        raise UsageError("queries must be a list of texts, got one text; use search() for a single query")
    if not 1 <= len(queries) <= MAX_BATCH_QUERIES:
        raise UsageError(
            f"a batch must have 1 to {MAX_BATCH_QUERIES:,} queries, got {len(queries):,}; split it"
        )
    for query in queries:
        _check_query(query)


def _check_query(query: Any) -> None:
    if not isinstance(query, str):
        raise UsageError(f"a query must be a text, got {shown(query)}")
    if not query.strip():
        raise UsageError("a query must not be empty or blank; say what to look for")
    try:
        size = len(query.encode())
    except UnicodeEncodeError:
        raise UsageError("a query must be valid Unicode, got a lone surrogate") from None
    if size > MAX_QUERY_BYTES:
        raise UsageError(
            f"a query must have at most {MAX_QUERY_BYTES:,} bytes in UTF-8, got {size:,}; shorten it"
        )


def unit_vectors(vectors_QV: np.ndarray, vector_dim: int) -> Float32[np.ndarray, "Q V"]:
    """Return query vectors as L2-normalised float32.

    A wrong shape, a zero vector or a value that is not finite is refused.
    """
    vectors = np.asarray(vectors_QV)
    if vectors.ndim != 2 or vectors.shape[1] != vector_dim or not 1 <= vectors.shape[0] <= MAX_BATCH_QUERIES:
        raise UsageError(
            f"query vectors must have shape (1 to {MAX_BATCH_QUERIES:,}, {vector_dim}), got {vectors.shape}"
        )
    if vectors.dtype.kind not in "fiu" or not np.all(np.isfinite(vectors)):
        raise UsageError("query vectors must be finite numbers, got NaN, infinity or another type")
    wide = vectors.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    if not np.all(norms > 0.0):
        raise UsageError("query vectors must not be zero; the encoder found nothing to embed")
    return (wide / norms).astype(np.float32)
