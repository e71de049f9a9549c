"""Rows of token ids as a model in training reads them: those of serving, end to end, without padding.

:func:`cairn.pipeline.model.landmarks.lay_out` makes them. Here they are cut into micro-batches, taken apart
into rows of a chunk each, pooled, and grouped into the blocks that attention is computed in.

N tokens of a batch    B rows    M chunks    D width
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.model.engine.attention import RelativeBias, bias_where
from cairn.pipeline.model.landmarks import Rows
from cairn.pipeline.ragged import ranges
from jaxtyping import Bool, Float, Float32, Int32, Int64


def apart(ids: Int32[np.ndarray, " N"], lengths_B: Int64[np.ndarray, " B"], first_pooled: int = 0) -> Rows:
    """Return rows of one chunk each, pooled from token ``first_pooled`` to their end."""
    first_B = np.full(len(lengths_B), first_pooled, np.int64)
    return Rows(
        ids=ids,
        row_offsets=np.concatenate([[0], np.cumsum(lengths_B)]),
        pooled_row=np.arange(len(lengths_B)),
        pooled_start=first_B,
        pooled_end=lengths_B,
        own_start=first_B,
        num_own=lengths_B - first_B - 1,
    )


def alone(rows: Rows, *, has_cls: bool) -> Rows:
    """Return each chunk in a row of its own behind its row's head, pooled whole but for prefix and title.

    They are pooled, too, where a chunk that is a row takes them in.
    """
    is_first_M = np.diff(rows.pooled_row, prepend=-1) > 0
    head_M, own_M = rows.own_start[is_first_M][rows.pooled_row], rows.num_own + 1
    starts = np.repeat(rows.row_offsets[rows.pooled_row], 2)
    starts[1::2] += rows.own_start
    ids = rows.ids[ranges(starts, np.stack([head_M, own_M], axis=1).ravel())]
    is_taken_in_M = (rows.pooled_start == 0) & (rows.pooled_end > head_M)
    first_M = np.where((head_M > has_cls) & ~is_taken_in_M, head_M, 0)
    return replace(apart(ids, head_M + own_M), pooled_start=first_M, own_start=head_M, num_own=rows.num_own)


def own_places(rows: Rows) -> Int64[np.ndarray, " T"]:
    """Return where the chunks' own tokens stand among all."""
    return ranges(rows.row_offsets[rows.pooled_row] + rows.own_start, rows.num_own)


def split(rows: Rows, max_tokens: int) -> tuple[Rows, ...]:
    """Cut into micro-batches of whole rows with at most so many tokens, or one row."""
    parts: list[Rows] = []
    first = 0
    while first < len(rows):
        reach = np.searchsorted(rows.row_offsets, rows.row_offsets[first] + max_tokens, side="right")
        end = max(first + 1, int(reach) - 1)
        parts.append(rows.take(np.arange(first, end))[0])
        first = end
    return tuple(parts)


def pooled(x_ND: torch.Tensor, rows: Rows) -> Float32[torch.Tensor, "M D"]:
    """Average each chunk's span, in float32."""
    num_pooled_M = rows.pooled_end - rows.pooled_start
    chunk_P = np.repeat(np.arange(len(num_pooled_M)), num_pooled_M)
    token_P = ranges(rows.row_offsets[rows.pooled_row] + rows.pooled_start, num_pooled_M)
    tokens, owners, sizes = (torch.from_numpy(x).to(x_ND.device) for x in (token_P, chunk_P, num_pooled_M))
    sums_MD = x_ND.new_zeros((len(num_pooled_M), x_ND.shape[1]), dtype=torch.float32)
    return sums_MD.index_add_(0, owners, x_ND[tokens].float()) / sizes[:, None]


