"""BM25 over any texts and over windows of chunks, as a collection answers it, in folders that are gone afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int64
from lancedb.index import FTS

from pipeline.durable import storage_errors
from pipeline.evaluate.encodings import EncodedSet
from pipeline.index.layout import PASSAGES_ARROW
from pipeline.index.passage_bm25 import PassageBM25
from pipeline.index.passage_terms import write_passage_terms
from pipeline.search.lexical import SCORE, bounded_words, lance_errors, match_any_word
from pipeline.types import ProgressListener

PROGRESS_QUERIES = 64
"""How many queries pass between two reports."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LexicalHits:
    """BM25's answer to each query: positions and scores, best first, ties by position; ``index_bytes`` is what the index took on disk."""

    positions: Sequence[Int64[np.ndarray, " _"]]
    scores: Sequence[Float32[np.ndarray, " _"]]
    index_bytes: int


def search_bm25(texts: Sequence[str], queries: Sequence[str], limit: int, progress: ProgressListener) -> LexicalHits:
    """Return LanceDB's best ``limit`` texts of every query; a text without a word of the query is never among them."""
    positions: list[Int64[np.ndarray, " _"]] = []
    scores: list[Float32[np.ndarray, " _"]] = []
    with tempfile.TemporaryDirectory(prefix="cairn-bm25-") as folder, lance_errors("the BM25 search"):
        rows = pa.table({"position": pa.array(np.arange(len(texts))), "text": pa.array(texts, pa.large_string())})
        table = lancedb.connect(folder).create_table("texts", rows)
        stored = _folder_bytes(Path(folder))
        table.create_index("text", config=FTS(with_position=False))
        for number, query in enumerate(queries):
            found = table.search(match_any_word(query), query_type="fts").select(["position", SCORE]).limit(limit).to_arrow()
            place, score = found.column("position").to_numpy(), found.column(SCORE).to_numpy()
            order = np.lexsort((place, -score))
            positions.append(place[order])
            scores.append(score[order])
            if number % PROGRESS_QUERIES == 0 or number == len(queries) - 1:
                progress("bm25", number + 1, len(queries), "queries")
        index_bytes = _folder_bytes(Path(folder)) - stored
    return LexicalHits(positions=positions, scores=scores, index_bytes=index_bytes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassageLexicon:
    """BM25 of any window of an encoded set's chunks; ``index_bytes`` is what its file took on disk."""

    bm25: PassageBM25
    queries: Sequence[str]
    index_bytes: int

    def scores(self, query: int, size: int) -> Float32[np.ndarray, " M"]:
        """Return BM25 of the window of ``size`` chunks that begins with each chunk, as a search takes it."""
        return self.bm25.scores(bounded_words(self.queries[query]), size)


def read_passages(texts: Sequence[str], encoded: EncodedSet, queries: Sequence[str]) -> PassageLexicon:
    """Count the words of an encoded set's chunks in the file that a collection keeps them in, which is gone afterwards."""
    offsets, start, end = encoded.chunk_offsets, encoded.start_char, encoded.end_char
    with tempfile.TemporaryDirectory(prefix="cairn-passages-") as folder, storage_errors("counting the words of passages"):
        path = Path(folder) / PASSAGES_ARROW
        terms = write_passage_terms([texts], offsets, start, end, path)  # stays mapped
        return PassageLexicon(bm25=PassageBM25(terms, offsets, start, end), queries=queries, index_bytes=path.stat().st_size)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
