"""M2: rows of token ids to one embedding a chunk (CDE §4.2, eq. 5 and 6).

The corpus's context stands in front where there is one. Pure: it takes a layout and gives arrays, and knows
no text, file or table. Rows of one attention temperature are batched by length, and every result is put back
in its chunk's place. Rows that see one another, the windows of landmark attention, are always in one batch.
Embeddings are float32 and not normalised.

A backbone divides every attention logit of a call by one τ (TempScale), in all layers. It is one for all
rows, another for queries, or one that falls with a row's length. Source: Zhou et al., "Length-Induced
Embedding Collapse in Transformer-based Models", eq. 6; §5.1 takes τ = 0.8 out of 0.1 to 1.0, appendix E.6
finds a lower τ better for longer texts and another one for queries. One τ is the default, and no schedule is
built in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from cairn.pipeline.model.batching import run_in_batches
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.landmark_reader import LandmarkReader
from cairn.pipeline.model.landmarks import Rows
from cairn.pipeline.model.pooling import pool_spans
from cairn.pipeline.ragged import ranges
from jaxtyping import Float, Float32, Float64, Int64

SMALL_BATCH_TOKENS: Final = 1_024
WIDTH_STEP: Final = 8
"""A small batch, such as the queries of a server, is this many tokens wide or a multiple.

oneDNN builds and keeps its products shape by shape, which costs a query of a new length milliseconds and the
process megabytes.
"""


def embed_chunks(
    backbone: Backbone,
    rows: Rows,
    *,
    batch_tokens: int,
    temperature: float | Float64[np.ndarray, " R"] = 1.0,
    context_CD: Float32[np.ndarray, "C D"] | None = None,
    token_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    landmarks: LandmarkReader | None = None,
    on_chunks: Callable[[Int64[np.ndarray, " m"]], None] | None = None,
    keep_own: Callable[[Int64[np.ndarray, " m"], Float[torch.Tensor, "T D"]], None] | None = None,
) -> Float32[np.ndarray, "M E"]:
    """Embed every chunk of a layout, in the layout's order.

    ``on_chunks`` hears the indices of each batch's chunks when they are done.
    ``temperature`` divides attention logits (TempScale), in all rows alike or in each row by its own; rows of
    one window share theirs. ``token_head`` rewrites hidden states, position by position, before they are
    pooled (latent attention). ``landmarks`` reads a layout with windows, and has its own context; it must be
    made of the same backbone. ``keep_own`` hears the chunks of each batch and the last states of their own
    tokens, one chunk after another.
    """
    assert (landmarks is None) == (rows.window_R is None), (
        "a layout with windows and a reader of landmarks belong together"
    )
    embeddings_ME = np.empty((len(rows.pooled_row), backbone.embedding_dim), np.float32)
    lengths_R = np.diff(rows.row_offsets)
    chunks_by_row = np.argsort(rows.pooled_row, kind="stable")
    first_chunk_R1 = np.searchsorted(rows.pooled_row[chunks_by_row], np.arange(len(lengths_R) + 1))
    temperature_R = np.broadcast_to(np.asarray(temperature, np.float64), lengths_R.shape)

    @torch.inference_mode()
    def run(batch_B: Int64[np.ndarray, " B"]) -> Int64[np.ndarray, " m"]:
        width, one_temperature = int(lengths_R[batch_B].max()), float(temperature_R[batch_B[0]])
        if landmarks is None and len(batch_B) * width <= SMALL_BATCH_TOKENS:
            width = min(-(-width // WIDTH_STEP) * WIDTH_STEP, max(width, backbone.max_positions))
        ids_BT, lengths_B = pad_rows(rows, batch_B, backbone.pad_id, width)
        if landmarks is None or rows.window_R is None:
            hidden_BTD = backbone.hidden_states(ids_BT, lengths_B, context_CD, one_temperature)
        else:
            hidden_BTD = landmarks.hidden_states(ids_BT, lengths_B, rows.window_R[batch_B], one_temperature)
        num_chunks_B = first_chunk_R1[batch_B + 1] - first_chunk_R1[batch_B]
        chunk_M = chunks_by_row[ranges(first_chunk_R1[batch_B], num_chunks_B)]
        row_M = np.repeat(np.arange(len(batch_B)), num_chunks_B)
        spans = (
            torch.from_numpy(x).to(hidden_BTD.device)
            for x in (row_M, rows.pooled_start[chunk_M], rows.pooled_end[chunk_M])
        )
        if keep_own is not None:
            places = ranges(row_M * hidden_BTD.shape[1] + rows.own_start[chunk_M], rows.num_own[chunk_M])
            keep_own(chunk_M, hidden_BTD.flatten(0, 1)[torch.from_numpy(places).to(hidden_BTD.device)])
        if token_head is not None:
            hidden_BTD = token_head(hidden_BTD)
        embeddings_ME[chunk_M] = backbone.project(pool_spans(hidden_BTD, *spans)).cpu().numpy()
        return chunk_M

    extra_tokens = 0 if context_CD is None else len(context_CD)
    for one_temperature in np.unique(temperature_R):
        rows_G = np.flatnonzero(temperature_R == one_temperature)
        batches = run_in_batches(
            lengths_R[rows_G],
            batch_tokens,
            lambda batch_B, rows_G=rows_G: run(rows_G[batch_B]),
            backbone.device,
            extra_tokens=extra_tokens,
            window_R=None if rows.window_R is None else rows.window_R[rows_G],
        )
        for finished in batches:
            if on_chunks is not None:
                on_chunks(finished)
    return embeddings_ME


def pad_rows(
    rows: Rows, batch_B: Int64[np.ndarray, " B"], pad_id: int, width: int | None = None
) -> tuple[Int64[np.ndarray, "B T"], Int64[np.ndarray, " B"]]:
    """Gather rows into a rectangle as wide as told, else as the longest.

    Validity is by true length, as texts may use the padding token.
    """
    starts_B, lengths_B = rows.row_offsets[batch_B], rows.row_offsets[batch_B + 1] - rows.row_offsets[batch_B]
    positions_T = np.arange(int(lengths_B.max()) if width is None else width)
    source_BT = np.minimum(starts_B[:, None] + positions_T, len(rows.ids) - 1)
    return np.where(positions_T < lengths_B[:, None], rows.ids[source_BT], pad_id).astype(np.int64), lengths_B


def row_temperatures(
    lengths_R: Int64[np.ndarray, " R"], temperature: float, by_length: Sequence[tuple[int, float]]
) -> Float64[np.ndarray, " R"]:
    """Return τ of each row: that of the last step its tokens reach, ``temperature`` below the first.

    Steps ascend by length.
    """
    step_R = np.searchsorted(np.array([length for length, _ in by_length], np.int64), lengths_R, side="right")
    return np.array([temperature, *(step for _, step in by_length)], np.float64)[step_R]
