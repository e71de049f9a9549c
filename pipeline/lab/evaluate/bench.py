"""Score systems on a set: each encoding once, every system on it, then the next.

What is held of an encoding is dropped before the next one begins, so that memory is that of one. BM25 over
documents is asked once a set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from cairn.pipeline.config import ContextConfig
from cairn.pipeline.lab.evaluate.encoding_cache import cache_file, read_encoded, write_encoded
from cairn.pipeline.lab.evaluate.encodings import (
    EncodedSet,
    Encoding,
    build_encoder,
    encode_documents,
    encode_queries,
    piece_texts,
)
from cairn.pipeline.lab.evaluate.evidence import BUDGETS, Spans, ceiling, evidence_by_query, evidence_recall
from cairn.pipeline.lab.evaluate.late_scores import score_pieces
from cairn.pipeline.lab.evaluate.lexical import LexicalHits, Lexicon, read_lexicon, search_bm25
from cairn.pipeline.lab.evaluate.measures import NDCG, RankedDocuments, document_measures
from cairn.pipeline.lab.evaluate.piece_ranking import PieceRanker
from cairn.pipeline.lab.evaluate.ranking import NUM_CANDIDATES, Answer, SetRanker
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.evaluate.systems import System
from cairn.pipeline.token_vectors.projection import TokenProjection
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Float32, Float64, Int64

EVIDENCE_MEASURES = tuple(f"evidence@{budget}" for budget in BUDGETS)
CUT_MEASURES = tuple(f"evidence@{budget}-cut" for budget in BUDGETS)
MAIN_EVIDENCE = EVIDENCE_MEASURES[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a system takes: time to encode documents and a query, bytes of its vectors and its BM25 index.

    Vectors count as float32, token states as float16; a quantised index of a collection holds less.
    """

    encode_seconds: float
    tokens: int
    vectors: int
    index_bytes: int
    query_milliseconds: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SystemResult:
    """One system on one set.

    Every measure of every query (NaN where a query has no evidence), the run, and the cost.
    """

    set_name: str
    system: System
    values: Mapping[str, Float64[np.ndarray, " Q"]]
    run: Sequence[RankedDocuments]
    cost: Cost

    def means(self) -> dict[str, float]:
        """Return the mean of every measure over the queries that have it."""
        return {name: float(np.nanmean(values_Q)) for name, values_Q in self.values.items()}


def run_bench(
    judged: RetrievalSet,
    systems: Sequence[System],
    context_config: ContextConfig | None = None,
    progress: ProgressListener = silent_progress,
    cache: Path | None = None,
) -> Iterator[SystemResult]:
    """Yield every system's result; those of one encoding stand together, in the order of the encodings.

    With ``cache``, a folder, encoded sets are kept there and taken from there.
    """
    evidence = evidence_by_query(judged.judgements, len(judged.query_ids))
    needs_bm25 = any(system.needs_document_bm25 for system in systems)
    document_bm25 = (
        search_bm25(judged.texts, judged.queries, NUM_CANDIDATES, progress) if needs_bm25 else None
    )
    needs_titled = any(system.needs_lexicon for system in systems)
    titled_bm25 = (
        search_bm25(judged.texts, judged.queries, NUM_CANDIDATES, progress, judged.titles)
        if needs_titled
        else None
    )
    for encoding in dict.fromkeys(system.encoding for system in systems):
        sharing = [system for system in systems if system.encoding == encoding]
        encoded, projection = _encode(
            judged, encoding, sharing, context_config or ContextConfig(), progress, cache
        )
        chunk_bm25 = _chunk_bm25(judged, encoding, encoded, sharing, progress)
        needs_lexicon = any(system.needs_lexicon for system in sharing)
        lexicon = (
            read_lexicon(judged.texts, encoded, judged.queries, titled_bm25)
            if titled_bm25 and needs_lexicon
            else None
        )
        if encoding.stride_tokens is None:
            ranker = SetRanker(judged.doc_ids, encoded, document_bm25, chunk_bm25, lexicon, projection)
        else:
            judge = partial(_max_sim, judged, encoding, encoded, progress)
            ranker = PieceRanker(judged.doc_ids, encoded, chunk_bm25, judge)
        for number, system in enumerate(sharing, start=1):
            answers = ranker.rank(system, np.array([bool(len(own.start_S)) for own in evidence]))
            progress("rank", number, len(sharing), "systems")
            run = [answer.documents for answer in answers]
            yield SystemResult(
                set_name=judged.name,
                system=system,
                values={**document_measures(judged, run), **_evidence_values(answers, evidence)},
                run=run,
                cost=_cost(system, encoded, _lexical_bytes(system, document_bm25, chunk_bm25, lexicon)),
            )


def evidence_ceiling(judged: RetrievalSet) -> dict[str, float]:
    """Return what a reader of nothing but evidence would reach at each budget.

    Empty for a set without evidence.
    """
    own = [
        ceiling(spans)
        for spans in evidence_by_query(judged.judgements, len(judged.query_ids))
        if len(spans.start_S)
    ]
    return dict(zip(EVIDENCE_MEASURES, np.mean(own, axis=0).tolist(), strict=True)) if own else {}


