"""Answer queries over one collection: the public face of stage 6.

    queries ─▶ encoder ─▶ vectors ─▶ filter, BM25, ranking, hits      on one thread, from one generation

Options are checked where they arrive. The query encoder arrives as a protocol: this package loads no model.
Safe to use from several threads when the encoder is.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, Unpack

import numpy as np
from cairn.pipeline.errors import UsageError
from cairn.pipeline.index.faiss_index import one_faiss_thread
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.options import shown
from cairn.pipeline.search.diversity import require_groupable
from cairn.pipeline.search.documents import read_document, read_lineage, visible_documents
from cairn.pipeline.search.filters import allowed_documents, compile_both, text_order_warnings
from cairn.pipeline.search.highlights import Explanation
from cairn.pipeline.search.hits import make_hits
from cairn.pipeline.search.late import LateQuery
from cairn.pipeline.search.ranking import PreparedSearch, rank_queries
from cairn.pipeline.search.reader import LocalReader
from cairn.pipeline.search.rerank import reranked, widened
from cairn.pipeline.search.served import LoadEncoder, MakeReader, Served, ServedGeneration
from cairn.pipeline.search.windows import window_size
from cairn.pipeline.search_options import MAX_BATCH_QUERIES, MAX_QUERY_BYTES, SearchKeywords, SearchOptions
from cairn.pipeline.types import (
    Document,
    EncodedQueries,
    Lineage,
    QueryEncoder,
    Reranker,
    SearchResult,
    TokenQueryEncoder,
)
from jaxtyping import Float, Float32, Int64
from threadpoolctl import ThreadpoolController

Vectors = Float[np.ndarray, "Q V"] | EncodedQueries


class Searcher(ServedGeneration):
    """Searches one collection with one encoder; a newly published generation is taken up at the next call.

    ``timeout_seconds`` bounds reading a filter's documents; the rest is :class:`ServedGeneration`'s.
    """

    def __init__(
        self,
        layout: CollectionLayout,
        encoder: QueryEncoder | LoadEncoder,
        *,
        timeout_seconds: float | None = None,
        make_reader: MakeReader = LocalReader,
        verify: bool = False,
    ) -> None:
        super().__init__(layout, encoder, make_reader, verify=verify)
        self._timeout = None if timeout_seconds is None else dt.timedelta(seconds=timeout_seconds)

    def search(self, query: str, **options: Unpack[SearchKeywords]) -> SearchResult:
        """Answer one query; the keywords are those of :class:`SearchOptions`."""
        return self.answer([query], SearchOptions(**options))[0]

    def answer(
        self,
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
        chosen = options if reranker is None else widened(options)
        results = self.reading(
            partial(_answer, queries=queries, options=chosen, encoded=encoded, timeout=self._timeout)
        )
        return results if reranker is None else [reranked(result, reranker, options) for result in results]

    def search_vectors(
        self,
        query_vectors: Float[np.ndarray, "Q V"],
        *,
        queries: Sequence[str] | None = None,
        **options: Unpack[SearchKeywords],
    ) -> list[SearchResult]:
        """Answer queries that are already encoded; see :meth:`answer`."""
        asked = SearchOptions(**options)
        if queries is not None and len(queries) != len(query_vectors):
            raise UsageError(
                f"there must be one query text a vector, got {len(queries)} texts and "
                f"{len(query_vectors)} vectors"
            )
        return self.answer(queries, asked, encoded=query_vectors)

    def read_document(self, doc_id: str, *, restriction: Mapping[str, Any] | None = None) -> Document | None:
        """Return a document by its id; None where there is none, or none that matches ``restriction``."""
        return self.reading(
            lambda served: read_document(served.generation, doc_id, restriction, self._timeout)
        )

    def read_lineage(self, doc_id: str, *, restriction: Mapping[str, Any] | None = None) -> Lineage | None:
        """Say where a document came from; None where there is none that matches ``restriction``."""
        return self.reading(
            lambda served: read_lineage(served.generation, doc_id, restriction, self._timeout)
        )

    def count_documents(self, restriction: Mapping[str, Any] | None = None) -> int:
        """Count the documents that match ``restriction``."""
        return len(self.visible(restriction)[1])

    def visible(self, restriction: Mapping[str, Any] | None) -> tuple[Generation, Int64[np.ndarray, " A"]]:
        """Return a generation with the positions of its documents that match ``restriction``, ascending."""
        return self.reading(
            lambda served: (
                served.generation,
                visible_documents(served.generation, restriction, self._timeout),
            )
        )


def _answer(
    served: Served,
    queries: Sequence[str] | None,
    options: SearchOptions,
    encoded: Vectors | None,
    timeout: dt.timedelta | None,
) -> list[SearchResult]:
    """Answer from one generation: encode, read what the filter allows, rank, make hits."""
    generation, settings = served.generation, served.generation.manifest.settings
    require_groupable(options.group_by, generation.document_schema)
    condition = compile_both(options.filters, options.restriction, generation.document_schema)
    warnings = text_order_warnings(options.filters or {}, generation.document_schema)
    window, ranking_window = window_size(options.chunk_tokens, settings), window_size(None, settings)
    if encoded is None:
        assert queries is not None, "texts or vectors are asked for"
        encoded = encode_for_search(served.encoder, queries)
        generation.require_whole()  # the encoder may have taken its time
    search = PreparedSearch(
        generation=generation,
        reader=served.reader,
        options=options,
        queries=queries,
        window=window,
        ranking_window=ranking_window,
        allowed=None if condition is None else allowed_documents(generation, condition, timeout),
    )
    vectors_QV = encoded.vectors_QV if isinstance(encoded, EncodedQueries) else encoded
    explanations = _explanations(search, encoded) if isinstance(encoded, EncodedQueries) else None
    late = None if explanations is None else [each and each.late for each in explanations]
    vectors = unit_vectors(vectors_QV, generation.manifest.vector_dim)
    # Threads that share one query, or a product of some thousand rows, wait for each other, spinning.
    one_thread = one_faiss_thread() if len(vectors) == 1 else nullcontext()
    with one_thread, _thread_pools().limit(limits=1, user_api="blas"):
        rankings = rank_queries(search, vectors, late)
        hits = make_hits(search, rankings, explanations)
    generation.require_whole()  # a file written into meanwhile gives wrong scores
    texts = [""] * len(hits) if queries is None else queries
    return [
        SearchResult(
            query=text,
            generation=generation.number,
            hits=found,
            warnings=(*warnings, *ranking.warnings),
        )
        for text, found, ranking in zip(texts, hits, rankings, strict=True)
    ]


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
    queries = [LateQuery.of(tokens, stored.projection) for tokens in encoded.tokens]
    return [
        None if late is None else Explanation.of(search.generation, search.reader, text, tokens, late)
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
