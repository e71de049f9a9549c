"""Answer queries over one collection: the public face of stage 6.

Checks what is asked, takes one generation, encodes all queries in one pass while ``plan`` reads what needs no
vector, and lets ``ranking`` and ``hits`` do the rest. The query encoder arrives as a protocol: no model is
known here. Safe to use from several threads when the encoder is.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Unpack

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from lancedb.expr import Expr

from pipeline.errors import UsageError
from pipeline.index.generation import Generation
from pipeline.index.layout import CollectionLayout
from pipeline.search.documents import count_documents, read_document
from pipeline.search.filters import compile_filter, compile_restriction
from pipeline.search.hits import make_hits
from pipeline.search.options import SearchKeywords, SearchOptions, check_queries, unit_vectors
from pipeline.search.plan import Plan, read_ahead
from pipeline.search.ranking import rank_queries
from pipeline.search.served import ServedGeneration
from pipeline.search.windows import window_size
from pipeline.types import Document, QueryEncoder, SearchResult


class BegunSearch:
    """A search whose vectors are to come.

    It answers from the generation that it began with, whatever is published meanwhile.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ahead = read_ahead(plan)

    def finish(self, query_vectors: Float[np.ndarray, "Q V"]) -> list[SearchResult]:
        """Answer the queries, given a vector each."""
        generation, queries = self._plan.generation, self._plan.queries
        generation.require_whole()  # the encoder may have taken its time
        rankings = rank_queries(
            self._plan, unit_vectors(query_vectors, generation.manifest.vector_dim), self._ahead
        )
        texts = [""] * len(rankings) if queries is None else queries
        answers = zip(texts, make_hits(self._plan, rankings), strict=True)
        return [SearchResult(query=text, generation=generation.number, hits=hits) for text, hits in answers]


class Searcher:
    """Searches one collection with one encoder; a newly published generation is taken up at the next call."""

    def __init__(
        self, layout: CollectionLayout, encoder: QueryEncoder, *, timeout_seconds: float | None = None
    ) -> None:
        """Open the newest intact generation.

        ``timeout_seconds`` bounds reading a filter's documents, None does not.
        """
        self._encoder = encoder
        self._timeout = None if timeout_seconds is None else dt.timedelta(seconds=timeout_seconds)
        self._served = ServedGeneration(layout, encoder.fingerprint)
        self._beside = ThreadPoolExecutor(
            thread_name_prefix="cairn-words"
        )  # its threads end with the searcher
        generation = self._served.take()
        self._known_schema: tuple[Generation, pa.Schema] = (generation, generation.document_table.schema)

    @property
    def generation(self) -> Generation:
        """The generation that the next search would answer from."""
        return self._served.take()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know.

        A sentence while an older generation than the published one is served, nothing when all is well.
        """
        return () if self._served.warning is None else (self._served.warning,)

    def search(self, query: str, **options: Unpack[SearchKeywords]) -> SearchResult:
        """Answer one query; the keywords are those of :class:`SearchOptions`."""
        return self.search_batch([query], **options)[0]

    def search_batch(self, queries: Sequence[str], **options: Unpack[SearchKeywords]) -> list[SearchResult]:
        """Answer several queries in one pass of the encoder and one search of each vector index.

        Words are looked up beside the encoder.
        """
        plan = self._plan(queries, options)
        begun = self._beside.submit(BegunSearch, plan)
        try:
            vectors = self._encoder.encode_queries(list(queries))
        finally:
            wait([begun])
        return begun.result().finish(vectors)

    def search_vectors(
        self,
        query_vectors: Float[np.ndarray, "Q V"],
        *,
        queries: Sequence[str] | None = None,
        **options: Unpack[SearchKeywords],
    ) -> list[SearchResult]:
        """Answer queries that are already encoded.

        Without their texts there is no BM25, and the answers' ``query`` is empty.
        """
        plan = self._plan(queries, options)
        if queries is not None and len(queries) != len(query_vectors):
            raise UsageError(
                f"there must be one query text a vector, got {len(queries)} texts and "
                f"{len(query_vectors)} vectors"
            )
        return BegunSearch(plan).finish(query_vectors)

    def begin(self, queries: Sequence[str], **options: Unpack[SearchKeywords]) -> BegunSearch:
        """Do all that can be done before the queries are encoded, for a caller that encodes them meanwhile."""
        return BegunSearch(self._plan(queries, options))

    def read_document(self, doc_id: str, *, restriction: Mapping[str, Any] | None = None) -> Document | None:
        """Return a document by its id; None where there is none, or none that matches ``restriction``."""
        generation = self._served.take()
        return read_document(generation, self._schema_of(generation), doc_id, restriction, self._timeout)

    def count_documents(self, restriction: Mapping[str, Any] | None = None) -> int:
        """Count the documents that match ``restriction``."""
        generation = self._served.take()
        return count_documents(generation, self._schema_of(generation), restriction, self._timeout)

    def _plan(self, queries: Sequence[str] | None, keywords: SearchKeywords) -> Plan:
        options = SearchOptions(**keywords)
        if queries is not None:
            check_queries(queries)
        generation = self._served.take()
        schema = self._schema_of(generation)
        return Plan(
            generation=generation,
            schema=schema,
            options=options,
            queries=queries,
            where=_both(options.filters, options.restriction, schema),
            window=window_size(options.chunk_tokens, generation.manifest.settings),
            ranking_window=window_size(None, generation.manifest.settings),
            timeout=self._timeout,
        )

    def _schema_of(self, generation: Generation) -> pa.Schema:
        """Return the documents table's schema, read once a generation.

        A round trip into Lance costs more than searching its vectors.
        """
        known, schema = self._known_schema
        if known is not generation:
            schema = generation.document_table.schema
            self._known_schema = (generation, schema)
        return schema


def _both(
    filters: Mapping[str, Any] | None, restriction: Mapping[str, Any] | None, schema: pa.Schema
) -> Expr | None:
    """Compile two filters, each by itself, into one expression that asks for both."""
    allowed = None if restriction is None else compile_restriction(restriction, schema)
    wanted = None if filters is None else compile_filter(filters, schema)
    return wanted if allowed is None else (allowed if wanted is None else allowed.and_(wanted))
