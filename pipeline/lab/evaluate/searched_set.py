"""Cairn's rows of the table: an encoded set in memory, ranked by the code that ranks a collection.

    encoded set ─▶ EncodedGeneration   exact indexes over the vectors, words counted as an ingest counts them
                ─▶ LocalReader ─▶ ``search.rank_queries``

So a figure of these rows is that of a search with an exact index, the options of :data:`AS_SEARCHED` and as
many documents as a run holds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from cairn.pipeline.durable import storage_errors
from cairn.pipeline.faiss_library import faiss
from cairn.pipeline.index.bm25 import DocumentBM25
from cairn.pipeline.index.faiss_index import FaissIndex
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.passage_terms import num_words, write_passage_terms
from cairn.pipeline.index.segments.joined import JoinedWords
from cairn.pipeline.index.segments.segment import none_deleted
from cairn.pipeline.index.token_file import CodeColumn, TokenVectors
from cairn.pipeline.lab.evaluate.encodings import EncodedSet
from cairn.pipeline.lab.evaluate.evidence import BUDGETS, Spans
from cairn.pipeline.lab.evaluate.measures import RUN_DEPTH, Answer, RankedDocuments
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.evaluate.systems import Ranking as AnyRanking
from cairn.pipeline.lab.evaluate.systems import System
from cairn.pipeline.search.late import LateQuery
from cairn.pipeline.search.ranking import PreparedSearch, Ranking, rank_queries
from cairn.pipeline.search.reader import LocalReader
from cairn.pipeline.search.searcher import unit_vectors
from cairn.pipeline.search.windows import default_window
from cairn.pipeline.search_options import MAX_TOP_K, SearchOptions
from cairn.pipeline.token_vectors.projection import TokenProjection
from cairn.pipeline.types import QueryTokens
from jaxtyping import Bool, Float32, Int64
from typing_extensions import override

AS_SEARCHED: Final[Mapping[AnyRanking, SearchOptions]] = {
    "document": SearchOptions(granularity="document", hybrid=False, late=False),
    "chunk": SearchOptions(granularity="chunk", hybrid=False, late=False),
    "fused": SearchOptions(granularity="both", hybrid=False, late=False),
    "fused+bm25": SearchOptions(granularity="both", hybrid=True, late=False),
    "late": SearchOptions(granularity="both", hybrid=False),
    "late+bm25": SearchOptions(granularity="both", hybrid=True),
}
"""The options that a search asks for each ranking with."""
READ_CHARACTERS: Final = 2 * max(BUDGETS)
"""Passages are asked for beyond the largest budget, so that the first one that does not fit is there, too."""
BLOCK_QUERIES: Final = 32
"""Queries ranked at once: the BM25 of one alone is held in memory."""


class _Words(NamedTuple):
    """The words of chunks and titles, their numbers by document, and what both files took on disk."""

    chunks: JoinedWords
    titles: JoinedWords
    text_words: np.ndarray
    title_words: np.ndarray
    num_bytes: int


class EncodedGeneration(Generation):
    """An encoded set as the generation that an ingest would publish of it, held in memory.

    It has what a ranking reads: columns, vectors and words. It has no files, manifest or table.
    """

    def __init__(
        self, corpus: RetrievalSet, encoded: EncodedSet, projection: TokenProjection | None = None
    ) -> None:
        self._corpus: RetrievalSet
        tokens = None
        if projection is not None:
            tokens = TokenVectors(
                projection=projection,
                chunks=CodeColumn(rows=encoded.chunk_codes, offsets_M1=encoded.chunk_code_offsets),
                titles=CodeColumn(rows=encoded.title_codes, offsets_M1=encoded.title_code_offsets),
            )
        vars(self).update(
            _corpus=corpus,
            doc_ids=pa.array(corpus.doc_ids, pa.large_string()),
            chunk_offsets=encoded.chunk_offsets,
            chunk_documents=encoded.chunk_document,
            chunk_starts=encoded.start_char,
            chunk_ends=encoded.end_char,
            documents=_exact_index(encoded.document_vectors_NV),
            chunks=_exact_index(encoded.chunk_vectors_MV),
            token_vectors=tokens,
        )

    @property
    @override
    def num_documents(self) -> int:
        return len(self.doc_ids)

    @property
    @override
    def num_chunks(self) -> int:
        return len(self.chunk_starts)

    @cached_property
    def words(self) -> _Words:
        """The counted words, in the files of a collection."""
        texts, titles = self._corpus.texts, self._corpus.titles
        each = np.arange(len(texts) + 1)
        lengths_N = np.fromiter(map(len, titles), np.int64, len(titles))
        with (
            tempfile.TemporaryDirectory(prefix="cairn-words-") as folder,
            storage_errors("counting words"),
        ):
            files = Path(folder) / "passages", Path(folder) / "titles"  # they stay mapped
            of_chunks = write_passage_terms(
                [texts], self.chunk_offsets, self.chunk_starts, self.chunk_ends, files[0]
            )
            of_titles = write_passage_terms([titles], each, np.zeros_like(lengths_N), lengths_N, files[1])
            num_bytes = sum(path.stat().st_size for path in files)
        ends_M1 = np.concatenate([[0], np.cumsum(num_words(of_chunks, self.num_chunks))])
        return _Words(
            chunks=JoinedWords([(of_chunks, none_deleted(self.num_chunks))]),
            titles=JoinedWords([(of_titles, none_deleted(len(texts)))]),
            text_words=np.diff(ends_M1[self.chunk_offsets]).astype(np.int32),
            title_words=num_words(of_titles, len(texts)).astype(np.int32),
            num_bytes=num_bytes,
        )

    @cached_property
    @override
    def text_words(self) -> JoinedWords:
        return self.words.chunks

    @cached_property
    @override
    def document_bm25(self) -> DocumentBM25:
        words = self.words
        return DocumentBM25(
            words.chunks, words.titles, self.chunk_documents, words.text_words, words.title_words
        )


class SearchedSet:
    """Ranks the queries of an encoded set as a search of its documents does."""

    def __init__(
        self,
        judged: RetrievalSet,
        encoded: EncodedSet,
        projection: TokenProjection | None = None,
    ) -> None:
        self.generation = EncodedGeneration(judged, encoded, projection)
        self._queries = judged.queries
        self.encoded = encoded

    def rank(
        self, system: System, wants_passages_Q: Bool[np.ndarray, " Q"], depth: int = RUN_DEPTH
    ) -> list[Answer]:
        """Answer every query with at most ``depth`` documents; passages only where they are wanted.

        A search answers with at most :data:`~cairn.pipeline.search_options.MAX_TOP_K` documents.
        """
        every = np.arange(len(self._queries))
        options = replace(AS_SEARCHED[system.ranking], top_k=min(depth, MAX_TOP_K))
        documents = list(self._rankings(system, replace(options, passages=0), every))
        reading = replace(options, max_characters=READ_CHARACTERS)
        read = self._rankings(system, reading, np.flatnonzero(wants_passages_Q))
        return [
            Answer(
                documents=RankedDocuments.of(ranking.positions, ranking.scores),
                passages=self._spans(next(read)) if is_wanted else None,
            )
            for ranking, is_wanted in zip(documents, wants_passages_Q.tolist(), strict=True)
        ]

    def word_bytes(self, system: System) -> int:
        """Return the bytes of the words that a system reads."""
        return self.generation.words.num_bytes if system.needs_words else 0

    def rank_among(self, system: System, query: int, allowed: Int64[np.ndarray, " A"]) -> RankedDocuments:
        """Rank some documents for one query, as a search with a filter does."""
        options = replace(AS_SEARCHED[system.ranking], top_k=min(len(allowed), MAX_TOP_K), passages=0)
        (ranking,) = self._rankings(system, options, np.array([query]), allowed)
        return RankedDocuments.of(ranking.positions, ranking.scores)

    def _rankings(
        self,
        system: System,
        options: SearchOptions,
        chosen: Int64[np.ndarray, " q"],
        allowed: Int64[np.ndarray, " A"] | None = None,
    ) -> Iterator[Ranking]:
        window = default_window(system.encoding.encoder.landmark_interval)
        for start in range(0, len(chosen), BLOCK_QUERIES):
            block = chosen[start : start + BLOCK_QUERIES]
            search = PreparedSearch(
                generation=self.generation,
                reader=LocalReader(self.generation),
                options=options,
                queries=[self._queries[query] for query in block.tolist()],
                window=window,
                ranking_window=window,
                allowed=allowed,
            )
            vectors = self.encoded.query_vectors_QV[block]
            late = [self._late(query) for query in block.tolist()] if system.judges_tokens else None
            yield from rank_queries(search, unit_vectors(vectors, vectors.shape[1]), late)

    def _late(self, query: int) -> LateQuery | None:
        """Return a query's projected tokens, None where none weighs anything."""
        encoded, stored = self.encoded, self.generation.token_vectors
        assert stored is not None, "a system that judges by token vectors was given no projection"
        own = slice(*encoded.query_token_offsets[query : query + 2].tolist())
        ids = encoded.query_token_ids[own]
        places = np.zeros(len(ids), np.int64)  # where the tokens stand is not asked
        tokens = QueryTokens(
            states_TD=encoded.query_states[own], ids_T=ids, start_char=places, end_char=places
        )
        return LateQuery.of(tokens, stored.projection)

    def _spans(self, ranking: Ranking) -> Spans:
        """Return the pieces that a search with a budget reads, in the order in which it reads them."""
        pieces = [piece for own in ranking.passages for piece in own]
        pieces.sort(key=lambda piece: (-piece.score, piece.first))
        columns = self.generation
        return Spans.of(
            [
                (
                    int(columns.chunk_documents[piece.first]),
                    int(columns.chunk_starts[piece.first]),
                    int(columns.chunk_ends[piece.end - 1]),
                )
                for piece in pieces
            ]
        )


def _exact_index(vectors_NV: Float32[np.ndarray, "N V"]) -> FaissIndex:
    index = faiss.IndexFlatIP(vectors_NV.shape[1])
    index.add(np.ascontiguousarray(vectors_NV))
    return FaissIndex(index=index, refine=None, description={"kind": "flat"})
