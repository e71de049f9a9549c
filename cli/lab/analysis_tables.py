"""The report of `cairn analyse` for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cairn.cli.terminal import table, thousands

if TYPE_CHECKING:
    from cairn.pipeline.lab.analysis.attention_by_position import PositionShares
    from cairn.pipeline.lab.analysis.landmark_sides import LandmarkSides
    from cairn.pipeline.lab.analysis.low_pass import FilterRate, LayerFilter
    from cairn.pipeline.lab.analysis.report import ModelAnalysis, Similarity


def analysis_lines(analysis: ModelAnalysis) -> Iterator[str]:
    """Yield the tables, each below a line that says what it holds, and the findings first."""
    yield f"{analysis.model}, {thousands(analysis.texts)} texts"
    for finding in analysis.findings:
        yield f"- {finding}"
    yield "\nmean cosine of pieces of different texts (Length Collapse, figure 1c)"
    yield table(_similarity_rows(analysis.similarities))
    if analysis.rates:
        yield "\nsigma_a of the last global layer (theorem 3, eq. 4 and 5)"
        yield table(_rate_rows(analysis.rates))
    yield "\nlogarithm of what a layer leaves of the differences of tokens (theorem 2, figure 2)"
    yield table(_filter_rows(analysis.filters))
    if analysis.positions:
        first = analysis.positions[0]
        yield (
            f"\nattention of pooled positions to each tenth of texts of {first.tokens} tokens "
            "(landmark pooling, figure 2)"
        )
        yield table(_position_rows(analysis.positions))
    if analysis.sides:
        yield (
            f"\nhit@k of the chunks left and right of a landmark, among {analysis.sides[0].chunks} chunks "
            f"(landmark pooling, section 6.4); {thousands(analysis.sides[0].landmarks)} landmarks"
        )
        yield table(_side_rows(analysis.sides))


def _similarity_rows(rows: Sequence[Similarity]) -> Iterator[Sequence[object]]:
    yield ("tokens", "pieces", *(f"τ={each:g}" for each in rows[0].cosine), "flow", "whitened")
    for row in rows:
        cells = (*row.cosine.values(), row.flow, row.whitened)
        yield (row.tokens, row.pieces, *(f"{cell:.3f}" for cell in cells))


def _rate_rows(rows: Sequence[FilterRate]) -> Iterator[Sequence[object]]:
    yield ("tokens", "τ", "sigma_a", "95 % interval", "bound", "sigma_s", "sigma_q sigma_k", "τ_s")
    for row in rows:
        interval = f"{row.low:.3f} to {row.high:.3f}"
        cells = (row.bound, row.sigma_s, row.gaussian_sigma_s, row.tau_s)
        yield (
            row.tokens,
            f"{row.temperature:g}",
            f"{row.sigma_a:.3f}",
            interval,
            *(f"{cell:.3f}" for cell in cells),
        )


def _filter_rows(rows: Sequence[LayerFilter]) -> Iterator[Sequence[object]]:
    yield ("tokens", "layer", "whole layer", "all heads", "their bound", "one head", "its bound")
    for row in rows:
        cells = (row.whole_layer, row.heads, row.heads_bound, row.head, row.head_bound)
        name = f"{row.layer} (local)" if row.is_local else row.layer
        yield (row.tokens, name, *(f"{cell:+.2f}" for cell in cells))


def _position_rows(rows: Sequence[PositionShares]) -> Iterator[Sequence[object]]:
    yield ("layout", *(f"{tenth}." for tenth in range(1, len(rows[0].shares) + 1)), "special tokens")
    for row in rows:
        yield (row.layout, *(f"{share:.3f}" for share in row.shares), f"{row.special_share:.3f}")


def _side_rows(rows: Sequence[LandmarkSides]) -> Iterator[Sequence[object]]:
    yield ("k", "left", "right", "either", "one by chance", "either by chance")
    for row in rows:
        cells = (row.left, row.right, row.any, row.chance, row.chance_any)
        yield (row.k, *(f"{cell:.3f}" for cell in cells))
