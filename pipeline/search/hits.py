"""Rankings become hits: columns of the returned documents, read once, and passages cut from their text.

Metadata keeps Python values (dates stay dates); the command line and the HTTP API turn them into JSON.
Nanoseconds, for which Python has no type, become microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.search.filters import table_errors
from cairn.pipeline.search.highlights import Explanation
from cairn.pipeline.search.passages import ChosenPassage, joined
from cairn.pipeline.search.ranking import PreparedSearch, Ranking
from cairn.pipeline.types import RESERVED_COLUMNS, Hit, Passage


def make_hits(
    search: PreparedSearch,
    rankings: Sequence[Ranking],
    explanations: Sequence[Explanation | None] | None = None,
) -> list[tuple[Hit, ...]]:
    """Return the hits of each ranking, in its order; a document that several rankings return is read once.

    Passages of a query with an explanation have highlights. Those within a budget that stand side by side
    become one.
    """
    if search.options.max_characters is not None:
        rankings = [
            replace(ranking, passages=[joined(pieces) for pieces in ranking.passages]) for ranking in rankings
        ]
    metadata = [name for name in search.generation.document_schema.names if name not in RESERVED_COLUMNS]
    columns = ["doc_id", "title", *(["text"] if search.options.passages else []), *metadata]
    positions = np.concatenate([ranking.positions for ranking in rankings])
    rows = iter(read_rows(search.generation, positions, columns) if len(positions) else [])
    return [
        _hits_of(search.generation, ranking, [next(rows) for _ in ranking.positions], metadata, explanation)
        for ranking, explanation in zip(rankings, explanations or [None] * len(rankings), strict=True)
    ]


def _hits_of(
    generation: Generation,
    ranking: Ranking,
    rows: Sequence[dict[str, Any]],
    metadata: Sequence[str],
    explanation: Explanation | None,
) -> tuple[Hit, ...]:
    passages = [
        _cut(generation, chosen, row["text"])
        for chosen_of_document, row in zip(ranking.passages, rows, strict=True)
        for chosen in chosen_of_document
    ]
    if explanation is not None and passages:
        found = explanation.highlights(
            list(chain.from_iterable(ranking.passages)),
            [passage.text for passage in passages],
            [row["title"] or "" for chosen, row in zip(ranking.passages, rows, strict=True) for _ in chosen],
        )
        passages = [
            replace(passage, highlights=each.of_text, title_highlights=each.of_title)
            for passage, each in zip(passages, found, strict=True)
        ]
    left = iter(passages)
    return tuple(
        Hit(
            doc_id=row["doc_id"],
            title=row["title"],
            score=_within_bounds(float(score)),
            scores=parts,
            metadata={name: row[name] for name in metadata},
            passages=tuple(islice(left, len(chosen))),
        )
        for row, score, parts, chosen in zip(
            rows, ranking.scores, ranking.parts, ranking.passages, strict=True
        )
    )


def _cut(generation: Generation, passage: ChosenPassage, text: str) -> Passage:
    start_char, end_char = (
        int(generation.chunk_starts[passage.first]),
        int(generation.chunk_ends[passage.end - 1]),
    )
    return Passage(
        start_char=start_char,
        end_char=end_char,
        text=text[start_char:end_char],
        score=_within_bounds(passage.score),
        scores=passage.parts,
    )


def _within_bounds(score: float) -> float:
    """Return a score as answers have it, from 0 to 1.

    A window can come nearer to the query than any of its landmarks, whose best is 1. What is less like the
    query than an average chunk falls below 0.
    """
    return min(max(score, 0.0), 1.0)


def read_rows(generation: Generation, positions: np.ndarray, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return columns of the documents at these positions as Python values, in the order asked."""
    with table_errors("reading the answer's documents", generation.layout):
        rows = generation.fetch_documents(positions, columns)
    for index, field in enumerate(rows.schema):
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
            rows = rows.set_column(
                index, field.name, rows.column(index).cast(pa.timestamp("us", field.type.tz), safe=False)
            )
    return rows.to_pylist()
