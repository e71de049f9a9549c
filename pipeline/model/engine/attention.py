"""softmax(q·k / (τ √d) + bias)·v on the fastest kernel; every choice gives the same numbers up to rounding.

That is torch's fused kernel, except on a CPU in bf16: there the processor's bf16 products outrun it at every
length, so scores are made block by block, small enough to stay in the cache, with the softmax between the
products in float32. A single query would take less time in the fused kernel, but a text's vector would then
depend on how many texts are encoded beside it: their rounding differs by 1e-3 in bf16.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from jaxtyping import Bool, Float, Int64

from pipeline.model.engine.workspace import Workspace

SCORES_PER_STEP: Final = 1 << 20
"""Scores made at a time by plain products: 128 queries of 8,192 keys, or many heads of short rows."""

OWN_SOFTMAX_MIN_KEYS: Final = 1 << 10
"""From this many keys on the bf16 softmax costs a fifth less than one with a copy before and after.

It computes in float32 inside. On shorter rows it costs up to three times more, by how their lengths divide.
"""


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
    rows_a_step = max(1, SCORES_PER_STEP // (num_heads * num_queries * num_keys))
    queries_a_step = min(num_queries, max(1, SCORES_PER_STEP // num_keys))
    # Several rows go whole; a row too large for one step goes head by head, and a head in blocks of queries.
    heads_a_step = min(num_heads, max(1, SCORES_PER_STEP // (queries_a_step * num_keys)))
    for row in range(0, num_rows, rows_a_step):
        rows = slice(row, row + rows_a_step)
        row_bias = bias if bias is None or len(bias) == 1 else bias[rows]
        for head in range(0, num_heads, heads_a_step):
            part = (rows, slice(head, head + heads_a_step))
            part_bias = row_bias if row_bias is None or row_bias.shape[1] == 1 else row_bias[:, part[1]]
            key, value = key_BHSd[part], value_BHSd[part]
            shape = key.shape[:2]
            key, value = key.reshape(-1, num_keys, head_dim), value.reshape(-1, num_keys, head_dim)
            for first in range(0, num_queries, queries_a_step):
                queries = slice(first, first + queries_a_step)
                step_bias = (
                    part_bias if part_bias is None or part_bias.shape[2] == 1 else part_bias[:, :, queries]
                )
                query = query_BHQd[part][:, :, queries].reshape(len(key), -1, head_dim)
                mixed = _mix(query, key, value, step_bias, scale, shape, workspace)
                out[rows, queries, part[1]] = mixed.view(*shape, -1, head_dim).transpose(1, 2)
    return out


def _mix(
    query_Pqd: torch.Tensor,
    key_PSd: torch.Tensor,
    value_PSd: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    rows_and_heads: torch.Size,
    workspace: Workspace,
) -> torch.Tensor:
    size = (len(query_Pqd), query_Pqd.shape[1], key_PSd.shape[1])
    scores = workspace.take("scores", size, query_Pqd.dtype)
    nothing = query_Pqd.new_zeros(1)
    if len(query_Pqd) == 1:
        # A batch of one product is slower than the product itself, here by half, below by a third.
        torch.addmm(nothing, query_Pqd[0], key_PSd[0].t(), beta=0, alpha=scale, out=scores[0])
    else:
        torch.baddbmm(nothing, query_Pqd, key_PSd.transpose(1, 2), beta=0, alpha=scale, out=scores)
    if bias is None and size[2] >= OWN_SOFTMAX_MIN_KEYS:
        torch.softmax(scores, dim=-1, out=scores)
    else:
        exact = workspace.take("exact scores", size, torch.float32)
        if bias is None:
            exact.copy_(scores)
        else:
            shape = (*rows_and_heads, *size[1:])
            torch.add(scores.view(shape), bias, out=exact.view(shape))
        scores.copy_(torch.softmax(exact, dim=-1, out=exact))
    out = workspace.take("mixed part", (size[0], size[1], value_PSd.shape[2]), query_Pqd.dtype)
    if len(query_Pqd) == 1:
        torch.mm(scores[0], value_PSd[0], out=out[0])
    else:
        torch.bmm(scores, value_PSd, out=out)
    return out


def visible_keys(
    lengths_B: Int64[np.ndarray, " B"], num_tokens: int, num_context: int, device: torch.device
) -> Bool[torch.Tensor, "B S"] | None:
    """Say which keys hold context or text; None when all do.

    Validity is by true length, as padding may be a token texts use too.
    """
    if int(lengths_B.min(initial=num_tokens)) == num_tokens:
        return None
    lengths = torch.from_numpy(lengths_B).to(device)
    return torch.arange(num_context + num_tokens, device=device)[None] < (lengths + num_context)[:, None]


def bias_where(visible: Bool[torch.Tensor, "*shape"], dtype: torch.dtype) -> Float[torch.Tensor, "*shape"]:
    """Return 0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, float("-inf")
    )
