"""softmax(q·k / (τ √d) + bias)·v on the fastest kernel; every choice gives the same numbers up to rounding.

That is torch's fused kernel, except on a CPU in bf16: there the processor's bf16 products outrun it at every
length, so scores are made block by block, small enough to stay in the cache, with the softmax between the
products in float32. A single query would take less time in the fused kernel, but a text's vector would then
depend on how many texts are encoded beside it: their rounding differs by 1e-3 in bf16.
"""

from __future__ import annotations

import math
import threading
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from jaxtyping import Bool, Float, Float32

SCORES_PER_STEP: Final = 1 << 20
"""Scores made at a time by plain products: 128 queries of 8,192 keys, or many heads of short rows."""

OWN_SOFTMAX_MIN_KEYS: Final = 1 << 10
"""From this many keys on the bf16 softmax costs a fifth less than one with a copy before and after.

It computes in float32 inside. On shorter rows it costs up to three times more, by how their lengths divide.
"""

FLOATS_PER_REGISTER: Final = 16
"""Of AVX-512. A softmax in place is slower by up to three quarters on rows that end inside a register.

On others it is faster by a twentieth than one to memory of its own.
"""


class Workspace(threading.local):
    """Buffers of a forward pass by purpose, kept between passes, as large as the largest batch needed.

    On a CPU a batch's intermediate results are megabytes that the allocator would map and unmap at every
    layer, and touching fresh pages costs about a seventh of the whole time. What one ``take`` returned is
    overwritten by the next of the same purpose in the same thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory of a shape."""
        size = math.prod(shape)
        buffer = self._buffers.get((purpose, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype, device=self._device)
            self._buffers[purpose, dtype] = buffer
        return buffer[:size].view(shape)


def attend(
    query_BHQd: Float[torch.Tensor, "B H Q d"],
    key_BGSd: Float[torch.Tensor, "B G S d"],
    value_BGSd: Float[torch.Tensor, "B G S d"],
    bias: Float[torch.Tensor, "_B _H _Q S"] | None,
    workspace: Workspace,
    temperature: float = 1.0,
) -> Float[torch.Tensor, "B Q H d"]:
    """Mix values; ``bias`` is added to the logits, -inf where a query does not see a key.

    It leaves every query at least one key.
    ``temperature`` divides the logits (TempScale). Where there are fewer keys' heads than queries', each
    serves as many neighbouring ones.
    """
    scale = query_BHQd.shape[-1] ** -0.5 / temperature
    num_shared = query_BHQd.shape[1] // key_BGSd.shape[1]
    if num_shared > 1:
        key_BGSd, value_BGSd = (x.repeat_interleave(num_shared, dim=1) for x in (key_BGSd, value_BGSd))
    if query_BHQd.device.type == "cpu" and query_BHQd.dtype == torch.bfloat16:
        return _plain_attention(query_BHQd, key_BGSd, value_BGSd, bias, scale, workspace)
    mask = None if bias is None else bias.to(query_BHQd.dtype)
    return F.scaled_dot_product_attention(
        query_BHQd, key_BGSd, value_BGSd, attn_mask=mask, scale=scale
    ).transpose(1, 2)


def _plain_attention(
    query_BHQd: torch.Tensor,
    key_BHSd: torch.Tensor,
    value_BHSd: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    workspace: Workspace,
) -> torch.Tensor:
    num_rows, num_heads, num_queries, head_dim = query_BHQd.shape
    num_keys = key_BHSd.shape[2]
    out = workspace.take("mixed", (num_rows, num_queries, num_heads, head_dim), query_BHQd.dtype)
    out_BHQd = out.transpose(1, 2)
    if num_rows * num_heads * num_queries * num_keys <= SCORES_PER_STEP:
        _mix(query_BHQd, key_BHSd, value_BHSd, bias, scale, workspace, out_BHQd)
        return out
    rows_a_step = max(1, SCORES_PER_STEP // (num_heads * num_queries * num_keys))
    queries_a_step = min(num_queries, max(1, SCORES_PER_STEP // num_keys))
    # Several rows go whole; a row too large for one step goes head by head, and a head in blocks of queries.
    heads_a_step = min(num_heads, max(1, SCORES_PER_STEP // (queries_a_step * num_keys)))
    whole_bias = None if bias is None else bias.expand(num_rows, num_heads, num_queries, num_keys)
    for row in range(0, num_rows, rows_a_step):
        for head in range(0, num_heads, heads_a_step):
            part = (slice(row, row + rows_a_step), slice(head, head + heads_a_step))
            for first in range(0, num_queries, queries_a_step):
                step = (*part, slice(first, first + queries_a_step))
                step_bias = None if whole_bias is None else whole_bias[step]
                keys, values = key_BHSd[part], value_BHSd[part]
                _mix(query_BHQd[step], keys, values, step_bias, scale, workspace, out_BHQd[step])
    return out


def _mix(
    query_BHQd: torch.Tensor,
    key_BHSd: torch.Tensor,
    value_BHSd: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    workspace: Workspace,
    out_BHQd: torch.Tensor,
) -> None:
    """Make one step's scores whole and write its mixed values to ``out``."""
    num_rows, num_heads, num_queries, head_dim = query_BHQd.shape
    num_products, num_keys, dtype = num_rows * num_heads, key_BHSd.shape[2], query_BHQd.dtype
    query = query_BHQd.reshape(num_products, num_queries, head_dim)
    key, value = (x.reshape(num_products, num_keys, head_dim) for x in (key_BHSd, value_BHSd))
    size = (num_products, num_queries, num_keys)
    scores = workspace.take("scores", size, dtype)
    if num_products == 1:
        # A batch of one product is slower than the product itself, here by half, below by a third.
        scores[0].addmm_(query[0], key[0].t(), beta=0, alpha=scale)
    else:
        scores.baddbmm_(query, key.transpose(1, 2), beta=0, alpha=scale)
    if bias is None and num_keys >= OWN_SOFTMAX_MIN_KEYS:
        torch.softmax(scores, dim=-1, out=scores)
    else:
        exact = workspace.take("exact scores", size, torch.float32).copy_(scores)
        if bias is not None:
            exact.view(num_rows, num_heads, num_queries, num_keys).add_(bias)
        target = "exact scores" if num_keys % FLOATS_PER_REGISTER == 0 else "weights"
        weights = torch.softmax(exact, dim=-1, out=workspace.take(target, size, torch.float32))
        scores.copy_(weights)
    mixed = workspace.take("mixed part", (num_products, num_queries, head_dim), dtype)
    if num_products == 1:
        torch.mm(scores[0], value[0], out=mixed[0])
    else:
        torch.bmm(scores, value, out=mixed)
    out_BHQd.copy_(mixed.view(num_rows, num_heads, num_queries, head_dim))


BUCKETS: Final = 32
"""Numbers a head has for distances: half for keys behind the query, half for keys before it."""
_EXACT_BUCKETS: Final = 8
"""The distances that have a bucket each, on either side; further ones share them by their logarithm."""
_FURTHEST: Final = 128
"""From this distance on all keys of a side are in one bucket."""


class RelativeBias:
    """Learned numbers that all layers add to their logits, by head and by distance of query and key.

    Source: Raffel et al., T5, §2.1, for distances on both sides, as MPNet has it.
    """

    def __init__(self, numbers_RH: Float32[torch.Tensor, "R H"], max_positions: int) -> None:
        self._numbers_RH = numbers_RH
        ahead_W = torch.arange(1 - max_positions, max_positions)
        far_W = (ahead_W.abs().clamp(min=1) / _EXACT_BUCKETS).log() / math.log(_FURTHEST / _EXACT_BUCKETS)
        side = BUCKETS // 2
        shared_W = (_EXACT_BUCKETS + (far_W * (side - _EXACT_BUCKETS)).long()).clamp(max=side - 1)
        bucket_W = torch.where(ahead_W.abs() < _EXACT_BUCKETS, ahead_W.abs(), shared_W)
        self._bucket_W = (bucket_W + (ahead_W > 0) * side).to(numbers_RH.device)

    def of_rows(
        self, width: int, num_unplaced: int, temperature: float = 1.0
    ) -> Float32[torch.Tensor, "1 H S S"]:
        """Return the bias of rows of ``width`` vectors; it is 0 for those in front without a position."""
        num_placed, middle = width - num_unplaced, len(self._bucket_W) // 2
        bucket_W = self._bucket_W[middle - num_placed + 1 : middle + num_placed]
        by_distance_HW = F.embedding(bucket_W, self._numbers_RH).t() / temperature
        # The last query's keys are all behind it, and each query before it sees them one place nearer.
        bias_HPP = by_distance_HW.unfold(1, num_placed, 1).flip(1)
        return F.pad(bias_HPP, (num_unplaced, 0, num_unplaced, 0))[None]


def bias_where(visible: Bool[torch.Tensor, "*shape"]) -> Float32[torch.Tensor, "*shape"]:
    """Return 0 where visible, -inf elsewhere; float32, as a sum of two formats takes several times longer."""
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, float("-inf"))
