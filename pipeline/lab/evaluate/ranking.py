"""Rank all documents and passages of an encoded set for its queries: exactly, otherwise as a search does.

    ranking      documents                                     passages
    document     cosine of the document vector                 mean of their cosine and their document's
    chunk        cosine of the best chunk                      by their cosine
    fused        weighted mean of both                         mean of their cosine and their document's score
    fused+bm25   fused, BM25 (titles too), best passage's BM25 the same, their cosine fused with BM25
    late         fused, MaxSim of the best windows, twice      the same, with their own MaxSim
    late+bm25    fused+bm25, the same                          the same
    bm25         BM25 of the document                          BM25 of the chunk
    rrf          Σ 1 / (60 + rank) of BM25 and of best chunks  the same over chunks

Candidates, weights, scales and scores are those of ``cairn.pipeline.search``. Reciprocal rank fusion:
Cormack, Clarke & Büttcher 2009.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from cairn.pipeline.index.generation import sampled_chunks
from cairn.pipeline.index.token_file import CodeColumn, TokenVectors
from cairn.pipeline.lab.evaluate.encodings import EncodedSet
from cairn.pipeline.lab.evaluate.evidence import BUDGETS, Spans
from cairn.pipeline.lab.evaluate.lexical import LexicalHits, Lexicon
from cairn.pipeline.lab.evaluate.measures import RUN_DEPTH, RankedDocuments, best_positions, id_ranks
from cairn.pipeline.lab.evaluate.passages import Passages, best_passages, window_passages
from cairn.pipeline.lab.evaluate.systems import Ranking, System
from cairn.pipeline.search.fusion import Fusion, LateFusion, document_scores, passage_scores
from cairn.pipeline.search.late import (
    NUM_WINDOWS,
    JudgedWindows,
    LateQuery,
    judge_windows,
    moved,
    window_max_sim,
)
from cairn.pipeline.search.windows import default_window
from cairn.pipeline.search_options import SearchOptions
from cairn.pipeline.token_vectors.projection import TokenProjection
from cairn.pipeline.types import QueryTokens
from jaxtyping import Bool, Float, Float32, Float64, Int64

RRF_K = 60
NUM_CANDIDATES = SearchOptions(top_k=RUN_DEPTH).num_candidates
"""Length of each list that feeds a fusion: that of a search for as many documents as a run holds."""
AS_SEARCHED: Final[Mapping[Ranking, SearchOptions]] = {
    "document": SearchOptions(granularity="document", hybrid=False, late=False),
    "chunk": SearchOptions(granularity="chunk", hybrid=False, late=False),
    "fused": SearchOptions(granularity="both", hybrid=False, late=False),
    "fused+bm25": SearchOptions(granularity="both", hybrid=True, late=False),
    "late": SearchOptions(granularity="both", hybrid=False),
    "late+bm25": SearchOptions(granularity="both", hybrid=True),
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
        projection: TokenProjection | None = None,
    ) -> None:
        self._id_rank_N = id_ranks(doc_ids)
        self._encoded = encoded
        self._document_bm25 = document_bm25
        self._chunk_bm25 = chunk_bm25
        self._lexicon = lexicon
        self._projection = projection
        self._mean_chunk_V = encoded.chunk_vectors_MV[sampled_chunks(len(encoded.chunk_vectors_MV))].mean(
            axis=0
        )

    def rank(
        self, system: System, wants_passages_Q: Bool[np.ndarray, " Q"], depth: int = RUN_DEPTH
    ) -> list[Answer]:
        """Answer every query with at most ``depth`` documents; passages only where they are wanted."""
        passages = window_passages(self._encoded, system.window_chunks)
        if system.judges_tokens:
            judged = self._judging(system)
            return [
                self._judged_answer(system, query, judged, passages if is_wanted else None, depth)
                for query, is_wanted in enumerate(wants_passages_Q.tolist())
            ]
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
        average_chunk = float(self._mean_chunk_V @ self._encoded.query_vectors_QV[query])
        scores_N, fusion = self._document_scores(system, query, cosines, average_chunk)
        ranked = RankedDocuments.best(scores_N, self._id_rank_N, depth)
        if passages is None:
            return Answer(documents=ranked, passages=None)
        if system.needs_chunk_bm25:
            scores_P = self._lexical_passage_scores(system, query, cosines)
        else:
            own_P = self._own_scores(query, cosines.passage_P, fusion, passages, system.window_chunks)
            scores_P = self._passage_scores(system, own_P, passages, scores_N)
        return Answer(documents=ranked, passages=best_passages(scores_P, passages, max(BUDGETS)))

    def _document_scores(
        self, system: System, query: int, cosines: _Cosines, average_chunk: float
    ) -> tuple[Float64[np.ndarray, " N"], Fusion | None]:
        """Score every document, minus infinity where one is no candidate; return how BM25 was fused."""
        if system.needs_lexicon:
            return self._hybrid_scores(system, query, cosines, average_chunk)
        if system.ranking in AS_SEARCHED:
            own = {"document": cosines.document_N, "chunk": cosines.best_N}
            return document_scores(AS_SEARCHED[system.ranking], own)
        found, bm25 = _hits(self._document_bm25, query)
        if system.ranking == "bm25":
            return _spread(found, bm25, len(cosines.document_N)), None
        dense_list = RankedDocuments.best(cosines.best_N, self._id_rank_N, NUM_CANDIDATES).positions
        return _rrf([found[:NUM_CANDIDATES], dense_list], len(cosines.document_N)), None

    def _hybrid_scores(
        self, system: System, query: int, cosines: _Cosines, average_chunk: float
    ) -> tuple[Float64[np.ndarray, " N"], Fusion | None]:
        """Score as a hybrid search does, from its candidates and with its fusion."""
        assert self._lexicon is not None, "a system that ranks with BM25 of passages was given none"
        options, firsts = AS_SEARCHED[system.ranking], self._encoded.chunk_offsets[:-1]
        words_M = self._lexicon.passages(query, _ranking_window(system))
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
            average_chunk=average_chunk,
        )
        return scores_N, fusion

    def _own_scores(
        self,
        query: int,
        cosine_P: Float32[np.ndarray, " P"],
        fusion: Fusion | None,
        passages: Passages,
        size: int,
    ) -> Float[np.ndarray, " P"]:
        """Score passages by themselves: their cosine, fused with their BM25 where BM25 has a say."""
        if fusion is None:
            return cosine_P
        assert self._lexicon is not None, "a fusion is made with BM25"
        own_M = self._lexicon.passages(query, size)
        found_M = _any(own_M)
        high = None if found_M is None else float(found_M.max())
        return fusion.with_windows(high).passages(cosine_P, own_M[passages.first_chunk_P])

    @staticmethod
    def _passage_scores(
        system: System,
        own_P: Float[np.ndarray, " P"],
        passages: Passages,
        scores_N: Float64[np.ndarray, " N"],
    ) -> Float64[np.ndarray, " P"]:
        """Score passages as a search does; a baseline's chunks know nothing of their neighbours."""
        document_P = passages.document_P
        owner_P = np.arange(len(own_P)) if system.is_baseline else document_P
        return passage_scores(AS_SEARCHED[system.ranking], own_P, owner_P, scores_N[document_P])

    def _judging(self, system: System) -> _Judging:
        """Return what judges for a system: windows of the size that ranks, and token vectors."""
        assert self._projection is not None, "a system that judges by token vectors was given no projection"
        encoded = self._encoded
        return _Judging(
            windows=window_passages(encoded, _ranking_window(system)),
            stored=TokenVectors(
                projection=self._projection,
                chunks=CodeColumn(rows=encoded.chunk_codes, offsets_M1=encoded.chunk_code_offsets),
                titles=CodeColumn(rows=encoded.title_codes, offsets_M1=encoded.title_code_offsets),
            ),
        )

    def _judged_answer(
        self, system: System, query: int, judging: _Judging, passages: Passages | None, depth: int
    ) -> Answer:
        """Answer as a search with token vectors does: judge, move the query, rank and judge again."""
        encoded, windows = self._encoded, judging.windows
        late = judging.query(encoded, query)
        vector_V = encoded.query_vectors_QV[query]
        if late is None:
            shown = windows if passages is None else passages
            return self._answer(system, query, self._cosines(vector_V, shown), passages, depth)
        first = self._judged_round(system, query, judging, late, vector_V).judged
        best = first.best(NUM_WINDOWS)
        bounds = zip(first.first_J[best].tolist(), first.end_J[best].tolist(), strict=True)
        vector_V = moved(
            vector_V, np.stack([encoded.chunk_vectors_MV[start:end].sum(axis=0) for start, end in bounds])
        )
        last = self._judged_round(system, query, judging, late, vector_V)
        scores_N, fusion, judged = last.scores_N, last.fusion, last.judged
        candidates = np.flatnonzero(scores_N > -np.inf)
        mixed = LateFusion.of(scores_N[candidates], fusion, last.average_chunk)
        max_sim_N = np.full(len(scores_N), judged.low, np.float32)
        np.maximum.at(max_sim_N, encoded.chunk_document[judged.first_J], judged.max_sim_J)
        scores_N[candidates] = mixed.documents(scores_N[candidates], judged.scaled(max_sim_N[candidates]))
        ranked = RankedDocuments.best(scores_N, self._id_rank_N, depth)
        if passages is None:
            return Answer(documents=ranked, passages=None)
        cosine_P = passages.vectors_PV @ vector_V
        own_P = self._own_scores(query, cosine_P, fusion, passages, system.window_chunks)
        shown = judged
        if system.window_chunks != _ranking_window(system):
            scores_P = self._passage_scores(system, own_P, passages, scores_N)
            shown = self._judge(judging, late, passages, scores_P)
        max_sim_P = np.maximum(shown.spread(passages.first_chunk_P), np.float32(judged.low))
        own_P = mixed.passages(own_P, judged.scaled(max_sim_P))
        scores_P = self._passage_scores(system, own_P, passages, scores_N)
        return Answer(documents=ranked, passages=best_passages(scores_P, passages, max(BUDGETS)))

    def _judged_round(
        self,
        system: System,
        query: int,
        judging: _Judging,
        late: LateQuery,
        vector_V: Float32[np.ndarray, " V"],
    ) -> _Round:
        """Rank with a query's vector, and judge the best windows."""
        windows = judging.windows
        cosines = self._cosines(vector_V, windows)
        average_chunk = float(self._mean_chunk_V @ vector_V)
        scores_N, fusion = self._document_scores(system, query, cosines, average_chunk)
        own_P = self._own_scores(query, cosines.passage_P, fusion, windows, _ranking_window(system))
        scores_P = self._passage_scores(system, own_P, windows, scores_N)
        judged = self._judge(judging, late, windows, scores_P)
        return _Round(scores_N=scores_N, fusion=fusion, average_chunk=average_chunk, judged=judged)

    def _judge(
        self, judging: _Judging, late: LateQuery, windows: Passages, scores_P: Float64[np.ndarray, " P"]
    ) -> JudgedWindows:
        few = np.flatnonzero(scores_P > -np.inf)
        titles = self._encoded.chunk_offsets[windows.document_P[few]]
        first, end = windows.first_chunk_P[few], windows.end_chunk_P[few]
        max_sim = partial(window_max_sim, judging.stored, late)
        return judge_windows(max_sim, scores_P[few], first, end, titles)

    def _cosines(self, vector_V: Float32[np.ndarray, " V"], windows: Passages) -> _Cosines:
        chunk_M = self._encoded.chunk_vectors_MV @ vector_V
        return _Cosines(
            document_N=self._encoded.document_vectors_NV @ vector_V,
            best_N=np.maximum.reduceat(chunk_M, self._encoded.chunk_offsets[:-1]),
            passage_P=windows.vectors_PV @ vector_V,
        )

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Judging:
    """Windows of the size that ranks documents, and the token vectors that judge them."""

    windows: Passages
    stored: TokenVectors

    def query(self, encoded: EncodedSet, query: int) -> LateQuery | None:
        """Return a query's projected tokens, None where none weighs anything."""
        own = slice(*encoded.query_token_offsets[query : query + 2].tolist())
        ids = encoded.query_token_ids[own]
        places = np.zeros(len(ids), np.int64)  # where the tokens stand is not asked
        tokens = QueryTokens(
            states_TD=encoded.query_states[own], ids_T=ids, start_char=places, end_char=places
        )
        return LateQuery.of(tokens, self.stored.projection)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Round:
    """Documents ranked with one query vector, and the windows judged then."""

    scores_N: Float64[np.ndarray, " N"]
    fusion: Fusion | None
    average_chunk: float
    judged: JudgedWindows


def _ranking_window(system: System) -> int:
    return default_window(system.encoding.encoder.landmark_interval)


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
