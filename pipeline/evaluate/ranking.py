"""Rank all documents and passages of an encoded set for its queries: exactly, otherwise as a search does.

    ranking      documents                                     passages
    document     cosine of the document vector                 mean of their cosine and their document's
    chunk        cosine of the best chunk                      by their cosine
    fused        weighted mean of both                         mean of their cosine and their document's score
    fused+bm25   fused, BM25 (titles too), best passage's BM25 the same, their cosine fused with BM25
    bm25         BM25 of the document                          BM25 of the chunk
    rrf          Σ 1 / (60 + rank) of BM25 and of best chunks  the same over chunks

Candidates, weights, scales and scores are those of ``pipeline.search``. Reciprocal rank fusion: Cormack,
Clarke & Büttcher 2009.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int64

from pipeline.evaluate.encodings import EncodedSet
from pipeline.evaluate.evidence import BUDGETS, Spans
from pipeline.evaluate.lexical import LexicalHits, Lexicon
from pipeline.evaluate.measures import RUN_DEPTH, RankedDocuments, best_positions, id_ranks
from pipeline.evaluate.passages import Passages, best_passages, window_passages
from pipeline.evaluate.systems import Ranking, System
from pipeline.index.generation import sampled_chunks
from pipeline.search.fusion import document_scores, passage_scores
from pipeline.search.windows import default_window
from pipeline.search_options import SearchOptions

RRF_K = 60
NUM_CANDIDATES = SearchOptions(top_k=RUN_DEPTH).num_candidates
"""Length of each list that feeds a fusion: that of a search for as many documents as a run holds."""
AS_SEARCHED: Final[Mapping[Ranking, SearchOptions]] = {
    "document": SearchOptions(granularity="document", hybrid=False),
    "chunk": SearchOptions(granularity="chunk", hybrid=False),
    "fused": SearchOptions(granularity="both", hybrid=False),
    "fused+bm25": SearchOptions(granularity="both", hybrid=True),
}
"""The rankings that a search offers, and the options that ask for them; the others are baselines."""
BLOCK_QUERIES = 32
"""Queries scored at once: 15 MB at 120,000 chunks."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """One query's ranking and, where asked for, the passages a reader meets, best first."""

    documents: RankedDocuments
    passages: Spans | None


