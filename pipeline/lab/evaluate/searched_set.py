"""Cairn's rows of the table: an encoded set in memory, ranked by the code that ranks a collection.

    encoded set ─▶ EncodedGeneration   exact indexes over the vectors, words counted as an ingest counts them
                ─▶ LocalReader ─▶ ``search.rank_queries``

So a figure of these rows is that of a search with an exact index, the options of :data:`AS_SEARCHED` and as
many documents as a run holds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from cairn.pipeline.durable import storage_errors
from cairn.pipeline.encode.documents import TokenRows
from cairn.pipeline.faiss_library import faiss
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.segments.segment import CodeColumn, DeletedRows, JoinedWords, TokenVectors
from cairn.pipeline.index.segments.words import count_languages, num_words, write_passage_terms
from cairn.pipeline.lab.evaluate.encodings import EncodedSet
from cairn.pipeline.lab.evaluate.measures import BUDGETS, RUN_DEPTH, Answer, RankedDocuments, Spans
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.evaluate.systems import Ranking as AnyRanking
from cairn.pipeline.lab.evaluate.systems import System
from cairn.pipeline.lexical.bm25 import DocumentBM25
from cairn.pipeline.lexical.tokenizer import main_languages
from cairn.pipeline.search.fusion import LateQuery
from cairn.pipeline.search.ranking import PreparedSearch, Ranking, default_window, rank_queries
from cairn.pipeline.search.reader import LocalReader
from cairn.pipeline.search.searcher import unit_vectors
from cairn.pipeline.search_options import MAX_TOP_K, SearchOptions
from cairn.pipeline.token_vectors.codebook import TokenCoder
from cairn.pipeline.vector_index.faiss_index import FaissIndex
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
    languages: tuple[str, ...]
    num_bytes: int


class EncodedGeneration(Generation):
    """An encoded set as what an ingest would publish of it, in memory: columns, vectors and words alone."""

    def __init__(self, corpus: RetrievalSet, encoded: EncodedSet, codebook: TokenCoder | None = None) -> None:
        self._corpus: RetrievalSet
        self._lines: Sequence[str] | None
        tokens = None
        if codebook is not None:
            tokens = TokenVectors(
                codebook=codebook,
                chunks=_codes(encoded.chunk_codes),
                titles=_codes(encoded.title_codes),
            )
        vars(self).update(
            layout=None,
            document_schema=pa.schema([]),
            _corpus=corpus,
            _lines=encoded.lines,
            doc_ids=pa.array(corpus.doc_ids, pa.large_string()),
            chunk_offsets=encoded.chunk_offsets,
            chunk_documents=encoded.chunk_document,
            chunk_starts=encoded.start_char,
            chunk_ends=encoded.end_char,
            documents=_exact_index(encoded.document_vectors_NV),
            chunks=_exact_index(encoded.chunk_vectors_MV),
            token_vectors=tokens,
        )

    @override
    def position_of(self, doc_id: str) -> int | None:
        place = self.doc_ids.index(doc_id).as_py()
        return None if place < 0 else place

    @property
    @override
    def num_documents(self) -> int:
        return len(self.doc_ids)

    @property
    @override
    def num_chunks(self) -> int:
        return len(self.chunk_starts)

    @override
    def fetch_documents(self, positions: Sequence[int] | np.ndarray, columns: Sequence[str]) -> pa.Table:
        assert "text" in columns, "a ranking reads no other"
        return pa.table({"text": [self._corpus.texts[position] for position in np.asarray(positions)]})

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
            of_chunks, languages_N = write_passage_terms(
                [texts],
                self.chunk_offsets,
                self.chunk_starts,
                self.chunk_ends,
                files[0],
                lines=self._lines,
            )
            of_titles, _ = write_passage_terms(
                [titles], each, np.zeros_like(lengths_N), lengths_N, files[1], languages_N
            )
            num_bytes = sum(path.stat().st_size for path in files)
        ends_M1 = np.concatenate([[0], np.cumsum(num_words(of_chunks, self.num_chunks))])
        return _Words(
            chunks=JoinedWords([(of_chunks, DeletedRows(self.num_chunks))]),
            titles=JoinedWords([(of_titles, DeletedRows(len(texts)))]),
            text_words=np.diff(ends_M1[self.chunk_offsets]).astype(np.int32),
            title_words=num_words(of_titles, len(texts)).astype(np.int32),
            languages=main_languages(count_languages(languages_N)),
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
            words.chunks,
            words.titles,
            self.chunk_documents,
            words.text_words,
            words.title_words,
        )

    @cached_property
    @override
    def query_languages(self) -> tuple[str, ...]:
        return self.words.languages


class SearchedSet:
    """Ranks the queries of an encoded set as a search of its documents does."""

    def __init__(
        self,
        judged: RetrievalSet,
        encoded: EncodedSet,
        codebook: TokenCoder | None = None,
    ) -> None:
        self.generation = EncodedGeneration(judged, encoded, codebook)
        self._queries = judged.queries
        self.encoded = encoded

    def rank(
        self, system: System, wants_passages_Q: Bool[np.ndarray, " Q"], depth: int = RUN_DEPTH
    ) -> list[Answer]:
        """Answer every query with at most ``depth`` documents; passages only where they are wanted."""
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
        return self.generation.words.num_bytes if system.reads("words") else 0

    def _rankings(
        self,
        system: System,
        options: SearchOptions,
        chosen: Int64[np.ndarray, " q"],
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
            )
            vectors = self.encoded.query_vectors_QV[block]
            stored, late = self.generation.token_vectors, None
            if system.reads("token vectors"):
                assert stored is not None, "a system that judges by token vectors was given no codebook"
                tokens = (self.encoded.query_tokens[query] for query in block.tolist())
                late = [LateQuery.of(own, stored.codebook) for own in tokens]
            yield from rank_queries(search, unit_vectors(vectors, vectors.shape[1]), late)

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


def _codes(codes: TokenRows | None) -> CodeColumn:
    assert codes is not None, "a set with a codebook was encoded without it"
    return CodeColumn(rows=codes.rows, offsets_M1=codes.offsets)


def _exact_index(vectors_NV: Float32[np.ndarray, "N V"]) -> FaissIndex:
    index = faiss.IndexFlatIP(vectors_NV.shape[1])
    index.add(np.ascontiguousarray(vectors_NV))
    return FaissIndex(index=index, refine=None, description={"kind": "flat"})
