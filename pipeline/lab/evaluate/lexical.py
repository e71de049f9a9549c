"""BM25 over any texts and over windows of chunks, as a collection answers it, in temporary folders."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import lance.query
import lancedb
import numpy as np
import pyarrow as pa
from cairn.pipeline.durable import storage_errors
from cairn.pipeline.index.bm25 import DocumentBM25, PassageBM25
from cairn.pipeline.index.names import PASSAGES_ARROW, TITLES_ARROW
from cairn.pipeline.index.passage_terms import num_words, write_passage_terms
from cairn.pipeline.index.segments.joined import JoinedWords
from cairn.pipeline.index.segments.segment import none_deleted
from cairn.pipeline.index.tables import lance_errors
from cairn.pipeline.lab.evaluate.encodings import EncodedSet
from cairn.pipeline.search.lexical import bounded_words
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float32, Int64
from lancedb.index import FTS

PROGRESS_QUERIES = 64
"""How many queries pass between two reports."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LexicalHits:
    """BM25's answer to each query: positions and scores, best first, ties by position.

    ``index_bytes`` is what the index took on disk.
    """

    positions: Sequence[Int64[np.ndarray, " _"]]
    scores: Sequence[Float32[np.ndarray, " _"]]
    index_bytes: int


def search_bm25(
    texts: Sequence[str],
    queries: Sequence[str],
    limit: int,
    progress: ProgressListener,
    titles: Sequence[str] | None = None,
) -> LexicalHits:
    """Return LanceDB's best ``limit`` texts of every query.

    With ``titles``, title and text are scored together, as a search scores documents. A text without a word
    of the query is never among them.
    """
    if titles is not None:
        return _search_documents(texts, titles, queries, limit, progress)
    columns = {"text": pa.array(texts, pa.large_string())}
    positions: list[Int64[np.ndarray, " _"]] = []
    scores: list[Float32[np.ndarray, " _"]] = []
    with tempfile.TemporaryDirectory(prefix="cairn-bm25-") as folder, lance_errors("the BM25 search"):
        table = lancedb.connect(folder).create_table(
            "texts", pa.table({"position": pa.array(np.arange(len(texts))), **columns})
        )
        stored = _folder_bytes(Path(folder))
        for column in columns:
            table.create_index(column, config=FTS(with_position=False))
        dataset = lance.dataset(f"{folder}/texts.lance")
        for number, query in enumerate(queries):
            scanner = dataset.scanner(
                ["position", "_score"], full_text_query=_any_word(query, list(columns)), limit=limit
            )
            found = scanner.to_table()
            place, score = found.column("position").to_numpy(), found.column("_score").to_numpy()
            order = np.lexsort((place, -score))
            positions.append(place[order])
            scores.append(score[order])
            if number % PROGRESS_QUERIES == 0 or number == len(queries) - 1:
                progress("bm25", number + 1, len(queries), "queries")
        index_bytes = _folder_bytes(Path(folder)) - stored
    return LexicalHits(positions=positions, scores=scores, index_bytes=index_bytes)


def _search_documents(
    texts: Sequence[str],
    titles: Sequence[str],
    queries: Sequence[str],
    limit: int,
    progress: ProgressListener,
) -> LexicalHits:
    """Return the best documents of every query by title and text, ties by position."""
    positions: list[Int64[np.ndarray, " _"]] = []
    scores: list[Float32[np.ndarray, " _"]] = []
    with tempfile.TemporaryDirectory(prefix="cairn-bm25-") as folder, storage_errors("counting words"):
        each, none = np.arange(len(texts) + 1), none_deleted(len(texts))
        files = [Path(folder) / name for name in (PASSAGES_ARROW, TITLES_ARROW)]
        fields: list[pa.RecordBatch] = []
        for path, column in zip(files, (texts, titles), strict=True):
            ends = np.fromiter(map(len, column), np.int64, len(column))
            fields.append(write_passage_terms([column], each, np.zeros_like(ends), ends, path))
        text_words, title_words = (num_words(terms, len(texts)).astype(np.int32) for terms in fields)
        text, title = (JoinedWords([(terms, none)]) for terms in fields)
        bm25 = DocumentBM25(text, title, each[:-1], text_words, title_words)
        for number, query in enumerate(queries):
            scores_N = bm25.scores(bounded_words(query))
            found = np.flatnonzero(scores_N > 0.0)
            found = found[np.lexsort((found, -scores_N[found]))][:limit]
            positions.append(found)
            scores.append(scores_N[found])
            if number % PROGRESS_QUERIES == 0 or number == len(queries) - 1:
                progress("bm25", number + 1, len(queries), "queries")
        index_bytes = sum(path.stat().st_size for path in files)
    return LexicalHits(positions=positions, scores=scores, index_bytes=index_bytes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lexicon:
    """BM25 of an encoded set: of documents, title and text, and of any window of chunks.

    ``index_bytes`` is what both took on disk.
    """

    documents: LexicalHits
    bm25: PassageBM25
    queries: Sequence[str]
    index_bytes: int

    def passages(self, query: int, size: int) -> Float32[np.ndarray, " M"]:
        """Return BM25 of the window of ``size`` chunks that begins with each chunk, as a search takes it."""
        return self.bm25.scores(bounded_words(self.queries[query]), size)


def read_lexicon(
    texts: Sequence[str], encoded: EncodedSet, queries: Sequence[str], documents: LexicalHits
) -> Lexicon:
    """Count the words of an encoded set's chunks in the file format of a collection, in a temporary file."""
    offsets, start, end = encoded.chunk_offsets, encoded.start_char, encoded.end_char
    with (
        tempfile.TemporaryDirectory(prefix="cairn-passages-") as folder,
        storage_errors("counting the words of passages"),
    ):
        path = Path(folder) / PASSAGES_ARROW
        terms = write_passage_terms([texts], offsets, start, end, path)  # the file stays mapped
        bm25 = PassageBM25(JoinedWords([(terms, none_deleted(len(start)))]), offsets, start, end)
        return Lexicon(
            documents=documents,
            bm25=bm25,
            queries=queries,
            index_bytes=documents.index_bytes + path.stat().st_size,
        )


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _any_word(query: str, columns: Sequence[str]) -> Any:
    """Return the full-text query for any of the words in any of the columns; scores of columns are added."""
    matches = [lance.query.MatchQuery(bounded_words(query), column) for column in columns]
    return (
        matches[0]
        if len(matches) == 1
        else lance.query.BooleanQuery([(lance.query.Occur.SHOULD, match) for match in matches])
    )
