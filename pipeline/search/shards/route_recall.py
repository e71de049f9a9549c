"""How much of an answer is found when a search asks the nearest clusters' shards alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from cairn.pipeline.cluster.queries import query_side
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search.hits import read_rows
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.search.shards.fan_out import FanOut
from cairn.pipeline.search.shards.held_parts import HeldParts
from cairn.pipeline.search.shards.messages import Question
from cairn.pipeline.search.shards.placement import Sharding
from cairn.pipeline.search.shards.sharded_reader import ShardedReader
from cairn.pipeline.search_options import MAX_QUERY_BYTES
from cairn.pipeline.types import QueryEncoder

NUM_QUERIES: Final = 200
TOP_K: Final = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteRecall:
    """Recall of the ten best documents over ``queries`` queries; a query asks ``asked_share`` of shards."""

    recall_at_10: float
    queries: int
    asked_share: float


def measure_route_recall(layout: CollectionLayout, encoder: QueryEncoder, sharding: Sharding) -> RouteRecall:
    """Measure routing over the shards of a collection, all of them in this process.

    A document of the ten best of one process counts where the routed search has it among its ten. A query is
    the title of a document, or its first sentence: what it was clustered by.
    """
    held = HeldParts(layout.root)
    num_searched: list[int] = []

    def ask(questions: Sequence[Question]) -> list[Any]:
        if questions[0].method == "search":
            num_searched.append(len(questions))
        return [held.answer(each.key, each.method, each.arguments) for each in questions]

    whole = Searcher(layout, encoder)
    generation = whole.generation
    routed = Searcher(
        layout, encoder, make_reader=lambda opened: ShardedReader(opened, FanOut(opened, sharding, ask))
    )
    sampled = np.unique(np.linspace(0, generation.num_documents - 1, NUM_QUERIES).astype(np.int64))
    rows = read_rows(generation, sampled, ["title", "text"])
    sides = query_side([row["title"] for row in rows], [None] * len(rows), [row["text"] for row in rows])
    queries = [_shortened(each) for each in sides if each.strip()]
    recalls = [_recall(whole, routed, query) for query in queries]
    return RouteRecall(
        recall_at_10=float(np.mean(recalls)),
        queries=len(queries),
        asked_share=float(np.mean(num_searched)) / sharding.num_shards,
    )


def _recall(whole: Searcher, routed: Searcher, query: str) -> float:
    best, found = (
        {hit.doc_id for hit in each.search(query, top_k=TOP_K, passages=0).hits} for each in (whole, routed)
    )
    return len(best & found) / len(best)


def _shortened(query: str) -> str:
    """Cut a title that is longer than a query may be."""
    return query.encode()[:MAX_QUERY_BYTES].decode(errors="ignore")
