"""Passages judged again by a model that reads query and passage together: optional, slower, often better.

    search, wider ─▶ passages ─▶ score(query, passage) ─▶ documents by their best passage, cut to top_k,
                                                          or the best passages within max_characters

Reranking cannot return documents that the first ranking missed, so it scores at least
:data:`RERANK_DOCUMENTS` documents. The model arrives as a protocol: this package loads none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.search.ranking import ShownTexts, budget_warning
from cairn.pipeline.search_options import SearchOptions
from cairn.pipeline.types import Hit, Passage, Reranker, SearchResult

RERANK_DOCUMENTS: Final = 30
"""Documents whose passages are judged, where fewer are asked for."""


def widened(asked: SearchOptions) -> SearchOptions:
    """Return the options that find what is to be judged.

    Options that look at scores or cut the answer are lifted here, and :func:`reranked` applies them.
    """
    if asked.offset:
        raise ConfigError(
            f"reranking must come without an offset, got {asked.offset}; it judges the first page"
        )
    if asked.mmr is not None:
        raise ConfigError(f"reranking must come without mmr, got {asked.mmr:g}; it would undo the order")
    candidates = asked.max_candidates
    return replace(
        asked,
        top_k=max(asked.top_k, RERANK_DOCUMENTS),
        passages=max(asked.passages, 1),
        max_candidates=None if candidates is None else max(candidates, RERANK_DOCUMENTS),
        max_characters=None,
    )


def reranked(result: SearchResult, reranker: Reranker, asked: SearchOptions) -> SearchResult:
    """Order an answer to :func:`widened` options by the model's scores, and cut it to what was asked for.

    A passage's ``score`` is the model's, a document's that of its best passage; both have it among their
    parts as ``rerank``. Ties keep their order.
    """
    scores = _scores(result, reranker)
    judged = [_judged(hit, [next(scores) for _ in hit.passages]) for hit in result.hits if hit.passages]
    warnings = [*result.warnings]
    if asked.max_characters is not None:
        sizes = [passage.end_char - passage.start_char for hit in judged for passage in hit.passages]
        judged = _within(judged, asked.max_characters, asked.top_k)
        if sizes and not judged:
            warnings.append(budget_warning(asked.max_characters, min(sizes)))
    else:
        judged = [replace(hit, passages=hit.passages[: asked.passages]) for hit in judged]
    hits = sorted(judged, key=lambda hit: -hit.score)[: asked.top_k]
    return replace(result, hits=tuple(hits), warnings=tuple(warnings))


def _scores(result: SearchResult, reranker: Reranker) -> Iterator[float]:
    texts = [passage.text for hit in result.hits for passage in hit.passages]
    scores = np.asarray(reranker.score(result.query, texts) if texts else np.zeros(0))
    if scores.shape != (len(texts),) or not np.isfinite(scores).all():
        raise ModelError(
            "the rerank model must give one finite score a passage, got NaN, infinity or another number "
            "of scores"
        )
    return iter(scores.tolist())


def _judged(hit: Hit, scores: list[float]) -> Hit:
    passages = [
        replace(passage, score=score, scores={**passage.scores, "rerank": score})
        for passage, score in zip(hit.passages, scores, strict=True)
    ]
    ranked = tuple(sorted(passages, key=lambda passage: -passage.score))
    return replace(
        hit, score=ranked[0].score, scores={**hit.scores, "rerank": ranked[0].score}, passages=ranked
    )


def _within(hits: list[Hit], max_characters: int, max_documents: int) -> list[Hit]:
    """Keep the best passages of all documents that fit the budget together.

    One that does not fit is passed over for a shorter one, and one that repeats another document for others.
    """
    kept: dict[int, list[Passage]] = {}
    left, shown = max_characters, ShownTexts()
    passages = [(passage, place) for place, hit in enumerate(hits) for passage in hit.passages]
    for passage, place in sorted(passages, key=lambda each: -each[0].score):
        size = passage.end_char - passage.start_char
        has_room = size <= left and (place in kept or len(kept) < max_documents)
        if has_room and shown.takes(place, passage.text):
            kept.setdefault(place, []).append(passage)
            left -= size
    return [
        replace(hits[place], passages=tuple(chosen), score=chosen[0].score) for place, chosen in kept.items()
    ]
