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
from cairn.pipeline.lab.evaluate.baselines import (
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
from cairn.pipeline.lab.evaluate.measures import (
    BUDGETS,
    NDCG,
    RUN_DEPTH,
    Answer,
    RankedDocuments,
    Spans,
    document_measures,
    evidence_by_query,
    evidence_recall,
)
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.evaluate.searched_set import SearchedSet
from cairn.pipeline.lab.evaluate.systems import System
from cairn.pipeline.token_vectors.codebook import TokenCoder
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Float64

EVIDENCE_MEASURES = tuple(f"evidence@{budget}" for budget in BUDGETS)
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
    """One system on one set: measures of every query (NaN without evidence), the run, and the cost."""

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
    """Yield every system's result, those of one encoding together; ``cache`` keeps encoded sets."""
    evidence = evidence_by_query(judged.judgements, len(judged.query_ids))
    has_evidence_Q = np.array([bool(len(own.start_S)) for own in evidence])
    document_bm25 = None
    if any(system.reads("document BM25") for system in systems):
        document_bm25 = search_bm25(judged.texts, judged.queries, RUN_DEPTH, progress)
    for shared in dict.fromkeys((system.encoding, system.is_baseline) for system in systems):
        sharing = [system for system in systems if (system.encoding, system.is_baseline) == shared]
        encoded, codebook = _encode(judged, sharing, context_config or ContextConfig(), progress, cache)
        ranker = make_ranker(judged, sharing, encoded, codebook, document_bm25, progress)
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


def primary_measures(values: Mapping[str, object]) -> list[str]:
    """Return what a choice is made by: nDCG@10, and evidence recall at the middle budget, if any."""
    return [name for name in (NDCG, MAIN_EVIDENCE) if name in values]


def _encode(
    judged: RetrievalSet,
    sharing: Sequence[System],
    context_config: ContextConfig,
    progress: ProgressListener,
    cache: Path | None,
) -> tuple[EncodedSet, TokenCoder | None]:
    """Encode a set for the systems that share an encoding; where BM25 alone is asked, nothing is encoded."""
    encoding = sharing[0].encoding
    if not any(system.reads_vectors for system in sharing):
        return only_cut(judged, encoding), None
    # The stage is named by the systems' common part, so that a bar says what it is busy with.
    name = sharing[0].name.rpartition("/")[0] or sharing[0].name

    def listen(stage: str, done: int, total: int | None, unit: str) -> None:
        progress(f"{stage} {name}", done, total, unit)

    if encoding.encoder.use_context:
        listen("context", 0, None, "documents")
    encoder, seconds = build_encoder(judged, encoding, context_config)
    return encode_set(judged, encoding, encoder, listen, seconds, cache), encoder.token_codebook


def make_ranker(
    judged: RetrievalSet,
    sharing: Sequence[System],
    encoded: EncodedSet,
    codebook: TokenCoder | None,
    document_bm25: LexicalHits | None,
    progress: ProgressListener = silent_progress,
) -> SearchedSet | PieceRanker:
    """Return what ranks for systems that share an encoding; ``document_bm25`` is that of the baselines."""
    encoding = sharing[0].encoding
    if not sharing[0].is_baseline:
        return SearchedSet(judged, encoded, codebook)
    titles = judged.titles if encoding.has_titles or encoding.vector_column else None
    pieces = piece_texts(titles, judged.texts, encoded.chunk_offsets, encoded.start_char, encoded.end_char)
    piece_bm25 = None
    if any(
        # Passages alone ask for it where documents have their own.
        each.reads("piece BM25") and (judged.has_evidence or not each.reads("document BM25"))
        for each in sharing
    ):
        piece_bm25 = search_bm25(pieces, judged.queries, len(pieces), progress)
    judge = partial(score_pieces, encoding.encoder, pieces, judged.queries, progress=progress)
    return PieceRanker(judged.doc_ids, encoded, document_bm25, piece_bm25, judge)


def _evidence_values(
    answers: Sequence[Answer], evidence: Sequence[Spans]
) -> dict[str, Float64[np.ndarray, " Q"]]:
    if not any(answer.passages is not None for answer in answers):
        return {}
    recall_QB = np.full((len(answers), len(BUDGETS)), np.nan)
    for query, (answer, own) in enumerate(zip(answers, evidence, strict=True)):
        if answer.passages is not None:
            recall_QB[query] = evidence_recall(answer.passages, own)
    return dict(zip(EVIDENCE_MEASURES, recall_QB.T, strict=True))


def _cost(system: System, encoded: EncodedSet, word_bytes: int) -> Cost:
    vectors = len(encoded.document_vectors_NV) * system.reads("documents")
    vectors += len(encoded.chunk_vectors_MV) * system.reads("chunks")
    encodes = vectors > 0
    width = encoded.document_vectors_NV.shape[1]
    token_bytes = 2 * encoded.tokens * width if system.reads("token states") else 0
    if system.reads("token vectors"):
        token_bytes = sum(each.rows.nbytes for each in (encoded.chunk_codes, encoded.title_codes) if each)
    return Cost(
        encode_seconds=encoded.encode_seconds if encodes else 0.0,
        tokens=encoded.tokens if encodes else 0,
        vectors=vectors,
        index_bytes=vectors * width * 4 + word_bytes + token_bytes,
        query_milliseconds=1_000 * encoded.query_seconds / len(encoded.query_vectors_QV) if encodes else 0.0,
    )
