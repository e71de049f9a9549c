"""Choose the temperatures τ of documents and of queries that improve retrieval (TempScale), if any do.

    half of the queries    chooses the pair of τ with the best mean nDCG@10
    the other half         compares that pair with the present settings, query by query

The queries that chose a pair therefore do not test it, and there is one test only. A pair is recommended if
the 95 % interval of its gain lies above 0 and p is below .05. Documents are ranked by their vectors alone
(``cairn/fused``), because BM25 does not depend on τ. A table shows the effect of each τ by the length of
texts, over all queries.

Source: Zhou et al., "Length-Induced Embedding Collapse in Transformer-based Models", §4, table 2 and E.6 (τ
of queries and of documents apart, lower τ for longer texts). Differs: chosen by retrieval on the user's own
corpus; the paper picks τ by task.

    N documents    Q queries
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.corpus.tokenization import tokenize
from cairn.pipeline.lab.analysis.length_collapse import require_temperatures
from cairn.pipeline.lab.evaluate.encodings import (
    EncodedSet,
    Encoding,
    build_encoder,
    encode_queries,
    encode_set,
)
from cairn.pipeline.lab.evaluate.measures import NDCG, document_measures
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.evaluate.searched_set import SearchedSet
from cairn.pipeline.lab.evaluate.significance import Comparison, Verdict, compare_paired, verdict_of
from cairn.pipeline.lab.evaluate.systems import System
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Bool, Float64, Int64

TRIED: Final = (0.8, 0.9, 0.95)
DOCUMENT_EDGES: Final = (128, 512)
QUERY_EDGES: Final = (8, 16)
"""Tokens at which a longer class of texts begins."""
MIN_CLASS: Final = 10
"""Queries a class needs to be shown by itself."""

Side = Literal["documents", "queries"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRow:
    """What τ on one side does to queries whose text, or whose first relevant document, has such a length.

    ``tokens`` is the first length of the class; ``end`` the first one behind it, None for none.
    """

    side: Side
    temperature: float
    tokens: int
    end: int | None
    before: float
    comparison: Comparison
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedPair:
    """A pair of τ with its mean nDCG@10 on the queries that choose."""

    documents: float
    queries: float
    quality: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TemperatureReport:
    """The tables and the choice; ``flags`` are those of the ingest that applies it, empty for none.

    ``test`` compares the best pair with the settings as they are on the queries that did not choose; None
    where the settings as they are won.
    """

    set_name: str
    documents: int
    queries: int
    as_it_is: TriedPair
    best: TriedPair
    tried: Sequence[TriedPair]
    by_length: Sequence[LengthRow]
    test: Comparison | None
    verdict: Verdict
    flags: str

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return asdict(self)


def tune_temperature(
    judged: RetrievalSet,
    config: EncoderConfig,
    *,
    temperatures: Sequence[float] = TRIED,
    context_config: ContextConfig | None = None,
    seed: int = 0,
    cache: Path | None = None,
    progress: ProgressListener = silent_progress,
) -> TemperatureReport:
    """Measure every pair of τ on a set, and choose.

    Raises :class:`ConfigError` for a τ out of bounds. ``cache`` keeps encoded sets.
    """
    require_temperatures(temperatures)
    own_query = config.temperature if config.query_temperature is None else config.query_temperature
    base = (config.temperature, own_query)
    documents = list(dict.fromkeys((base[0], *temperatures)))
    queries = list(dict.fromkeys((base[1], *temperatures)))
    backbone = load_backbone(config)
    values: dict[tuple[float, float], Float64[np.ndarray, " Q"]] = {}
    for number, each in enumerate(documents, start=1):
        own = replace(config, temperature=each)
        encoded = _encode(judged, own, queries, backbone, context_config or ContextConfig(), cache, progress)
        values |= {(each, query): _ndcg(judged, own_set) for query, own_set in encoded.items()}
        progress("temperatures", number, len(documents), "of documents")
    chooses_Q = _half(len(judged.query_ids), seed)
    tried = [
        TriedPair(documents=pair[0], queries=pair[1], quality=float(own_Q[chooses_Q].mean()))
        for pair, own_Q in values.items()
    ]
    as_it_is = next(each for each in tried if (each.documents, each.queries) == base)
    best = max(tried, key=lambda each: (each.quality, each is as_it_is))
    test = None
    if best is not as_it_is:
        best_Q = values[best.documents, best.queries]
        test = compare_paired(best_Q[~chooses_Q], values[base][~chooses_Q], seed=seed)
    verdict = "noise" if test is None else verdict_of(test)
    return TemperatureReport(
        set_name=judged.name,
        documents=len(judged.doc_ids),
        queries=len(judged.query_ids),
        as_it_is=as_it_is,
        best=best,
        tried=tried,
        by_length=list(_by_length(judged, backbone, values, base, seed)),
        test=test,
        verdict=verdict,
        flags=_flags(best) if verdict == "helps" else "",
    )


def _encode(
    judged: RetrievalSet,
    config: EncoderConfig,
    queries: Sequence[float],
    backbone: Backbone,
    context_config: ContextConfig,
    cache: Path | None,
    progress: ProgressListener,
) -> dict[float, EncodedSet]:
    """Return documents of one τ, encoded once, with the queries of every τ."""
    encoding = Encoding(
        encoder=replace(config, query_temperature=config.temperature),
        context="corpus" if config.needs_context else "none",
    )
    encoder, seconds = build_encoder(judged, encoding, context_config, backbone)
    encoded = encode_set(judged, encoding, encoder, progress, seconds, cache)
    sets: dict[float, EncodedSet] = {}
    for each in queries:
        asking = copy(encoder)
        asking.config = replace(encoder.config, query_temperature=each)
        sets[each] = encode_queries(asking, encoded, judged.queries)
    return sets


def _ndcg(judged: RetrievalSet, encoded: EncodedSet) -> Float64[np.ndarray, " Q"]:
    system = System(name="cairn/fused", encoding=Encoding(encoder=EncoderConfig()), ranking="fused")
    answers = SearchedSet(judged, encoded).rank(system, np.zeros(len(judged.query_ids), np.bool_))
    return document_measures(judged, [answer.documents for answer in answers])[NDCG]


def _half(num_queries: int, seed: int) -> Bool[np.ndarray, " Q"]:
    chooses_Q = np.zeros(num_queries, np.bool_)
    chooses_Q[np.random.default_rng([seed, 2]).permutation(num_queries)[: num_queries // 2]] = True
    return chooses_Q


def _by_length(
    judged: RetrievalSet,
    backbone: Backbone,
    values: Mapping[tuple[float, float], Float64[np.ndarray, " Q"]],
    base: tuple[float, float],
    seed: int,
) -> Iterator[LengthRow]:
    """Yield the gain of each τ on one side alone, for each class of lengths that has enough queries."""
    document_Q, query_Q = _lengths(judged, backbone)
    sides: tuple[tuple[Side, Int64[np.ndarray, " Q"], tuple[int, ...]], ...] = (
        ("documents", document_Q, DOCUMENT_EDGES),
        ("queries", query_Q, QUERY_EDGES),
    )
    for side, length_Q, edges in sides:
        for pair, own_Q in values.items():
            moved, still = (0, 1) if side == "documents" else (1, 0)
            if pair[still] != base[still] or pair[moved] == base[moved]:
                continue
            for start, end in zip((0, *edges), (*edges, None), strict=True):
                is_own_Q = (length_Q >= start) & (length_Q < (end or np.inf))
                if is_own_Q.sum() < MIN_CLASS:
                    continue
                compared = compare_paired(own_Q[is_own_Q], values[base][is_own_Q], seed=seed)
                yield LengthRow(
                    side=side,
                    temperature=pair[moved],
                    tokens=start,
                    end=end,
                    before=float(values[base][is_own_Q].mean()),
                    comparison=compared,
                    verdict=verdict_of(compared),
                )


def _lengths(
    judged: RetrievalSet, backbone: Backbone
) -> tuple[Int64[np.ndarray, " Q"], Int64[np.ndarray, " Q"]]:
    """Return the tokens of each query's first relevant document, and its own."""
    relevant = judged.judgements.take(judged.judgements.gain_J > 0)
    queries, first = np.unique(relevant.query_J, return_index=True)
    assert len(queries) == len(judged.query_ids), "every query of a set has a relevant document"
    texts = [judged.texts[int(position)] for position in relevant.document_J[first]]
    document_Q, query_Q = (
        np.diff(tokenize(backbone.tokenizer, each).text_offsets) for each in (texts, judged.queries)
    )
    return document_Q, query_Q


def _flags(best: TriedPair) -> str:
    return f"--temperature {best.documents:g} --query-temperature {best.queries:g}"
