"""Answer queries over one collection: the public face of stage 6.

Options are checked once, where they arrive; every search is then one :class:`PreparedSearch` of one
generation. It reads what needs no vector while the queries are encoded, here or by the caller of
:meth:`Searcher.begin`; ``ranking`` and ``hits`` do the rest. The query encoder arrives as a protocol: this
package loads no model. Safe to use from several threads when the encoder is.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any, TypeVar, Unpack

import numpy as np
from cairn.pipeline.errors import IntegrityError, StorageError, UsageError
from cairn.pipeline.index.faiss_index import one_faiss_thread
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search.diversity import require_groupable
from cairn.pipeline.search.documents import count_documents, read_document
from cairn.pipeline.search.filters import compile_both
from cairn.pipeline.search.highlights import Explanation
from cairn.pipeline.search.hits import make_hits
from cairn.pipeline.search.late import LateQuery
from cairn.pipeline.search.lineage import read_lineage
from cairn.pipeline.search.prepared import PreparedSearch
from cairn.pipeline.search.queries import check_queries, unit_vectors
from cairn.pipeline.search.ranking import rank_queries
from cairn.pipeline.search.reader import LocalReader
from cairn.pipeline.search.rerank import reranked, widened
from cairn.pipeline.search.served import LoadEncoder, MakeReader, Served, ServedGeneration
from cairn.pipeline.search.windows import window_size
from cairn.pipeline.search_options import SearchKeywords, SearchOptions
from cairn.pipeline.types import (
    Document,
    EncodedQueries,
    Lineage,
    QueryEncoder,
    Reranker,
    SearchResult,
    TokenQueryEncoder,
)
from jaxtyping import Float

_Answer = TypeVar("_Answer")
Vectors = Float[np.ndarray, "Q V"] | EncodedQueries


class Searcher:
    """Searches one collection with one encoder; a newly published generation is taken up at the next call."""

    def __init__(
        self,
        layout: CollectionLayout,
        encoder: QueryEncoder | LoadEncoder,
        *,
        timeout_seconds: float | None = None,
        make_reader: MakeReader = LocalReader,
        verify: bool = False,
    ) -> None:
        """Open the newest intact generation.

        ``encoder`` may be a function that loads the encoder of a generation; it is called again when another
        encoder has made the newest one. ``timeout_seconds`` bounds reading a filter's documents.
        ``make_reader`` says who reads the segments of a generation. ``verify`` hashes every file now, also
        those that this machine has hashed before.
        """
        self._timeout = None if timeout_seconds is None else dt.timedelta(seconds=timeout_seconds)
        self._served = ServedGeneration(layout, encoder, make_reader, verify=verify)
        self._is_local = make_reader is LocalReader
        self._threads = ThreadPoolExecutor(thread_name_prefix="cairn-words")  # they end with the searcher

    @property
    def generation(self) -> Generation:
        """The generation that the next search would answer from."""
        return self._served.take().generation

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know.

        A sentence while an older generation than the published one is served or files of this one are
        damaged, nothing when all is well.
        """
        return () if self._served.warning is None else (self._served.warning,)

    @property
    def is_outdated(self) -> bool:
        """Tell whether an older generation answers than was published."""
        return self._served.is_outdated

    @property
    def is_lacking(self) -> bool:
        """Tell whether damaged files of the generation that answers are done without."""
        return self._served.is_lacking

    @property
    def suspects(self) -> tuple[str, ...]:
        """Files of the published generation that another program was about to write into."""
        return self._served.wanted

    @property
    def is_answering(self) -> bool:
        """Tell whether calls are answered: not where all generations are found damaged."""
        return self._served.damage is None

    def search(self, query: str, **options: Unpack[SearchKeywords]) -> SearchResult:
        """Answer one query; the keywords are those of :class:`SearchOptions`."""
        return self.answer([query], SearchOptions(**options))[0]

    def answer(
        self, queries: Sequence[str], options: SearchOptions, reranker: Reranker | None = None
    ) -> list[SearchResult]:
        """Answer several queries in one pass of the encoder and one search of each vector index."""
        check_queries(queries)
        chosen = options if reranker is None else widened(options)
        results = self.reading(lambda: self._answer(queries, chosen))
        return results if reranker is None else [reranked(result, reranker, options) for result in results]

    def _answer(self, queries: Sequence[str], options: SearchOptions) -> list[SearchResult]:
        served = self._served.take()
        search = self._prepare(served, queries, options)
        vectors = Future[Vectors]()
        vectors.set_running_or_notify_cancel()
        both = _beside(search.read, vectors, self._threads)
        try:
            vectors.set_result(encode_for_search(served.encoder, queries))
        except BaseException as error:
            vectors.set_exception(error)
            wait([both])
            raise
        return finish_search(*both.result())

    def reading(self, attempt: Callable[[], _Answer]) -> _Answer:
        """Return what ``attempt`` reads; where it meets damage and another generation is whole, once more."""
        before = self.last_generation
        try:
            return attempt()
        except (IntegrityError, StorageError):
            if not self.is_replaced(before):
                raise
            return attempt()

    @property
    def last_generation(self) -> Generation:
        """The generation that answered last."""
        return self._served.generation

    def is_replaced(self, failed: Generation) -> bool:
        """Look for damage after a read failed; tell whether another generation answers now.

        Hashes the files of a damaged generation, which may take seconds.
        """
        return self._served.is_replaced(failed)

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
        asked = SearchOptions(**options)
        if queries is not None:
            check_queries(queries)
            if len(queries) != len(query_vectors):
                raise UsageError(
                    f"there must be one query text a vector, got {len(queries)} texts and "
                    f"{len(query_vectors)} vectors"
                )
        return self.reading(lambda: finish_search(self.prepare(queries, asked), query_vectors))

    def prepare(self, queries: Sequence[str] | None, options: SearchOptions) -> PreparedSearch:
        """Read what needs no vector of checked queries; :func:`finish_search` takes it with their vectors."""
        return self._prepare(self._served.take(), queries, options).read()

    def reads_beside(self, options: SearchOptions) -> bool:
        """Tell whether :meth:`begin` is faster than :meth:`prepare` once the vectors are there.

        It is where the thread that reads waits: a filter for tables, another reader than this process's for
        other machines. BM25 waits for nothing. Beside the encoder, which takes the interpreter's lock again
        after every call of torch, the two hold each other up for longer than BM25 takes.
        """
        return not self._is_local or options.filters is not None or options.restriction is not None

    def begin(
        self, queries: Sequence[str], options: SearchOptions, vectors: Future[Vectors], threads: Executor
    ) -> Future[tuple[PreparedSearch, Vectors]]:
        """Read on ``threads`` what needs no vector, while the vectors of checked queries are computed.

        The result is what :func:`finish_search` takes. Where reading fails, or the result is cancelled,
        ``vectors`` are cancelled.
        """
        return _beside(lambda: self.prepare(queries, options), vectors, threads)

    def read_document(self, doc_id: str, *, restriction: Mapping[str, Any] | None = None) -> Document | None:
        """Return a document by its id; None where there is none, or none that matches ``restriction``."""
        return self.reading(lambda: read_document(self.generation, doc_id, restriction, self._timeout))

    def read_lineage(self, doc_id: str, *, restriction: Mapping[str, Any] | None = None) -> Lineage | None:
        """Say where a document came from; None where there is none that matches ``restriction``."""
        return self.reading(lambda: read_lineage(self.generation, doc_id, restriction, self._timeout))

    def count_documents(self, restriction: Mapping[str, Any] | None = None) -> int:
        """Count the documents that match ``restriction``."""
        return self.reading(lambda: count_documents(self.generation, restriction, self._timeout))

    def _prepare(
        self, served: Served, queries: Sequence[str] | None, options: SearchOptions
    ) -> PreparedSearch:
        """Check options against a generation."""
        generation = served.generation
        require_groupable(options.group_by, generation.document_schema)
        return PreparedSearch(
            generation=generation,
            reader=served.reader,
            options=options,
            queries=queries,
            condition=compile_both(options.filters, options.restriction, generation.document_schema),
            window=window_size(options.chunk_tokens, generation.manifest.settings),
            ranking_window=window_size(None, generation.manifest.settings),
            timeout=self._timeout,
        )