MIN_SHARE_OF_SCORES: Final = 0.5
"""A row with a smaller share of the scores of its block's first row opens a block: the rest is padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """R rows of nearly one length attended to together, T places a row, where padding repeats the last.

    Biases are 0, or the model's own, where a query sees a key and -inf elsewhere, None for 0 throughout;
    ``local_bias`` is for local layers.
    """

    tokens_RT: Int64[torch.Tensor, "R T"]
    is_token_RT: Bool[torch.Tensor, "R T"] | None
    bias: Float32[torch.Tensor, "_R _H _T T"] | None
    local_bias: Float32[torch.Tensor, "_R 1 T T"] | None


def cut_into_blocks(
    lengths_B: Int64[np.ndarray, " B"],
    num_lead_B: Int64[np.ndarray, " B"],
    *,
    max_scores: int,
    local_radius: int | None,
    relative_bias: RelativeBias | None = None,
    device: torch.device,
) -> tuple[Block, ...]:
    """Group rows by their lengths and the ``num_lead`` vectors before each text, which these count.

    ``max_scores`` is how many scores of one head a block may have; a row that has more is a block of its own.
    In local layers text sees text within the radius, and each vector of the lead itself alone.
    """
    starts_B = np.cumsum(lengths_B) - lengths_B
    blocks: list[Block] = []
    for num_lead in np.unique(num_lead_B).tolist():
        order = np.flatnonzero(num_lead_B == num_lead)
        order = order[np.argsort(-lengths_B[order], kind="stable")]
        scores = lengths_B[order] ** 2
        first = 0
        while first < len(order):
            alike = int(np.searchsorted(-scores, -MIN_SHARE_OF_SCORES * scores[first], side="right"))
            end = max(first + 1, min(alike, first + max_scores // int(scores[first])))
            rows = order[first:end]
            block = _block(starts_B[rows], lengths_B[rows], num_lead, local_radius, device)
            if relative_bias is not None:
                relative = relative_bias.of_rows(int(lengths_B[order[first]]), num_lead)
                block = replace(block, bias=relative if block.bias is None else relative + block.bias)
            blocks.append(block)
            first = end
    return tuple(blocks)


def _block(
    starts_R: Int64[np.ndarray, " R"],
    lengths_R: Int64[np.ndarray, " R"],
    num_lead: int,
    local_radius: int | None,
    device: torch.device,
) -> Block:
    places_T = np.arange(lengths_R[0])
    is_token_RT = places_T < lengths_R[:, None]
    is_padded, local_bias = not is_token_RT.all(), None
    is_token = torch.from_numpy(is_token_RT).to(device)
    if local_radius is not None:
        place = torch.arange(len(places_T), device=device)
        is_text = place >= num_lead
        near_TT = ((place[:, None] - place).abs() <= local_radius) & is_text & is_text[:, None]
        # Padding sees itself, too, so that it has some key.
        seen_RTT = (near_TT & is_token[: len(is_token) if is_padded else 1, None]) | (place[:, None] == place)
        local_bias = bias_where(seen_RTT[:, None])
    tokens_RT = starts_R[:, None] + np.minimum(places_T, lengths_R[:, None] - 1)
    return Block(
        tokens_RT=torch.from_numpy(tokens_RT).to(device),
        is_token_RT=is_token if is_padded else None,
        bias=bias_where(is_token[:, None, None]) if is_padded else None,
        local_bias=local_bias,
    )


def attend_in_blocks(
    query_NHd: Float[torch.Tensor, "N H d"],
    key_NGd: Float[torch.Tensor, "N G d"],
    value_NGd: Float[torch.Tensor, "N G d"],
    blocks: Sequence[Block],
    *,
    is_local: bool,
) -> Float[torch.Tensor, "N H d"]:
    """Mix the values of N tokens of packed rows, differentiably; G heads of keys may serve several of H."""
    mixed_NHd = torch.empty_like(query_NHd, memory_format=torch.contiguous_format)
    for block in blocks:
        bias = block.local_bias if is_local else block.bias
        mixed_RHTd = F.scaled_dot_product_attention(
            *(x[block.tokens_RT].transpose(1, 2) for x in (query_NHd, key_NGd, value_NGd)),
            attn_mask=None if bias is None else bias.to(query_NHd.dtype),
            enable_gqa=key_NGd.shape[1] != query_NHd.shape[1],
        )
        mixed_RTHd = mixed_RHTd.transpose(1, 2)
        if block.is_token_RT is None:
            mixed_NHd[block.tokens_RT] = mixed_RTHd
        else:
            mixed_NHd[block.tokens_RT[block.is_token_RT]] = mixed_RTHd[block.is_token_RT]
    return mixed_NHd
