"""Landmark attention: a token sees its own chunk, the landmarks of other chunks, and the context.

    own       [CLS] z z z [LMK]      the row the token stands in, as in chunk attention
    others    [LMK] [LMK] …          the landmarks of its window's other rows, behind a gate of each head
    context   c c c …                the corpus's context vectors, behind a gate of their own, no position

    softmax(q·k / (τ √d) + gate)·v over all three at once; the gate of own keys is 0

With chunks of g tokens a token of a window of n tokens has about g + n / g keys, so the cost is nearly linear
in the length. Rows are taken in blocks of nearly one shape: the keys of a block are gathered side by side and
multiplied densely, in steps that stay in a CPU's cache. Every token lies in the batch once, end to end, so
rows of unequal length waste nothing outside a block.

Pure and differentiable, in gates as in queries, keys and values, as long as the ``mix`` it is given is.
Source: none; the layout is LMK's with positions restarting in every chunk, the gate is a bias on the logits.
Differs from grouped or landmark-retrieving attention: no second softmax, no choice of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from cairn.pipeline.model.engine.attention import attend, bias_where
from cairn.pipeline.model.engine.packed import Packed
from cairn.pipeline.model.engine.pattern import Batch, PassSettings
from jaxtyping import Bool, Float, Float32, Int64

MIN_SHARE_OF_SCORES: Final = 0.5
"""A row that has less than this share of the scores of its block's first row opens a block of its own.

The rest would be padding.
"""

Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Attention of ``B H Q d`` over ``B G S d`` with a bias that broadcasts to ``B H Q S``, to ``B Q H d``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """R rows attended to together: T own tokens a row, where padding repeats one, and L landmarks of others.

    Indices count the batch's tokens.
    Biases are 0 where a query sees a key and -inf elsewhere, None where all is seen; ``local_bias`` keeps to
    the radius of local layers. ``rows_R`` are the rows' numbers in the batch.
    """

    rows_R: Int64[torch.Tensor, " R"]
    keys_RS: Int64[torch.Tensor, "R S"]
    num_own: int
    is_token_RT: Bool[torch.Tensor, "R T"] | None
    own_bias: Float[torch.Tensor, "_R 1 1 T"] | None
    local_bias: Float[torch.Tensor, "_R 1 _Q T"] | None
    others_bias: Float[torch.Tensor, "R 1 1 L"] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Keys and values of C context vectors in one layer.

    ``bias_BC`` is added to the logits of each of a batch's B rows; None adds nothing.
    """

    key_GCd: Float[torch.Tensor, "G C d"]
    value_GCd: Float[torch.Tensor, "G C d"]
    bias_BC: Float[torch.Tensor, "B C"] | None = None


def cut_into_blocks(
    lengths_B: Int64[np.ndarray, " B"],
    windows_B: Int64[np.ndarray, " B"],
    *,
    scores_per_step: int,
    num_context: int = 0,
    local_radius: int | None = None,
    device: torch.device,
) -> tuple[Block, ...]:
    """Group the rows of a batch; ``windows`` numbers them, rows of one window stand together.

    ``scores_per_step`` is how many scores of one head a block may have; a row that has more is a block of its
    own.
    """
    _, first_W, window_B, size_W = np.unique(
        windows_B, return_index=True, return_inverse=True, return_counts=True
    )
    size_B, first_B = size_W[window_B], first_W[window_B]
    # Sizes are compared by their power of two, so that rows of one length still stand together.
    order = np.lexsort((-lengths_B, -np.ceil(np.log2(size_B))))
    scores_B = lengths_B * (lengths_B + size_B - 1 + num_context)
    ends_B = np.cumsum(lengths_B)
    blocks: list[Block] = []
    start = 0
    while start < len(order):
        longest, most = int(lengths_B[order[start]]), int(size_B[order[start]])
        end = start + 1
        while end < len(order) and scores_B[order[end]] >= MIN_SHARE_OF_SCORES * scores_B[order[start]]:
            longest, most = max(longest, int(lengths_B[order[end]])), max(most, int(size_B[order[end]]))
            if (end + 1 - start) * longest * (longest + most - 1 + num_context) > scores_per_step:
                break
            end += 1
        rows = order[start:end]
        blocks.append(
            _block(ends_B, lengths_B[rows], size_B[rows], first_B[rows], rows, local_radius, device)
        )
        start = end
    return tuple(blocks)


