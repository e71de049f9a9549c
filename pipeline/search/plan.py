"""One call: what it asks for, and all of its answer that needs no vector, read while its queries are encoded.

    texts ──┬─▶ encoder ─────────────────────────▶ vectors ─┬─▶ ranking ─▶ hits
            └─▶ filter ─▶ BM25 of documents, passages ──────┘

BM25 takes as long as all of the search behind it; beside the encoder, which is one thread, most of that time
is saved. Everything is read from the one generation that the call began with.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int64
from lancedb.expr import Expr

from pipeline.index.generation import Generation
from pipeline.search.candidates import nominate_by_passage_bm25
from pipeline.search.lexical import allowed_documents, bm25_documents, bm25_passages
from pipeline.search.options import SearchOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One call: its generation, its options, and what they resolve to.

    ``queries`` is None where only vectors are known. ``schema`` is the documents table's; ``window`` the
    number of chunks in a passage, ``ranking_window`` that of the passages whose BM25 ranks documents,
    whatever size is asked for.
    """

    generation: Generation
    schema: pa.Schema
    options: SearchOptions
    queries: Sequence[str] | None
    where: Expr | None
    window: int
    ranking_window: int
    timeout: dt.timedelta | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WordScores:
    """BM25 of one query.

    ``documents`` are LanceDB's best with their ``scores``; ``passages`` is by first chunk that of the
    passages that rank, ``windows`` that of those that are shown, None where no word stands in any;
    ``nominees`` are the documents to look at, best first, by either.
    """

    documents: Int64[np.ndarray, " A"]
    scores: Float32[np.ndarray, " A"]
    passages: Float32[np.ndarray, " M"] | None
    windows: Float32[np.ndarray, " M"] | None
    nominees: Sequence[Int64[np.ndarray, " _"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadAhead:
    """What is known of a call before its vectors are: the documents its filter allows, ascending (None: all), and its first query's BM25.

    Those of a list's other queries are read in their turn, since each takes 4 bytes a chunk of the
    collection.
    """

    allowed: Int64[np.ndarray, " A"] | None
    words: WordScores | None


def read_ahead(plan: Plan) -> ReadAhead:
    """Read what needs no vector."""
    allowed = None if plan.where is None else allowed_documents(plan.generation, plan.where, plan.timeout)
    return ReadAhead(allowed=allowed, words=read_words(plan, allowed, 0))


def read_words(plan: Plan, allowed: Int64[np.ndarray, " A"] | None, index: int) -> WordScores | None:
    """Return the BM25 of a query; None where BM25 has no say, or there is no document to find."""
    generation, options = plan.generation, plan.options
    num_documents = generation.num_documents if allowed is None else len(allowed)
    if plan.queries is None or not options.hybrid or options.weight("bm25") <= 0.0 or not num_documents:
        return None
    query = plan.queries[index]
    documents, scores = bm25_documents(generation, query, plan.where, options.num_candidates)
    nominees = [documents]
    passages = windows = bm25_passages(generation, query, plan.ranking_window, allowed)
    if passages is not None:
        nominees.append(nominate_by_passage_bm25(generation, passages, options.num_candidates))
        if options.passages and plan.window != plan.ranking_window:
            windows = bm25_passages(generation, query, plan.window, allowed)
    return WordScores(
        documents=documents, scores=scores, passages=passages, windows=windows, nominees=nominees
    )