class SetRanker:
    """Ranks with one encoding; what BM25 answers arrives made, None where no system needs it."""

    def __init__(
        self,
        doc_ids: Sequence[str],
        encoded: EncodedSet,
        document_bm25: LexicalHits | None,
        chunk_bm25: LexicalHits | None,
        lexicon: Lexicon | None,
    ) -> None:
        self._id_rank_N = id_ranks(doc_ids)
        self._encoded = encoded
        self._document_bm25 = document_bm25
        self._chunk_bm25 = chunk_bm25
        self._lexicon = lexicon
        self._mean_chunk_V = encoded.chunk_vectors_MV[sampled_chunks(len(encoded.chunk_vectors_MV))].mean(
            axis=0
        )

    def rank(
        self, system: System, wants_passages_Q: Bool[np.ndarray, " Q"], depth: int = RUN_DEPTH
    ) -> list[Answer]:
        """Answer every query with at most ``depth`` documents; passages only where they are wanted."""
        passages = window_passages(self._encoded, system.window_chunks)
        answers: list[Answer] = []
        for start in range(0, len(wants_passages_Q), BLOCK_QUERIES):
            queries_BV = self._encoded.query_vectors_QV[start : start + BLOCK_QUERIES]
            document_BN = queries_BV @ self._encoded.document_vectors_NV.T
            chunk_BM = queries_BV @ self._encoded.chunk_vectors_MV.T
            best_BN = np.maximum.reduceat(chunk_BM, self._encoded.chunk_offsets[:-1], axis=1)
            passage_BP = chunk_BM if system.window_chunks == 1 else queries_BV @ passages.vectors_PV.T
            for query, *cosines in zip(
                range(start, start + len(queries_BV)), document_BN, best_BN, passage_BP, strict=True
            ):
                own = _Cosines(document_N=cosines[0], best_N=cosines[1], passage_P=cosines[2])
                answers += [
                    self._answer(system, query, own, passages if wants_passages_Q[query] else None, depth)
                ]
        return answers

    def _answer(
        self, system: System, query: int, cosines: _Cosines, passages: Passages | None, depth: int
    ) -> Answer:
        if system.ranking == "fused+bm25":
            return self._hybrid_answer(system, query, cosines, passages, depth)
        scores_N = self._document_scores(system, query, cosines)
        ranked = RankedDocuments.best(scores_N, self._id_rank_N, depth)
        if passages is None:
            return Answer(documents=ranked, passages=None)
        if system.needs_chunk_bm25:
            scores_P = self._lexical_passage_scores(system, query, cosines)
        else:
            scores_P = passage_scores(
                AS_SEARCHED[system.ranking], cosines.passage_P, scores_N[passages.document_P]
            )
        return Answer(documents=ranked, passages=best_passages(scores_P, passages, max(BUDGETS)))

    def _document_scores(self, system: System, query: int, cosines: _Cosines) -> Float64[np.ndarray, " N"]:
        """Score every document; minus infinity where a document is no candidate."""
        if system.ranking in AS_SEARCHED:
            own = {"document": cosines.document_N, "chunk": cosines.best_N}
            return document_scores(AS_SEARCHED[system.ranking], own)[0]
        found, bm25 = _hits(self._document_bm25, query)
        if system.ranking == "bm25":
            return _spread(found, bm25, len(cosines.document_N))
        dense_list = RankedDocuments.best(cosines.best_N, self._id_rank_N, NUM_CANDIDATES).positions
        return _rrf([found[:NUM_CANDIDATES], dense_list], len(cosines.document_N))

    def _hybrid_answer(
        self, system: System, query: int, cosines: _Cosines, passages: Passages | None, depth: int
    ) -> Answer:
        """Answer as a hybrid search does, from its candidates and with its fusion."""
        assert self._lexicon is not None, "a system that ranks with BM25 of passages was given none"
        options, firsts = AS_SEARCHED[system.ranking], self._encoded.chunk_offsets[:-1]
        words_M = self._lexicon.passages(query, default_window(system.encoding.encoder.landmark_interval))
        words_N = np.maximum.reduceat(words_M, firsts)
        found, bm25 = (hits[:NUM_CANDIDATES] for hits in _hits(self._lexicon.documents, query))
        by_words = self._encoded.chunk_document[
            [chunk for chunk in _top(words_M, NUM_CANDIDATES) if words_M[chunk] > 0.0]
        ]
        by_vector = (
            RankedDocuments.best(scores, self._id_rank_N, NUM_CANDIDATES).positions
            for scores in (cosines.document_N, cosines.best_N)
        )
        candidates = np.unique(np.concatenate([found, by_words, *by_vector]))
        bm25_N = _spread(found, bm25, len(cosines.document_N), 0.0)
        scores_N = np.full(len(cosines.document_N), -np.inf)
        scores_N[candidates], fusion = document_scores(
            options,
            {"document": cosines.document_N[candidates], "chunk": cosines.best_N[candidates]},
            bm25_N=_any(bm25_N[candidates]),
            passage_bm25_N=_any(words_N[candidates]),
            average_chunk=float(self._mean_chunk_V @ self._encoded.query_vectors_QV[query]),
        )
        ranked = RankedDocuments.best(scores_N, self._id_rank_N, depth)
        if passages is None:
            return Answer(documents=ranked, passages=None)
        own_P = cosines.passage_P
        if fusion is not None:
            own_M = self._lexicon.passages(query, system.window_chunks)
            fusion = fusion.with_windows(_any(own_M))
            own_P = fusion.passages(cosines.passage_P, own_M[passages.first_chunk_P])
        scores_P = passage_scores(options, own_P, scores_N[passages.document_P])
        return Answer(documents=ranked, passages=best_passages(scores_P, passages, max(BUDGETS)))

    def _lexical_passage_scores(
        self, system: System, query: int, cosines: _Cosines
    ) -> Float64[np.ndarray, " P"]:
        found, bm25 = _hits(self._chunk_bm25, query)
        if system.ranking == "bm25":
            return _spread(found, bm25, len(cosines.passage_P))
        return _rrf([found[:NUM_CANDIDATES], _top(cosines.passage_P, NUM_CANDIDATES)], len(cosines.passage_P))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Cosines:
    """One query against every document vector, every document's best chunk and every passage."""

    document_N: Float32[np.ndarray, " N"]
    best_N: Float32[np.ndarray, " N"]
    passage_P: Float32[np.ndarray, " P"]


def _any(bm25_N: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"] | None:
    """Return BM25 scores, None where no word was found."""
    return bm25_N if bm25_N.any() else None


def _hits(hits: LexicalHits | None, query: int) -> tuple[Int64[np.ndarray, " A"], Float32[np.ndarray, " A"]]:
    assert hits is not None, "a system that ranks with BM25 was given none"
    return hits.positions[query], hits.scores[query]


def _spread(
    found: Int64[np.ndarray, " A"], scores: Float32[np.ndarray, " A"], count: int, missing: float = -np.inf
) -> Float64[np.ndarray, " X"]:
    spread = np.full(count, missing)
    spread[found] = scores
    return spread


def _rrf(rankings: Sequence[Int64[np.ndarray, " _"]], count: int) -> Float64[np.ndarray, " X"]:
    scores = np.zeros(count)
    for ranking in rankings:
        scores[ranking] += 1.0 / (RRF_K + 1 + np.arange(len(ranking)))
    return np.where(scores > 0.0, scores, -np.inf)


def _top(scores: Float[np.ndarray, " X"], limit: int) -> Int64[np.ndarray, " K"]:
    few = best_positions(scores, limit)
    return few[np.argsort(-scores[few], kind="stable")][:limit]
