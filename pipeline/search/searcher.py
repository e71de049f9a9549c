"""Answer queries over one collection: the public face of stage 6.

    queries ─▶ encoder ─▶ vectors ─▶ filter, BM25, ranking, hits      on one thread, from one generation

Options are checked where they arrive. The query encoder arrives as a protocol: this package loads no model.
Safe to use from several threads when the encoder is.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final, Unpack

import numpy as np
import pyarrow as pa
from cairn.pipeline.errors import UsageError
from cairn.pipeline.index.generation import Elsewhere, Generation, OpenOne
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.lexical.bm25 import FewDocuments
from cairn.pipeline.options import shown
from cairn.pipeline.search.calibration import (
    BEING_MEASURED,
    BLOCK_IDS,
    GENERAL_QUESTIONS,
    READ_AT_ONCE,
    READ_DOCUMENTS,
    Calibration,
    known_items,
)
from cairn.pipeline.search.documents import visible_documents
from cairn.pipeline.search.filters import (
    check_filters,
    matching_documents,
    require_columns,
    text_order_warnings,
)
from cairn.pipeline.search.hits import Explanation, make_hits, read_rows
from cairn.pipeline.search.late import LateQuery
from cairn.pipeline.search.passages import window_size
from cairn.pipeline.search.ranking import PreparedSearch, rank_queries
from cairn.pipeline.search.reader import Alone
from cairn.pipeline.search.rerank import reranked, widened
from cairn.pipeline.search.served import LoadEncoder, Served, ServedGeneration, of_whole
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

Vectors = Float[np.ndarray, "Q V"] | EncodedQueries
Encode = Callable[[QueryEncoder, Sequence[str]], Vectors]
EncodeSparse = Callable[[Generation, Sequence[str]], Sequence[Mapping[int, float]]]
"""Returns the weights of queries' tokens by a generation's sparse encoder."""
KEPT_CALIBRATIONS: Final = 256
"""Of readers who are to see nothing of others' documents: some numbers each, measured in a second."""


class Searcher(ServedGeneration):
    """Searches one collection with one encoder; a newly published generation is taken up at the next call.

    ``encode`` gives the vectors of queries that come without them, ``encode_sparse`` their weights by the
    sparse encoder of a generation that has one; without it such a collection is searched without. The rest is
    :class:`ServedGeneration`'s.
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
        super().__init__(layout, encoder, open_one, timeout_seconds=timeout_seconds, verify=verify)
        self._encode_sparse = encode_sparse
        self._encode = encode or encode_for_search
        self._calibrating = threading.Lock()
        self._calibrations: dict[str, Calibration] = {}

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
            if generation.manifest.encoder.shows_states:  # else another model's words are known
                unknown = [place for place, tokens in enumerate(encoded.tokens) if not len(tokens.ids_T)]
                search = replace(search, unknown=unknown)
        vectors = np.zeros((len(vectors_QV), dim), np.float32) if by_words else unit_vectors(vectors_QV, dim)
        with _thread_pools().limit(limits=1, user_api="blas"):  # threads that share a small product spin
            rankings = rank_queries(search, vectors, late)
            hits = make_hits(search, rankings, explanations)
        if by_words:
            hits = [tuple(map(_by_words, found)) for found in hits]
        generation.require_whole()  # a file written into meanwhile gives wrong scores
        warnings = text_order_warnings(options.filters or {}, generation.document_schema)
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
        require_columns(options, generation.document_schema)
        check_filters(generation, options.filters, options.restriction)  # before encoding
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
        allowed = matching_documents(generation, options.filters, options.restriction, served.timeout)
        alone = None
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
        restriction = asked.restriction if asked.hide_word_statistics else None
        options = SearchOptions(
            passages=0, restriction=restriction, hide_word_statistics=True, partial=asked.partial
        )
        _, allowed = visible_documents(served, restriction)
        key = served.encoder.fingerprint + json.dumps(restriction, sort_keys=True)
        is_first = self._calibrating.acquire(blocking=False)
        try:
            kept = self._calibrations.get(key)
            if is_first and (kept is None or not kept.holds_for(len(allowed))):
                for oldest in list(self._calibrations)[: max(len(self._calibrations) - KEPT_CALIBRATIONS, 0)]:
                    del self._calibrations[oldest]
                ask = partial(self._answer, served, options=options)
                kept = self._calibrations[key] = _calibrated(served, allowed, ask)
            return kept
        finally:
            if is_first:
                self._calibrating.release()


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


def _calibrated(
    served: Served,
    allowed: Int64[np.ndarray, " A"],
    ask: Callable[[Sequence[str]], list[SearchResult]],
) -> Calibration:
    """Ask the collection general questions and first sentences of its own documents."""
    if served.encodes_no_queries:
        raise UsageError(
            "min_probability must be asked of a collection whose queries are encoded, got one without a "
            "model for them; leave it out"
        )
    known = known_items(_spread_texts(served.generation, allowed))
    answers = ask([*GENERAL_QUESTIONS, *known.values()])
    off_topic, own = answers[: len(GENERAL_QUESTIONS)], answers[len(GENERAL_QUESTIONS) :]
    return Calibration.of(off_topic, dict(zip(known, own, strict=True)), len(allowed))


def _spread_texts(generation: Generation, allowed: Int64[np.ndarray, " A"]) -> Iterator[tuple[str, str]]:
    """Yield ids and texts of some documents, drawn by their ids, reading a few at a time.

    A collection is measured alike in any number of partitions, whatever order its documents came in.
    """
    doc_ids = generation.doc_ids.take(pa.array(allowed))
    blocks = (doc_ids.slice(first, BLOCK_IDS).to_pylist() for first in range(0, len(allowed), BLOCK_IDS))
    hashes = (zlib.crc32(doc_id.encode()) for block in blocks for doc_id in block)
    hash_A = np.fromiter(hashes, np.uint32, len(allowed))
    last = min(len(allowed), READ_DOCUMENTS) - 1
    drawn = np.flatnonzero(hash_A <= np.partition(hash_A, last)[last]) if len(allowed) else allowed
    ordered = sorted(drawn.tolist(), key=lambda place: (hash_A[place], doc_ids[place].as_py()))
    places = allowed[ordered[:READ_DOCUMENTS]]
    for first in range(0, len(places), READ_AT_ONCE):
        for row in read_rows(generation, places[first : first + READ_AT_ONCE], ["doc_id", "text"]):
            yield row["doc_id"], row["text"]


_thread_pools = cache(ThreadpoolController)
"""The libraries with threads of their own: looking for them takes some milliseconds."""


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