def _block(
    ends_B: Int64[np.ndarray, " B"],
    lengths_R: Int64[np.ndarray, " R"],
    sizes_R: Int64[np.ndarray, " R"],
    first_R: Int64[np.ndarray, " R"],
    rows_R: Int64[np.ndarray, " R"],
    local_radius: int | None,
    device: torch.device,
) -> Block:
    num_own, num_others = int(lengths_R.max()), int(sizes_R.max()) - 1
    places_T, ranks_L = np.arange(num_own), np.arange(num_others)
    is_token_RT = places_T < lengths_R[:, None]
    own_RT = (ends_B[rows_R] - lengths_R)[:, None] + np.minimum(places_T, lengths_R[:, None] - 1)
    is_other_RL = ranks_L < sizes_R[:, None] - 1
    # The other rows of the window in order, leaving the row itself out.
    other_RL = first_R[:, None] + ranks_L + (ranks_L >= (rows_R - first_R)[:, None])
    others_RL = ends_B[np.where(is_other_RL, other_RL, rows_R[:, None])] - 1
    is_padded = not is_token_RT.all()
    own_bias = _bias(is_token_RT[:, None, None], device) if is_padded else None
    local_bias = own_bias
    if local_radius is not None and num_own > local_radius + 1:
        near_TT = np.abs(places_T[:, None] - places_T) <= local_radius
        # Padding sees the row's first token, so that it has some key.
        seen = (
            (near_TT & is_token_RT[:, None]) | (~is_token_RT[:, :, None] & (places_T == 0))
            if is_padded
            else near_TT[None]
        )
        local_bias = _bias(seen[:, None], device)
    return Block(
        rows_R=torch.from_numpy(rows_R).to(device),
        keys_RS=torch.from_numpy(np.concatenate([own_RT, others_RL], axis=1)).to(device),
        num_own=num_own,
        is_token_RT=torch.from_numpy(is_token_RT).to(device) if is_padded else None,
        own_bias=own_bias,
        local_bias=local_bias,
        others_bias=None if is_other_RL.all() else _bias(is_other_RL[:, None, None], device),
    )


def _bias(seen: Bool[np.ndarray, "*shape"], device: torch.device) -> Float[torch.Tensor, "*shape"]:
    return bias_where(torch.from_numpy(seen).to(device))


def landmark_attention(
    query_NHd: Float[torch.Tensor, "N H d"],
    key_NGd: Float[torch.Tensor, "N G d"],
    value_NGd: Float[torch.Tensor, "N G d"],
    blocks: Sequence[Block],
    *,
    mix: Mix,
    gates_H: Float[torch.Tensor, " H"] | None,
    memory: Memory | None = None,
    context_gates_H: Float[torch.Tensor, " H"] | None = None,
    is_local: bool = False,
) -> Float[torch.Tensor, "N H d"]:
    """Mix the values of a batch's N tokens.

    ``gates_H`` = None shows no other chunk, ``memory`` = None no context.
    """
    mixed_NHd = torch.empty_like(query_NHd, memory_format=torch.contiguous_format)
    for block in blocks:
        tokens_RT = block.keys_RS[:, : block.num_own]
        keys_RS = tokens_RT if gates_H is None else block.keys_RS
        key, value = (x[keys_RS].transpose(1, 2) for x in (key_NGd, value_NGd))
        if memory is not None:
            key = torch.cat([key, memory.key_GCd.expand(len(key), -1, -1, -1)], dim=2)
            value = torch.cat([value, memory.value_GCd.expand(len(value), -1, -1, -1)], dim=2)
        bias = _logit_bias(block, gates_H, context_gates_H, memory, is_local=is_local)
        mixed_RTHd = mix(query_NHd[tokens_RT].transpose(1, 2), key, value, bias)
        if block.is_token_RT is None:
            mixed_NHd[tokens_RT] = mixed_RTHd
        else:
            mixed_NHd[tokens_RT[block.is_token_RT]] = mixed_RTHd[block.is_token_RT]
    return mixed_NHd


