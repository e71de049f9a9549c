"""Score systems on a set: each encoding once, every system on it, then the next.

What is held of an encoding is dropped before the next one begins, so that memory is that of one. BM25 over
documents is asked once a set.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
from cairn.pipeline.config import ContextConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.evaluate.baselines import (
    NUM_CANDIDATES,
    LexicalHits,
    PieceRanker,
    score_pieces,
    search_bm25,
)
from cairn.pipeline.lab.evaluate.encodings import (
    EncodedSet,
    build_encoder,
    encode_set,
    only_cut,
    piece_texts,
)
from cairn.pipeline.lab.evaluate.evidence import BUDGETS, Spans, ceiling, evidence_by_query, evidence_recall
from cairn.pipeline.lab.evaluate.measures import NDCG, Answer, RankedDocuments, document_measures
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.evaluate.searched_set import SearchedSet
from cairn.pipeline.lab.evaluate.systems import System
from cairn.pipeline.token_vectors.projection import TokenProjection
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Float64

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
    has_evidence_Q = np.array([bool(len(own.start_S)) for own in evidence])
    document_bm25 = None
    if any(system.needs_document_bm25 for system in systems):
        document_bm25 = search_bm25(judged.texts, judged.queries, NUM_CANDIDATES, progress)
    for encoding in dict.fromkeys(system.encoding for system in systems):
        sharing = [system for system in systems if system.encoding == encoding]
        encoded, projection = _encode(judged, sharing, context_config or ContextConfig(), progress, cache)
        ranker = make_ranker(judged, sharing, encoded, projection, document_bm25, progress)
        for number, system in enumerate(sharing, start=1):
            answers = ranker.rank(system, has_evidence_Q)
            progress("rank", number, len(sharing), "systems")
            run = [answer.documents for answer in answers]
            yield SystemResult(
                set_name=judged.name,
                system=system,
                values={**document_measures(judged, run), **_evidence_values(answers, evidence)},
                run=run,
                cost=_cost(system, encoded, ranker.word_bytes(system)),
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
    sharing: Sequence[System],
    context_config: ContextConfig,
    progress: ProgressListener,
    cache: Path | None,
) -> tuple[EncodedSet, TokenProjection | None]:
    """Encode a set for the systems that share an encoding; where BM25 alone is asked, nothing is encoded."""
    encoding = sharing[0].encoding
    if not any(system.reads_vectors for system in sharing):
        return only_cut(judged, encoding), None
    # The stage is named by the systems' common part, so that a bar says what it is busy with.
    name = sharing[0].name.rpartition("/")[0] or sharing[0].name

    def listen(stage: str, done: int, total: int | None, unit: str) -> None:
        progress(f"{stage} {name}", done, total, unit)

    if encoding.encoder.needs_context:
        listen("context", 0, None, "documents")
    encoder, seconds = build_encoder(judged, encoding, context_config)
    return encode_set(judged, encoding, encoder, listen, seconds, cache), encoder.token_projection


def make_ranker(
    judged: RetrievalSet,
    sharing: Sequence[System],
    encoded: EncodedSet,
    projection: TokenProjection | None,
    document_bm25: LexicalHits | None,
    progress: ProgressListener = silent_progress,
) -> SearchedSet | PieceRanker:
    """Return what ranks for systems that share an encoding; ``document_bm25`` is that of the baselines."""
    encoding = sharing[0].encoding
    if not sharing[0].is_baseline:
        return SearchedSet(judged, encoded, projection)
    titles = judged.titles if encoding.has_titles else None
    pieces = piece_texts(titles, judged.texts, encoded.chunk_offsets, encoded.start_char, encoded.end_char)
    piece_bm25 = None
    if any(each.needs_piece_bm25 and _reads_pieces(each, judged) for each in sharing):
        piece_bm25 = search_bm25(pieces, judged.queries, len(pieces), progress)
    judge = partial(score_pieces, encoding.encoder, pieces, judged.queries, progress=progress)
    return PieceRanker(judged.doc_ids, encoded, document_bm25, piece_bm25, judge)


def _reads_pieces(system: System, judged: RetrievalSet) -> bool:
    """Say whether BM25 of pieces matters: passages alone ask for it where documents have their own."""
    return judged.has_evidence or not system.needs_document_bm25


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


def _cost(system: System, encoded: EncodedSet, word_bytes: int) -> Cost:
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
        index_bytes=vectors * width * 4 + word_bytes + token_bytes,
        query_milliseconds=1_000 * encoded.query_seconds / len(encoded.query_vectors_QV) if encodes else 0.0,
    )


SAMPLE_CHARACTERS: Final = 40_000
"""Some 10,000 tokens: a second or two of encoding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Seconds of all encodings together, how many there are, and the tokens of the texts, once."""

    seconds: float
    encodings: int
    tokens: int


def estimate_seconds(sets: Sequence[RetrievalSet], systems: Sequence[System]) -> Estimate | None:
    """Estimate how long the encodings take from a timed sample; None where nothing is to be encoded.

    What is ranked afterwards, a context and token states of pieces are not counted. Encodings that a cache
    holds take no time, and are counted all the same.
    """
    encodings = list(dict.fromkeys(each.encoding for each in systems if each.reads_vectors))
    if not encodings:
        return None
    characters = sum(len(text) for judged in sets for text in judged.texts)
    encoder = DocumentEncoder(encodings[-1].encoder.without_context)
    ends = accumulate(len(text) for text in sets[0].texts)
    num_sampled = 1 + sum(end < SAMPLE_CHARACTERS for end in ends)
    sample = [text[:SAMPLE_CHARACTERS] for text in sets[0].texts[:num_sampled]]
    encoder.encode(sample[:1])  # the first pass is slower
    started = time.monotonic()
    tokens = int(encoder.encode(sample).num_tokens.sum())
    seconds = time.monotonic() - started
    share = characters / max(1, sum(map(len, sample)))
    # Pieces that overlap encode a text as often as they cover it.
    passes = sum(
        each.encoder.landmark_interval / each.stride_tokens if each.stride_tokens else 1.0
        for each in encodings
    )
    return Estimate(seconds=passes * share * seconds, encodings=len(encodings), tokens=round(share * tokens))