def _beside(
    read: Callable[[], PreparedSearch], vectors: Future[Vectors], threads: Executor
) -> Future[tuple[PreparedSearch, Vectors]]:
    """Read what needs no vector on ``threads``, and give it with the vectors once both are there."""
    both = Future[tuple[PreparedSearch, Vectors]]()
    prepared = threads.submit(read)

    def settle(_: Future[Any]) -> None:
        if both.set_running_or_notify_cancel():
            try:
                both.set_result((prepared.result(), vectors.result()))
            except BaseException as error:  # noqa: BLE001 - `both.result()` raises it
                both.set_exception(error)

    def await_vectors(done: Future[PreparedSearch]) -> None:
        if done.cancelled() or done.exception() is not None:
            settle(done)
        else:
            vectors.add_done_callback(settle)

    def cancel_rest(_: Future[Any]) -> None:
        prepared.cancel()
        vectors.cancel()

    both.add_done_callback(cancel_rest)
    prepared.add_done_callback(await_vectors)
    return both


def encode_for_search(encoder: QueryEncoder, queries: Sequence[str]) -> Vectors:
    """Encode queries, with the states of their tokens where the encoder shows them."""
    if not isinstance(encoder, TokenQueryEncoder):
        return encoder.encode_queries(list(queries))
    vectors_QV, tokens = encoder.encode_query_tokens(list(queries))
    return EncodedQueries(vectors_QV=vectors_QV, tokens=tokens)


def finish_search(search: PreparedSearch, encoded: Vectors) -> list[SearchResult]:
    """Answer the queries, given a vector each; token vectors judge where their tokens are given."""
    generation = search.generation
    generation.require_whole()  # the encoder may have taken its time
    vectors_QV = encoded.vectors_QV if isinstance(encoded, EncodedQueries) else encoded
    explanations = _explanations(search, encoded) if isinstance(encoded, EncodedQueries) else None
    late = None if explanations is None else [each and each.late for each in explanations]
    vectors = unit_vectors(vectors_QV, generation.manifest.vector_dim)
    # Threads that share one query wait for each other, spinning.
    with one_faiss_thread() if len(vectors) == 1 else nullcontext():
        rankings = rank_queries(search, vectors, late)
        hits = make_hits(search, rankings, explanations)
    generation.require_whole()  # a file written into meanwhile gives wrong scores
    texts = [""] * len(hits) if search.queries is None else search.queries
    return [
        SearchResult(query=text, generation=generation.number, hits=found, warnings=tuple(ranking.warnings))
        for text, found, ranking in zip(texts, hits, rankings, strict=True)
    ]


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
