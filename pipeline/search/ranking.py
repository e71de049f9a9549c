"""From query vectors to ranked documents: nominate, score exactly, fuse.

``document`` ranks by the cosine of the document vector, ``chunk`` by that of the best stored chunk, ``both``
by their weighted mean. ``hybrid`` combines that dense score with BM25 (``fusion`` says how): LanceDB's of
title and text, and that of its best passage. A query none of whose words is indexed is answered by the dense
score alone. Scores are cosines in dense answers; in hybrid ones the best possible is 1. No text is read here.

    document                                       passage
    ¼ cosine ┐                                     cosine ┐
             ├─ dense ─┐                                  ├─ own ─┐
    ¾ best chunk ┘     ├─ score  ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ BM25 ┘       ├─ ½ own + ½ its document's score
    ½ BM25 ┐           │       └──────────────────────────────────┘
           ├─ lexical ─┘
    ½ best passage's BM25 ┘

The chunk part is the best single landmark whatever the size of the passages: the nominating index ranks by
just that, and it finds more. nDCG@10 of ``both`` with the best landmark / the best sliding pair
(all-MiniLM-L6-v2, landmarks of 64 tokens): SQuAD articles .960 / .958, QMSum, 50 meetings, .510 / .498,
Cranfield .476 / .435, SQuAD passages .817 / .790; hybrid, mean of the four, .762 / .757.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Float64, Int64

from pipeline.search.candidates import (
    best_of_documents,
    merge_nominees,
    nominate_by_chunk,
    nominate_by_document,
    score_chunks,
    score_documents,
    score_windows,
)
from pipeline.search.fusion import Fusion, Scale, best_first, passage_scores, weighted_mean
from pipeline.search.passages import ChosenPassage, ScoredWindows, best_of_each, best_within
from pipeline.search.plan import Plan, ReadAhead, WordScores, read_words

LEXICAL_PARTS = ("bm25", "passage_bm25")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """The returned documents of one query, best first: everything a hit needs but its columns.

    ``parts`` are the scores a document's score was made of; ``passages`` is empty where none were asked for.
    """

    positions: Int64[np.ndarray, " K"]
    scores: Float64[np.ndarray, " K"]
    parts: Sequence[Mapping[str, float]]
    passages: Sequence[Sequence[ChosenPassage]]


NOTHING = Ranking(positions=np.empty(0, dtype=np.int64), scores=np.empty(0), parts=(), passages=())


def rank_queries(plan: Plan, query_vectors: Float32[np.ndarray, "Q V"], ahead: ReadAhead) -> list[Ranking]:
    """Rank documents for each query vector (L2-normalised), using BM25 where the text is known and ``hybrid`` asks for it."""
    allowed = ahead.allowed
    if plan.generation.num_documents == 0 or (allowed is not None and len(allowed) == 0):
        return [NOTHING] * len(query_vectors)
    rankings: list[Ranking] = []
    for index, lists in enumerate(_nominate(plan, query_vectors, allowed)):
        words = read_words(plan, allowed, index) if index else ahead.words
        rankings.append(_rank(plan, _Question(vector=query_vectors[index], words=words), lists))
    return rankings


def _nominate(
    plan: Plan, query_vectors: Float32[np.ndarray, "Q V"], allowed: Int64[np.ndarray, " A"] | None
) -> list[tuple[Int64[np.ndarray, " _"], ...]]:
    """Return the dense candidate lists of each query."""
    generation, options = plan.generation, plan.options
    num_allowed = generation.num_documents if allowed is None else len(allowed)
    lists: list[list[Int64[np.ndarray, " _"]]] = []
    if options.granularity != "chunk":
        lists.append(
            nominate_by_document(generation, query_vectors, min(options.num_candidates, num_allowed), allowed)
        )
    if options.granularity != "document":
        lists.append(
            nominate_by_chunk(
                generation,
                query_vectors,
                options.num_candidates,
                min(options.min_documents, num_allowed),
                allowed,
            )
        )
    return list(zip(*lists, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """One query of a call: its vector, and its BM25 where that has a say."""

    vector: Float32[np.ndarray, " V"]
    words: WordScores | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidates:
    """All candidates of one query with their scores; ``fusion`` is None where no BM25 had a say."""

    positions: Int64[np.ndarray, " N"]
    scores: Float64[np.ndarray, " N"]
    parts: Mapping[str, Float32[np.ndarray, " N"]]
    fusion: Fusion | None


def _rank(plan: Plan, question: _Question, nominees: Sequence[Int64[np.ndarray, " _"]]) -> Ranking:
    candidates = _score(plan, question, nominees)
    if plan.options.max_characters is None:
        last = plan.options.offset + plan.options.top_k
        best = _best_first(plan, candidates, _at_least_nth(candidates.scores, last))[
            plan.options.offset : last
        ]
        passages = _passages_of_each(plan, question, candidates, best)
    else:
        found = _passages_within_budget(plan, question, candidates, plan.options.max_characters)
        best = _best_first(plan, candidates, np.array(sorted(found), np.int64))
        passages = [found[index] for index in best.tolist()]
    return Ranking(
        positions=candidates.positions[best],
        scores=candidates.scores[best],
        parts=[_parts_of(candidates.parts, index) for index in best.tolist()],
        passages=passages,
    )


def _at_least_nth(scores_N: Float64[np.ndarray, " N"], count: int) -> Int64[np.ndarray, " _"]:
    """Return the indices of the ``count`` best scores and of what ties with the last of them."""
    return (
        np.flatnonzero(scores_N >= np.partition(scores_N, -count)[-count])
        if len(scores_N) > count
        else np.arange(len(scores_N))
    )


def _best_first(plan: Plan, candidates: _Candidates, few: Int64[np.ndarray, " A"]) -> Int64[np.ndarray, " A"]:
    """Order some candidates by score, ties by id."""
    doc_ids = plan.generation.doc_ids.take(pa.array(candidates.positions[few])).to_pylist()
    return few[best_first(candidates.scores[few], doc_ids, len(few))]


def _score(plan: Plan, question: _Question, nominees: Sequence[Int64[np.ndarray, " _"]]) -> _Candidates:
    generation, options, words = plan.generation, plan.options, question.words
    positions = merge_nominees(
        generation, [*nominees, *(words.nominees if words else ())], options.min_documents
    )
    parts: dict[str, Float32[np.ndarray, " N"]] = {}
    if options.granularity != "chunk":
        parts["document"] = score_documents(generation, positions, question.vector)
    if options.granularity != "document":
        parts["chunk"] = score_chunks(generation, positions, question.vector).best()
    scores = weighted_mean(
        list(parts.values()), [options.weight(part) for part in parts] if len(parts) > 1 else [1.0]
    )
    if words is not None and len(words.documents):
        parts["bm25"] = _spread(positions, words.documents, words.scores)
    if words is not None and words.passages is not None:
        parts["passage_bm25"] = best_of_documents(generation, words.passages, positions)
    fusion = _fusion(plan, question, scores, parts)
    if fusion is not None:
        scores = fusion.documents(scores, parts.get("bm25"), parts.get("passage_bm25"))
    return _Candidates(positions=positions, scores=scores, parts=parts, fusion=fusion)


def _fusion(
    plan: Plan,
    question: _Question,
    dense_N: Float64[np.ndarray, " N"],
    parts: Mapping[str, Float32[np.ndarray, " N"]],
) -> Fusion | None:
    scales = {part: Scale.of(parts[part], floor=0.0) for part in LEXICAL_PARTS if part in parts}
    if not scales:
        return None
    return Fusion(
        dense=Scale.of(dense_N, floor=float(plan.generation.mean_chunk_vector @ question.vector)),
        bm25=scales.get("bm25"),
        passage_bm25=scales.get("passage_bm25"),
        dense_weight=plan.options.weight("document") + plan.options.weight("chunk"),
        bm25_weight=plan.options.weight("bm25"),
    )


def _parts_of(parts: Mapping[str, Float32[np.ndarray, " N"]], index: int) -> dict[str, float]:
    """Return one document's parts; without those of BM25 where no word was found."""
    return {
        part: float(scores[index])
        for part, scores in parts.items()
        if part not in LEXICAL_PARTS or scores[index] > 0.0
    }


