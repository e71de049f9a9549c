"""The report of `cairn analyse`: pieces drawn from texts, the model run in fp32, findings in sentences.

Pieces have exact lengths, cut anywhere in the texts, as in ``length_collapse``. Attention by position and
landmark sides take the longest ones. Nothing is encoded with prefixes or a context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.context.whitening import Whitening
from cairn.pipeline.corpus.judged_files import corpus_files, read_columns
from cairn.pipeline.corpus.tokenization import TokenizedTexts
from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.lab.analysis.attention_by_position import PositionShares, measure_positions
from cairn.pipeline.lab.analysis.landmark_sides import MIN_CHUNKS, LandmarkSides, measure_sides
from cairn.pipeline.lab.analysis.length_collapse import (
    TEMPERATURES,
    Piece,
    draw_pieces,
    draw_texts,
    embed_pieces,
    lengths_read,
    mean_cosine,
    require_temperatures,
    row_of,
)
from cairn.pipeline.lab.analysis.low_pass import (
    FilterRate,
    LayerFilter,
    filter_rate,
    high_frequency_norm,
    layer_filters,
    standard_error,
)
from cairn.pipeline.lab.analysis.traced_pass import require_attention, trace_row, value_weights
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.types import ProgressListener, silent_progress

MAX_PIECES: Final = 100
"""Of each length, for cosines: the paper's number."""
MAX_TRACES: Final = 16
"""Of each length, for attention."""
DEFAULT_MAX_TOKENS: Final = 512
"""A matrix of attention of 512 tokens takes 40 ms to analyse, one of 2,048 over a second."""
CHUNK_TOKENS: Final = 32
"""Between landmarks, as in LMK §6.4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Similarity:
    """Mean cosine of pieces of different documents at one length: by τ, after flow, after whitening."""

    tokens: int
    pieces: int
    cosine: Mapping[float, float]
    flow: float
    whitened: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAnalysis:
    """What was measured; a list is empty where the model or the texts do not allow it."""

    model: str
    texts: int
    similarities: Sequence[Similarity]
    rates: Sequence[FilterRate]
    filters: Sequence[LayerFilter]
    positions: Sequence[PositionShares]
    sides: Sequence[LandmarkSides]
    findings: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return asdict(self)


def analyse_model(
    config: EncoderConfig,
    texts: Sequence[str],
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    chunk_tokens: int = CHUNK_TOKENS,
    seed: int = 0,
    progress: ProgressListener = silent_progress,
) -> ModelAnalysis:
    """Measure a model on texts of many lengths.

    Raises :class:`ConfigError` for a model that shows no attention and for a temperature out of bounds,
    :class:`SourceError` where fewer than two texts are long enough.
    """
    require_temperatures(temperatures)
    precise = replace(config.without_context, precision="fp32")
    backbone = require_attention(load_backbone(precise), config.model)
    generator = np.random.default_rng(seed)
    tokens = draw_texts(backbone, texts, generator)
    lengths = [length for length in lengths_read(precise, backbone) if length <= max_tokens]
    drawn = list(_drawn(tokens, lengths, generator))
    if not drawn:
        raise SourceError(
            f"an analysis must have two texts of {min(lengths, default=max_tokens)} tokens or more, got "
            "fewer; take longer texts"
        )
    norms = [torch.linalg.matrix_norm(each, ord=2) for each in value_weights(backbone)]
    rates: list[FilterRate] = []
    filters: list[LayerFilter] = []
    for number, pieces in enumerate(drawn, start=1):
        rates += _rates(backbone, pieces[:MAX_TRACES], temperatures)
        traces = [trace_row(backbone, row_of(backbone, piece)) for piece in pieces[:MAX_TRACES]]
        filters += layer_filters(traces, norms, len(pieces[0].ids))
        progress("attention", number, len(drawn), "lengths")
    similarities = _similarities(backbone, drawn, temperatures)
    longest = _that_fit(backbone, drawn[-1][:MAX_TRACES], chunk_tokens)
    sides = measure_sides(backbone, longest, chunk_tokens)
    positions = measure_positions(backbone, longest, chunk_tokens)
    found = [
        *_rate_findings(rates),
        *_similarity_findings(similarities),
        *(() if sides else (_too_short(longest, chunk_tokens),)),
    ]
    return ModelAnalysis(
        model=config.model,
        texts=len(texts),
        similarities=similarities,
        rates=rates,
        filters=filters,
        positions=positions,
        sides=sides,
        findings=found,
    )


def read_texts(path: Path, column: str = "text") -> list[str]:
    """Return the texts of a column of a file, or of all in a folder, that are not empty.

    Of a judged folder its corpus alone.
    """
    texts: list[str] = []
    for file in corpus_files(path):
        try:
            found = read_columns(file, (column,)).column(column).cast(pa.large_string()).to_pylist()
        except pa.ArrowException as error:
            raise SchemaError(f"column {column} of {file.name} must hold text; name another") from error
        texts += [text for text in found if text]
    return texts


def _drawn(
    tokens: TokenizedTexts, lengths: Sequence[int], generator: np.random.Generator
) -> Iterator[list[Piece]]:
    """Yield the pieces of each length that two documents or more have."""
    for length in lengths:
        pieces = draw_pieces(tokens, length, MAX_PIECES, generator)
        if len({piece.document for piece in pieces}) >= 2:
            yield pieces


def _rates(backbone: Transformer, pieces: Sequence[Piece], temperatures: Sequence[float]) -> list[FilterRate]:
    rates: list[FilterRate] = []
    for temperature in temperatures:
        traces = (trace_row(backbone, row_of(backbone, piece), temperature) for piece in pieces)
        own = [attention for trace in traces if (attention := trace.last_global) is not None]
        if own:
            values = [float(high_frequency_norm(each.weights()).mean()) for each in own]
            rates.append(filter_rate(own, values, len(pieces[0].ids)))
    return rates


def _similarities(
    backbone: Transformer, drawn: Sequence[Sequence[Piece]], temperatures: Sequence[float]
) -> list[Similarity]:
    plain = [embed_pieces(backbone, pieces) for pieces in drawn]
    whitening = Whitening.of(np.concatenate(plain), gamma=1.0)
    rows: list[Similarity] = []
    for pieces, vectors_MV in zip(drawn, plain, strict=True):
        cosine = partial(mean_cosine, document_M=np.array([piece.document for piece in pieces]))
        by_temperature = {each: cosine(embed_pieces(backbone, pieces, each)) for each in temperatures}
        rows.append(
            Similarity(
                tokens=len(pieces[0].ids),
                pieces=len(pieces),
                cosine=by_temperature,
                flow=cosine(embed_pieces(backbone, pieces, last_two=True)),
                whitened=cosine(whitening.apply(vectors_MV)),
            )
        )
    return rows


def _that_fit(backbone: Transformer, pieces: Sequence[Piece], chunk_tokens: int) -> list[list[int]]:
    """Return the pieces cut to whole chunks, so that a row has room for their landmarks."""
    room = (backbone.max_positions - 1) // (chunk_tokens + 1)
    num_chunks = min(room, len(pieces[0].ids) // chunk_tokens)
    kept = num_chunks * chunk_tokens if num_chunks else min(len(pieces[0].ids), backbone.max_positions - 2)
    return [piece.ids[:kept] for piece in pieces]


def _rate_findings(rates: Sequence[FilterRate]) -> Iterator[str]:
    if not rates:
        yield "the model has local layers only, so there is no attention to hold theorem 3 against"
        return
    for temperature in dict.fromkeys(rate.temperature for rate in rates):
        own = [rate for rate in rates if rate.temperature == temperature]
        if len(own) > 1:
            yield _trend(own[0], own[-1])
        above = [rate.tokens for rate in own if rate.sigma_a > rate.bound]
        if above:
            yield (
                f"τ = {temperature:g}: sigma_a is above the bound of theorem 3 at {len(above)} of {len(own)} "
                "lengths; it assumes logits that are Gaussian and independent, which these are not"
            )


def _trend(short: FilterRate, long: FilterRate) -> str:
    change = long.sigma_a - short.sigma_a
    half = 1.96 * float(np.hypot(standard_error(short.values), standard_error(long.values)))
    what = (
        f"from {short.sigma_a:.3f} at {short.tokens} tokens to {long.sigma_a:.3f} at {long.tokens} "
        f"({change:+.3f}, 95 % {change - half:+.3f} to {change + half:+.3f})"
    )
    if abs(change) <= half:
        return f"τ = {long.temperature:g}: sigma_a does not change with length beyond noise: {what}"
    if change > 0:
        return f"τ = {long.temperature:g}: sigma_a grows with length, against theorem 3: {what}"
    return f"τ = {long.temperature:g}: sigma_a falls with length, as theorem 3 says: {what}"


def _similarity_findings(rows: Sequence[Similarity]) -> Iterator[str]:
    for temperature in rows[0].cosine:
        first, last = rows[0].cosine[temperature], rows[-1].cosine[temperature]
        word = "more" if last > first else "less"
        yield (
            f"τ = {temperature:g}: longer texts are {word} alike: mean cosine {first:.3f} at "
            f"{rows[0].tokens} tokens, {last:.3f} at {rows[-1].tokens}"
        )


def _too_short(pieces: Sequence[Sequence[int]], chunk_tokens: int) -> str:
    return (
        f"left and right of landmarks: nothing, as {MIN_CHUNKS} chunks of {chunk_tokens} tokens must fit a "
        f"row, got {len(pieces[0])} tokens"
    )
