"""Rows through the layers of an engine under landmark attention, differentiable in all that is given.

    context vectors ─▶ all layers, by themselves ─▶ keys and values of every layer ─┐
    rows of chunks ─▶ embed ─▶ layer, behind its gates ◀────────────────────────────┴─▶ … ─▶ states

A family's final norm stands before all states that are returned, so that the first layers are a model of
their own. The vectors are those of :mod:`cairn.pipeline.model.landmark_reader`, to 1e-5 in fp32.

    N tokens of a batch, rows end to end    D width    H heads    C context vectors
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ModelError
from cairn.pipeline.lab.differentiable import Angles, Attend, DifferentiableOperations
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.model.engine.landmark_attention import Memory, cut_into_blocks, landmark_attention
from cairn.pipeline.model.engine.layer import run_layer
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.ragged import places_in_groups
from jaxtyping import Float

SCORES_PER_STEP: Final = 1 << 22
"""Scores of one head in a block; the graph keeps them all, so this bounds only what is gathered at a time."""


def run_rows(
    engine: Transformer,
    rows: PackedRows,
    layers: Sequence[int],
    *,
    gates_LH: Float[torch.Tensor, "layers H"],
    memory: Sequence[Memory] | None,
    context_gates_LH: Float[torch.Tensor, "layers H"],
    landmarks: bool,
) -> dict[int, Float[torch.Tensor, "N D"]]:
    """Return the states of all tokens after each of ``layers``, counted from 1.

    Without ``landmarks`` a row sees no other row of its window.
    """
    blocks = cut_into_blocks(
        rows.lengths_B,
        rows.windows_B if landmarks else np.arange(len(rows)),
        scores_per_step=SCORES_PER_STEP // engine.shape.num_heads,
        num_context=0 if memory is None else memory[0].key_GCd.shape[1],
        local_radius=engine.shape.local_radius,
        device=engine.device,
    )
    places_N = torch.from_numpy(places_in_groups(rows.lengths_B).astype(np.int64)).to(engine.device)
    angles = {is_local: table.at(places_N) for is_local, table in engine.rotary.items()}
    x_ND = _embed(engine, rows, places_N)
    found: dict[int, torch.Tensor] = {}
    for index in range(max(layers)):
        is_local = engine.layers[index].is_local
        attend = partial(
            landmark_attention,
            blocks=blocks,
            mix=_mix,
            gates_H=gates_LH[index],
            memory=None if memory is None else memory[index],
            context_gates_H=context_gates_LH[index],
            is_local=is_local,
        )
        x_ND = _run_layer(engine, index, x_ND, attend, angles.get(is_local))
        if index + 1 in layers:
            found[index + 1] = x_ND if engine.final_norm is None else engine.final_norm(x_ND)
    return found


def remember(
    engine: Transformer, context_CD: Float[torch.Tensor, "C D"], num_layers: int
) -> tuple[Memory, ...]:
    """Run context vectors through the first layers and return each layer's keys and values."""
    memories: list[Memory] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        is_local = engine.layers[len(memories)].is_local
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        memories.append(Memory(key_GCd=key, value_GCd=value))
        if is_local:
            # Without a position a vector is in no other's window: its own value comes out.
            return value.repeat_interleave(len(query) // len(value), dim=0).transpose(0, 1)
        return _mix(query[None], key[None], value[None], None)[0]

    x_CD = engine.norm_embeddings(engine.embed_context(context_CD))
    for index in range(num_layers):
        x_CD = _run_layer(engine, index, x_CD, attend)
    return tuple(memories)


def _embed(engine: Transformer, rows: PackedRows, places_N: torch.Tensor) -> torch.Tensor:
    longest = int(rows.lengths_B.max())
    if longest > engine.max_positions:
        raise ModelError(
            f"a row must have at most {engine.max_positions} tokens, got {longest}; choose a smaller interval"
        )
    ids_N = torch.from_numpy(rows.ids_N.astype(np.int64)).to(engine.device)
    return engine.norm_embeddings(engine.embedding.look_up(ids_N, places_N))


def _run_layer(
    engine: Transformer, index: int, x_ND: torch.Tensor, attend: Attend, angles: Angles | None = None
) -> torch.Tensor:
    operations = DifferentiableOperations(engine.shape, attend, angles)
    return run_layer(engine.layers[index], x_ND, operations, norm_first=engine.shape.norm_first)


def _mix(
    query_BHQd: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    mask = None if bias is None else bias.to(query_BHQd.dtype)
    shares_keys = key.shape[1] != query_BHQd.shape[1]
    return F.scaled_dot_product_attention(
        query_BHQd, key, value, attn_mask=mask, enable_gqa=shares_keys
    ).transpose(1, 2)