def primary_measures(values: Mapping[str, object]) -> list[str]:
    """Return the measures a choice is made by.

    NDCG@10, and evidence recall at the middle budget where there is evidence.
    """
    return [name for name in (NDCG, MAIN_EVIDENCE) if name in values]


def _encode(
    judged: RetrievalSet,
    encoding: Encoding,
    sharing: Sequence[System],
    context_config: ContextConfig,
    progress: ProgressListener,
    cache: Path | None,
) -> tuple[EncodedSet, TokenProjection | None]:
    # The stage is named by the systems' common part, so that a bar says what it is busy with; BM25 lends the
    # chunks only.
    named = min(sharing, key=lambda system: system.ranking == "bm25").name
    name = named.rpartition("/")[0] or named

    def listen(stage: str, done: int, total: int | None, unit: str) -> None:
        progress(f"{stage} {name}", done, total, unit)

    if encoding.encoder.needs_context:
        progress(f"context {name}", 0, None, "documents")
    encoder, context_seconds = build_encoder(judged, encoding, context_config)
    path = None if cache is None else cache_file(cache, judged, encoding, encoder)
    encoded = None if path is None else read_encoded(path)
    if encoded is None:
        encoded = encode_queries(
            encoder, encode_documents(encoder, judged, encoding, listen, context_seconds), judged.queries
        )
        if path is not None:
            write_encoded(path, encoded)
    return encoded, encoder.token_projection


def _chunk_bm25(
    judged: RetrievalSet,
    encoding: Encoding,
    encoded: EncodedSet,
    sharing: Sequence[System],
    progress: ProgressListener,
) -> LexicalHits | None:
    if any(system.needs_piece_bm25 for system in sharing):
        pieces = _pieces(judged, encoding, encoded)
        return search_bm25(pieces, judged.queries, len(pieces), progress)
    if judged.has_evidence and any(system.needs_chunk_bm25 for system in sharing):
        chunks = _pieces(judged, encoding, encoded)
        return search_bm25(chunks, judged.queries, NUM_CANDIDATES, progress)
    return None


def _pieces(judged: RetrievalSet, encoding: Encoding, encoded: EncodedSet) -> list[str]:
    titles = judged.titles if encoding.has_titles else None
    return piece_texts(titles, judged.texts, encoded.chunk_document, encoded.start_char, encoded.end_char)


def _max_sim(
    judged: RetrievalSet,
    encoding: Encoding,
    encoded: EncodedSet,
    progress: ProgressListener,
    asked_QK: Int64[np.ndarray, "Q K"],
) -> Float32[np.ndarray, "Q K"]:
    pieces = _pieces(judged, encoding, encoded)
    return score_pieces(encoding.encoder, pieces, judged.queries, asked_QK, progress)


def _evidence_values(
    answers: Sequence[Answer], evidence: Sequence[Spans]
) -> dict[str, Float64[np.ndarray, " Q"]]:
    if not any(answer.passages is not None for answer in answers):
        return {}
    whole_QB, cut_QB = np.full((2, len(answers), len(BUDGETS)), np.nan)
    for query, (answer, own) in enumerate(zip(answers, evidence, strict=True)):
        if answer.passages is not None:
            whole_QB[query] = evidence_recall(answer.passages, own)
            cut_QB[query] = evidence_recall(answer.passages, own, cut=True)
    return dict(
        zip((*EVIDENCE_MEASURES, *CUT_MEASURES), np.concatenate([whole_QB, cut_QB], axis=1).T, strict=True)
    )


def _lexical_bytes(
    system: System, document: LexicalHits | None, chunk: LexicalHits | None, lexicon: Lexicon | None
) -> int:
    needed = (
        (system.needs_document_bm25, document),
        (system.needs_chunk_bm25 or system.needs_piece_bm25, chunk),
        (system.needs_lexicon, lexicon),
    )
    return sum(index.index_bytes for is_needed, index in needed if is_needed and index is not None)


def _cost(system: System, encoded: EncodedSet, lexical_bytes: int) -> Cost:
    vectors = len(encoded.document_vectors_NV) * system.reads_document_vectors
    vectors += len(encoded.chunk_vectors_MV) * system.reads_chunk_vectors
    encodes = vectors > 0
    width = encoded.document_vectors_NV.shape[1]
    token_bytes = 2 * encoded.tokens * width if system.needs_max_sim else 0
    if system.judges_tokens:
        token_bytes = encoded.chunk_codes.nbytes + encoded.title_codes.nbytes
    return Cost(
        encode_seconds=encoded.encode_seconds if encodes else 0.0,
        tokens=encoded.tokens if encodes else 0,
        vectors=vectors,
        index_bytes=vectors * width * 4 + lexical_bytes + token_bytes,
        query_milliseconds=1_000 * encoded.query_seconds / len(encoded.query_vectors_QV) if encodes else 0.0,
    )
