"""A share of a collection as a retrieval set: judged queries where there are some, else known items."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from cairn.pipeline.errors import SourceError
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.lab.evaluate.known_items import known_items_of
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet, judge_documents, sample_set

MIN_QUERIES: Final = 20
"""With fewer no interval tells a gain from noise."""
FEW_QUERIES: Final = 100
FEW_DOCUMENTS: Final = 1_000


def small_sample_warning(num_queries: int, num_documents: int) -> str | None:
    """Return a sentence on a collection that is too small to tune well, None where it is large enough."""
    sizes = ((num_documents, FEW_DOCUMENTS, "documents"), (num_queries, FEW_QUERIES, "queries"))
    small = [f"{number:,} {what}" for number, least, what in sizes if number < least]
    if not small:
        return None
    return (
        f"{' and '.join(small)} are too few to tune with confidence: with fewer than {FEW_DOCUMENTS:,} "
        f"documents every search is fast, and of fewer than {FEW_QUERIES} queries most differences are noise"
    )


def draw_sample(
    corpus: Generation, judged: Path | None, *, name: str, max_documents: int, max_queries: int, seed: int
) -> RetrievalSet:
    """Draw documents of collection ``name`` and queries that find them, with all judged documents.

    ``judged`` is a folder with queries and judgements of the collection's own ids. Raises
    :class:`SourceError` where fewer than :data:`MIN_QUERIES` queries are left.
    """
    limit = corpus.num_documents if judged else min(max_documents, corpus.num_documents)
    positions = np.sort(np.random.default_rng(seed).permutation(corpus.num_documents)[:limit])
    rows = corpus.fetch_documents(positions, ["doc_id", "title", "text"])
    doc_ids = rows.column("doc_id").to_pylist()
    titles, texts = ([each or "" for each in rows.column(name).to_pylist()] for name in ("title", "text"))
    if judged:
        whole = judge_documents(judged, doc_ids, titles, texts)
        drawn = sample_set(whole, max_queries=max_queries, max_documents=max_documents, seed=seed)
    else:
        drawn = known_items_of(f"{name} (known items)", doc_ids, titles, texts, max_queries, seed, {})
    if len(drawn.query_ids) < MIN_QUERIES:
        raise SourceError(
            f"a collection must give {MIN_QUERIES} queries to be tuned with, got {len(drawn.query_ids)}; "
            "judge more queries, or take a collection of more documents"
        )
    return drawn
