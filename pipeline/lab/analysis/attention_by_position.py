"""Where a pooling's positions look: attention over the positions of a long text (LMK figure 2).

    cls    [CLS] t1 … tn [SEP]                 the [CLS] token alone is pooled
    mean   [CLS] t1 … tn [SEP]                 every position of the row is pooled
    lmk    [CLS] z1 [LMK] z2 [LMK] … [LMK]     the landmarks are pooled

The last global layer's attention of the pooled positions, mean over heads and positions, is cut to the tokens
of the text, made to sum to 1 and summed over tenths of the text. Even attention gives each a tenth; a share
that falls from the first on is the bias that the paper finds for [CLS]. What goes to special tokens is
counted apart: in BERT's family most heads rest on them.

Source: Doshi et al., "LMK > CLS: Landmark Pooling for Dense Embeddings", §3.1, figure 2. Differs: lengths the
model reads, not 8,192; specials are left out; the mean is a layout of its own.

    T tokens of a row    H heads    B bins
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from cairn.pipeline.lab.analysis.traced_pass import trace_row
from cairn.pipeline.model.engine.transformer import Transformer
from jaxtyping import Bool, Float, Float64

Layout = Literal["cls", "mean", "lmk"]
LAYOUTS: Final[tuple[Layout, ...]] = ("cls", "mean", "lmk")
NUM_BINS: Final = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionShares:
    """Attention that pooled positions of one layout pay to each tenth of a text, mean over texts.

    ``special_share`` is what goes to [CLS], landmarks and the end, before the rest is made to sum to 1.
    """

    layout: Layout
    tokens: int
    texts: int
    shares: tuple[float, ...]
    special_share: float


def position_shares(
    weights_HTT: Float[np.ndarray, "H T T"],
    is_pooled_T: Bool[np.ndarray, " T"],
    is_text_T: Bool[np.ndarray, " T"],
    num_bins: int = NUM_BINS,
) -> tuple[Float64[np.ndarray, " B"], float]:
    """Return the share of each equal part of the text, and what goes to other tokens."""
    received_T = weights_HTT[:, is_pooled_T].mean(axis=(0, 1), dtype=np.float64)
    own_T = received_T[is_text_T]
    bin_T = np.arange(len(own_T)) * num_bins // len(own_T)
    shares_B = np.bincount(bin_T, weights=own_T, minlength=num_bins)
    return shares_B / shares_B.sum(), float(1.0 - own_T.sum())


def lay_out(
    backbone: Transformer, ids: Sequence[int], layout: Layout, chunk_tokens: int
) -> tuple[list[int], Bool[np.ndarray, " T"], Bool[np.ndarray, " T"]]:
    """Return a row of a layout, which positions are pooled, and which are text."""
    row = [] if backbone.cls_id is None else [backbone.cls_id]
    is_text = [False] * len(row)
    step = chunk_tokens if layout == "lmk" else len(ids)
    for start in range(0, len(ids), step):
        own = ids[start : start + step]
        row += [*own, backbone.landmark_id]
        is_text += [True] * len(own) + [False]
    is_text_T = np.array(is_text)
    if layout == "mean":
        return row, np.ones(len(row), np.bool_), is_text_T
    is_pooled_T = np.zeros(len(row), np.bool_)
    if layout == "cls":
        is_pooled_T[0] = True
    else:
        is_pooled_T = ~is_text_T
        is_pooled_T[0] &= backbone.cls_id is None
    return row, is_pooled_T, is_text_T


def measure_positions(
    backbone: Transformer, pieces: Sequence[Sequence[int]], chunk_tokens: int
) -> list[PositionShares]:
    """Measure every layout that the model has on pieces of one length; none in a model of local layers."""
    measured: list[PositionShares] = []
    for layout in LAYOUTS:
        if layout == "cls" and backbone.cls_id is None:
            continue
        own: list[tuple[np.ndarray, float]] = []
        for ids in pieces:
            row, is_pooled_T, is_text_T = lay_out(backbone, ids, layout, chunk_tokens)
            attention = trace_row(backbone, row).last_global
            if attention is None:
                return []
            own.append(position_shares(attention.weights().cpu().numpy(), is_pooled_T, is_text_T))
        measured.append(
            PositionShares(
                layout=layout,
                tokens=len(pieces[0]),
                texts=len(pieces),
                shares=tuple(np.mean([shares for shares, _ in own], axis=0).tolist()),
                special_share=float(np.mean([special for _, special in own])),
            )
        )
    return measured
