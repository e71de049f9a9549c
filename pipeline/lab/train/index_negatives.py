"""Hard negatives of a live collection: the passages it ranks highest below a threshold under the positive.

The rule is that of :mod:`cairn.pipeline.lab.train.pair_vectors`. The collection's own model scores both
sides: a candidate by its best chunk as it is stored, the positive by its best chunk as it would be. A passage
of a document that holds a positive of the query is no negative. So negatives are what the collection really
confuses with the answer today, over all of its documents and not those of the pairs alone.

Source: NV-Embed §4.1.1 (percentage), after Moreira et al. 2024 (NV-Retriever). Differs: the model that is to
be improved is the teacher.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.collection import Collection, load_query_encoder
from cairn.pipeline.index.generation import open_latest_intact_generation
from cairn.pipeline.lab.train.pair_vectors import score_limit
from cairn.pipeline.lab.train.pairs import PairRow, TrainingPairs
from cairn.pipeline.search_options import MAX_TOP_K
from cairn.pipeline.types import Hit, ProgressListener, silent_progress

BATCH_QUERIES: Final = 32
CACHED_DOCUMENTS: Final = 4_096
PAIRS_SCHEMA: Final = pa.schema(
    [
        pa.field("query", pa.large_string(), nullable=False),
        pa.field("document", pa.large_string(), nullable=False),
        pa.field("title", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("instruction", pa.string(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("negatives", pa.list_(pa.large_string()), nullable=False),
    ]
)
"""What ``cairn train`` reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NegativesReport:
    """How many pairs were written, how many kept their own negatives, and how many got none."""

    pairs: int
    negatives: int
    pairs_with_own: int
    pairs_without: int


def write_negatives(
    collection: Collection,
    pairs: TrainingPairs,
    path: Path,
    *,
    num_negatives: int,
    max_share: float,
    margin: float,
    num_candidates: int = MAX_TOP_K,
    progress: ProgressListener = silent_progress,
) -> NegativesReport:
    """Write pairs with at most so many negatives each, hardest first, as Parquet; a pair's own are kept.

    ``num_candidates`` documents of each answer are looked at.
    """
    mine = _miner(collection, num_negatives, max_share, margin, num_candidates)
    positives: dict[str, set[str]] = defaultdict(set)
    for row in pairs.rows():
        positives[row.query].add(_plain(row.document))
    rows = list(pairs.rows())
    found: list[tuple[str, ...]] = []
    with (
        durable.storage_errors("writing the pairs"),
        durable.replacing(path) as temporary,
        pq.ParquetWriter(temporary, PAIRS_SCHEMA, compression="zstd") as writer,
    ):
        for start in range(0, len(rows), BATCH_QUERIES):
            batch = rows[start : start + BATCH_QUERIES]
            mined = iter(mine([row for row in batch if not row.negatives], positives))
            found += [row.negatives or next(mined) for row in batch]
            writer.write_table(_table(batch, found[start:]))
            progress("negatives", start + len(batch), len(rows), "pairs")
    return NegativesReport(
        pairs=len(rows),
        negatives=sum(map(len, found)),
        pairs_with_own=sum(bool(row.negatives) for row in rows),
        pairs_without=sum(not negatives for negatives in found),
    )


_Mine = Callable[[Sequence[PairRow], dict[str, set[str]]], list[tuple[str, ...]]]


def _miner(
    collection: Collection, num_negatives: int, max_share: float, margin: float, num_candidates: int
) -> _Mine:
    encoder = load_query_encoder(open_latest_intact_generation(collection.layout))

    @lru_cache(CACHED_DOCUMENTS)
    def text_of(doc_id: str) -> str:
        document = collection.read_document(doc_id)
        return "" if document is None else _plain(document.text)

    def mine(rows: Sequence[PairRow], positives: dict[str, set[str]]) -> list[tuple[str, ...]]:
        if not rows:
            return []
        query_QV = encoder.encode_queries([row.query for row in rows])
        chunks = encoder.landmark_embeddings(
            [row.document for row in rows], [row.title or None for row in rows]
        )
        best = [
            float((each.vectors_LV @ query_V).max()) for each, query_V in zip(chunks, query_QV, strict=True)
        ]
        limits = score_limit(np.array(best, np.float32), max_share, margin)
        results = collection.search_vectors(
            query_QV, top_k=num_candidates, granularity="chunk", hybrid=False, passages=1
        )
        return [
            tuple(_negatives(result.hits, limit, positives[row.query], text_of))[:num_negatives]
            for row, result, limit in zip(rows, results, limits.tolist(), strict=True)
        ]

    return mine


def _negatives(
    hits: Sequence[Hit], limit: float, positives: set[str], text_of: Callable[[str], str]
) -> Iterator[str]:
    """Yield the passages that score below the limit and stand in no document with a positive, best first."""
    for hit in hits:
        if hit.scores["chunk"] >= limit or not hit.passages:
            continue
        text = text_of(hit.doc_id)
        if not any(positive in text or text in positive for positive in positives):
            yield hit.passages[0].text


def _plain(text: str) -> str:
    return " ".join(text.split())


def _table(rows: Sequence[PairRow], negatives: Sequence[tuple[str, ...]]) -> pa.Table:
    columns = [[getattr(row, name) for row in rows] for name in PAIRS_SCHEMA.names[:-1]]
    return pa.table([*columns, list(map(list, negatives))], schema=PAIRS_SCHEMA)