def _logit_bias(
    block: Block,
    gates_H: Float[torch.Tensor, " H"] | None,
    context_gates_H: Float[torch.Tensor, " H"] | None,
    memory: Memory | None,
    *,
    is_local: bool,
) -> Float[torch.Tensor, "_R _H _Q S"] | None:
    num_context = 0 if memory is None else memory.key_GCd.shape[1]
    own_bias = block.local_bias if is_local else block.own_bias
    num_others = block.keys_RS.shape[1] - block.num_own
    parts: list[torch.Tensor] = []
    if gates_H is not None and num_others:
        gates = gates_H.float()[None, :, None, None]
        parts.append(
            gates.expand(-1, -1, -1, num_others) if block.others_bias is None else gates + block.others_bias
        )
    if context_gates_H is not None and num_context:
        context = context_gates_H.float()[None, :, None, None].expand(-1, -1, -1, num_context)
        if memory is not None and memory.bias_BC is not None:
            context = context + memory.bias_BC[block.rows_R][:, None, None]
        parts.append(context)
    if not parts:
        return own_bias
    own = parts[0].new_zeros(1, 1, 1, block.num_own) if own_bias is None else own_bias
    shape = [max(sizes) for sizes in zip(*((*part.shape[:3],) for part in (own, *parts)), strict=True)]
    return torch.cat([part.expand(*shape, -1) for part in (own, *parts)], dim=3)


SCORES_PER_STEP: Final = 1 << 19
"""Scores of all heads made at a time on a CPU; keys are gathered beside them, and both stay in the cache.

Twice as many cost 10 % more.
"""

CUDA_SCORES_PER_STEP: Final = 1 << 28
"""A GPU's fused kernel stores no scores; this bounds the keys gathered for a step to a few gigabytes."""


class LandmarkWindows(Packed):
    """Packed rows without a lead that see their window's landmarks and the context.

    No window leaves its batch. Queries and landmarks are turned by their place in their own row, context not.
    ``windows`` numbers each row's window. Gates are one a layer and head, towards landmarks and context.
    """

    def __init__(
        self,
        batch: Batch,
        windows_B: Int64[np.ndarray, " B"],
        settings: PassSettings,
        *,
        landmark_gates_LH: Float32[torch.Tensor, "layers H"],
        context_gates_LH: Float32[torch.Tensor, "layers H"],
        memory: Sequence[Memory] | None,
    ) -> None:
        assert batch.num_lead == 0, "context comes to landmark attention as a memory, not as a lead"
        super().__init__(batch, settings)
        self._landmark_gates_LH = landmark_gates_LH
        self._context_gates_LH = context_gates_LH
        self._memory = memory
        self._blocks = cut_into_blocks(
            batch.lengths_B,
            windows_B,
            scores_per_step=(SCORES_PER_STEP if settings.device.type == "cpu" else CUDA_SCORES_PER_STEP)
            // settings.shape.num_heads,
            num_context=0 if memory is None else memory[0].key_GCd.shape[1],
            local_radius=settings.shape.local_radius,
            device=settings.device,
        )

    def attend(
        self,
        padded_NPd: Float[torch.Tensor, "N P d"],
        layer: int,
        /,
        *,
        is_local: bool,
        drop_lead: bool,  # noqa: ARG002 - no lead
    ) -> torch.Tensor:
        shape = self._settings.shape
        query, key, value = padded_NPd.split(shape.heads_by_kind, dim=1)
        mixed_NHd = landmark_attention(
            query,
            key,
            value,
            self._blocks,
            mix=self._mix_rows,
            gates_H=self._landmark_gates_LH[layer],
            memory=None if self._memory is None else self._memory[layer],
            context_gates_H=self._context_gates_LH[layer],
            is_local=is_local,
        )
        return mixed_NHd.flatten(1)

    def _mix_rows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return attend(query, key, value, bias, self._settings.workspace, self._settings.temperature)
