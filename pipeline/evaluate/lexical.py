"""BM25 over any texts, as a collection answers it: LanceDB's full-text index with its defaults, in a folder that is gone afterwards."""

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

from pipeline.search.lexical import SCORE, lance_errors, match_any_word
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
    """Return the best ``limit`` texts of every query; a text without a word of the query is never among them."""
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


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