def _passages_of_each(
    plan: Plan, question: _Question, candidates: _Candidates, best: Int64[np.ndarray, " K"]
) -> Sequence[Sequence[ChosenPassage]]:
    if not plan.options.passages:
        return [()] * len(best)
    scored = _score_passages(plan, question, candidates, best)
    return best_of_each(scored, len(best), plan.window, plan.options.passages)


def _passages_within_budget(
    plan: Plan, question: _Question, candidates: _Candidates, max_characters: int
) -> Mapping[int, Sequence[ChosenPassage]]:
    scored = _score_passages(plan, question, candidates, np.arange(len(candidates.positions)))
    return best_within(
        scored, plan.generation.chunk_starts, plan.generation.chunk_ends, max_characters, plan.options.top_k
    )


def _score_passages(
    plan: Plan, question: _Question, candidates: _Candidates, chosen: Int64[np.ndarray, " K"]
) -> ScoredWindows:
    """Score all windows of some candidates; ranked by chunks alone, a passage's document does not count."""
    windows = score_windows(plan.generation, candidates.positions[chosen], question.vector, plan.window)
    parts, own, fusion = {"chunk": windows.scores}, windows.scores, candidates.fusion
    if fusion is not None:
        bm25 = question.words.windows if question.words else None
        if plan.window != plan.ranking_window:
            fusion = replace(fusion, passage_bm25=None if bm25 is None else Scale.of(bm25, floor=0.0))
        if bm25 is not None:
            parts["bm25"] = bm25[windows.first]
        own = fusion.passages(windows.scores, parts.get("bm25"))
    documents = None if plan.options.granularity == "chunk" else candidates.scores[chosen][windows.owner]
    return ScoredWindows(windows=windows, scores=passage_scores(own, documents), parts=parts)


def _spread(
    positions: Int64[np.ndarray, " N"], found: Int64[np.ndarray, " A"], scores: Float32[np.ndarray, " A"]
) -> Float32[np.ndarray, " N"]:
    """Lay the scores of some documents over ascending ``positions``; 0 where there is none."""
    spread = np.zeros(len(positions), dtype=np.float32)
    places = np.minimum(np.searchsorted(positions, found), len(positions) - 1)
    is_kept = positions[places] == found
    spread[places[is_kept]] = scores[is_kept]
    return spread
