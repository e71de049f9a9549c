"""Rows of token ids as a model in training reads them: end to end, without padding.

    [CLS] z [LMK]                      a row of one chunk
    [CLS] z1 [LMK] z2 [LMK] …          a row of several (LMK §4, algorithm 1)

N tokens of a batch    B rows    M chunks, B where each has a row of its own    D width
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.model.engine.attention import bias_where
from cairn.pipeline.model.landmarks import Rows
from cairn.pipeline.ragged import ranges
from jaxtyping import Bool, Float, Float32, Int32, Int64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """B rows of token ids end to end, each read by itself.

    ``pooled_start`` and ``pooled_end`` are positions within a chunk's row, whose mean is its embedding.
    ``num_prefix`` tokens behind [CLS] are not the text's own; None: no row has any. ``pooled_row`` is the row
    of each chunk, in order; None: every row is one chunk. Rows of a tokenizer without [CLS] begin with the
    prefix. ``is_text`` marks the words of rows that are pretrained on.
    """

    ids_N: Int32[np.ndarray, " N"]
    lengths_B: Int64[np.ndarray, " B"]
    pooled_start_B: Int64[np.ndarray, " M"]
    pooled_end_B: Int64[np.ndarray, " M"]
    num_prefix_B: Int64[np.ndarray, " B"] | None = None
    pooled_row_M: Int64[np.ndarray, " M"] | None = None
    has_cls: bool = True
    is_text_N: Bool[np.ndarray, " N"] | None = None

    @classmethod
    def apart(
        cls, ids_N: Int32[np.ndarray, " N"], lengths_B: Int64[np.ndarray, " B"], first_pooled: int = 0
    ) -> PackedRows:
        """Return rows that are read each by itself, and pooled from token ``first_pooled`` on."""
        return cls(
            ids_N=ids_N,
            lengths_B=lengths_B,
            pooled_start_B=np.full(len(lengths_B), first_pooled, np.int64),
            pooled_end_B=lengths_B,
        )

    def __len__(self) -> int:
        return len(self.lengths_B)

    @property
    def chunk_rows(self) -> Int64[np.ndarray, " M"]:
        """Return the row of each chunk."""
        return np.arange(len(self)) if self.pooled_row_M is None else self.pooled_row_M

    @property
    def head_lengths(self) -> Int64[np.ndarray, " B"]:
        """Return the tokens of [CLS] and prefix of each row."""
        return np.full(len(self), int(self.has_cls)) + (0 if self.num_prefix_B is None else self.num_prefix_B)

    @property
    def own_starts(self) -> Int64[np.ndarray, " M"]:
        """Return where in its row each chunk's own tokens begin."""
        if self.pooled_row_M is None:
            return self.head_lengths
        is_first_M = np.diff(self.pooled_row_M, prepend=-1) > 0
        return np.where(is_first_M, self.head_lengths[self.pooled_row_M], np.roll(self.pooled_end_B, 1))

    @property
    def own_lengths(self) -> Int64[np.ndarray, " M"]:
        """Return how many own tokens each chunk has, its landmark left out."""
        ends_M = self.lengths_B if self.pooled_row_M is None else self.pooled_end_B
        return ends_M - 1 - self.own_starts

    @property
    def own_places(self) -> Int64[np.ndarray, " T"]:
        """Return where the chunks' own tokens stand among all."""
        row_start_M = (np.cumsum(self.lengths_B) - self.lengths_B)[self.chunk_rows]
        return ranges(row_start_M + self.own_starts, self.own_lengths)

    @property
    def alone(self) -> PackedRows:
        """Return each chunk in a row of its own and pooled whole, but for prefixes left out."""
        if self.pooled_row_M is not None:
            return self._cut_apart(self.pooled_row_M).alone
        head_B = self.head_lengths
        is_taken_in_B = (self.pooled_start_B == 0) & (self.pooled_end_B > head_B)
        start_B = np.where((head_B > self.has_cls) & ~is_taken_in_B, head_B, 0)
        return replace(
            self.apart(self.ids_N, self.lengths_B),
            pooled_start_B=start_B,
            num_prefix_B=self.num_prefix_B,
            has_cls=self.has_cls,
        )

    def _cut_apart(self, row_M: Int64[np.ndarray, " M"]) -> PackedRows:
        """Return each chunk of a row of several in a row of its own, behind the row's [CLS] and prefix."""
        head_M = self.head_lengths[row_M]
        own_start_M, own_M = self.own_starts, self.own_lengths + 1
        row_start_M = (np.cumsum(self.lengths_B) - self.lengths_B)[row_M]
        spans = np.stack([row_start_M, row_start_M + own_start_M], axis=1)
        ids = self.ids_N[ranges(spans.ravel(), np.stack([head_M, own_M], axis=1).ravel())]
        rows = self.apart(ids, head_M + own_M)
        return replace(
            rows, pooled_start_B=head_M, num_prefix_B=head_M - int(self.has_cls), has_cls=self.has_cls
        )

    def split(self, max_tokens: int) -> tuple[PackedRows, ...]:
        """Cut into micro-batches of whole rows with at most so many tokens, or one row."""
        ends = np.cumsum(self.lengths_B)
        parts: list[PackedRows] = []
        first = 0
        while first < len(self):
            start = ends[first] - self.lengths_B[first]
            end = max(first + 1, int(np.searchsorted(ends, start + max_tokens, side="right")))
            parts.append(self._take(first, end))
            first = end
        return tuple(parts)

    def _take(self, first: int, end: int) -> PackedRows:
        starts = np.concatenate([[0], np.cumsum(self.lengths_B)])[[first, end]]
        rows, tokens = slice(first, end), slice(*starts.tolist())
        chunks = slice(*np.searchsorted(self.chunk_rows, [first, end]).tolist())
        return PackedRows(
            ids_N=self.ids_N[tokens],
            lengths_B=self.lengths_B[rows],
            pooled_start_B=self.pooled_start_B[chunks],
            pooled_end_B=self.pooled_end_B[chunks],
            num_prefix_B=None if self.num_prefix_B is None else self.num_prefix_B[rows],
            pooled_row_M=None if self.pooled_row_M is None else self.pooled_row_M[chunks] - first,
            has_cls=self.has_cls,
            is_text_N=None if self.is_text_N is None else self.is_text_N[tokens],
        )


def pooled(x_ND: torch.Tensor, rows: PackedRows) -> Float32[torch.Tensor, "M D"]:
    """Average each chunk's span, in float32."""
    starts_B = np.cumsum(rows.lengths_B) - rows.lengths_B
    num_pooled_M = rows.pooled_end_B - rows.pooled_start_B
    chunk_P = np.repeat(np.arange(len(num_pooled_M)), num_pooled_M)
    token_P = ranges(starts_B[rows.chunk_rows] + rows.pooled_start_B, num_pooled_M)
    tokens, owners, sizes = (torch.from_numpy(x).to(x_ND.device) for x in (token_P, chunk_P, num_pooled_M))
    sums_MD = x_ND.new_zeros((len(num_pooled_M), x_ND.shape[1]), dtype=torch.float32)
    return sums_MD.index_add_(0, owners, x_ND[tokens].float()) / sizes[:, None]


def behind_prefixes(
    rows: Rows,
    prefixes: Sequence[Int32[np.ndarray, " _"]],
    *,
    is_pooled: bool,
    has_cls: bool = True,
) -> PackedRows:
    """Put a prefix behind the [CLS] of each row, as :func:`lay_out` has one.

    With a prefix that is not pooled [CLS] is not pooled either, unless it is all that is.
    """
    lengths_B, num_prefix_B = np.diff(rows.row_offsets), np.array([len(ids) for ids in prefixes], np.int64)
    starts_B = rows.row_offsets[:-1] + np.cumsum(num_prefix_B) - num_prefix_B
    ids = np.empty(int((lengths_B + num_prefix_B).sum()), np.int32)
    is_prefix = np.zeros(len(ids), np.bool_)
    is_prefix[ranges(starts_B + has_cls, num_prefix_B)] = True
    ids[is_prefix], ids[~is_prefix] = np.concatenate([np.zeros(0, np.int32), *prefixes]), rows.ids
    num_prefix_M = num_prefix_B[rows.pooled_row]
    is_cls_M = rows.pooled_end <= has_cls
    is_whole_M = is_cls_M | is_pooled | (num_prefix_M == 0)
    first_M = np.where(is_whole_M, 0, has_cls + num_prefix_M)
    return PackedRows(
        ids_N=ids,
        lengths_B=lengths_B + num_prefix_B,
        pooled_start_B=np.where(rows.pooled_start > 0, rows.pooled_start + num_prefix_M, first_M),
        pooled_end_B=np.where(is_cls_M, rows.pooled_end, rows.pooled_end + num_prefix_M),
        num_prefix_B=num_prefix_B,
        has_cls=has_cls,
    )


MIN_SHARE_OF_SCORES: Final = 0.5
"""A row with a smaller share of the scores of its block's first row opens a block: the rest is padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """R rows of nearly one length attended to together, T places a row, where padding repeats the last.

    Biases are 0 where a query sees a key and -inf elsewhere, None where all is seen; ``local_bias`` is for
    local layers.
    """

    tokens_RT: Int64[torch.Tensor, "R T"]
    is_token_RT: Bool[torch.Tensor, "R T"] | None
    bias: Float32[torch.Tensor, "R 1 1 T"] | None
    local_bias: Float32[torch.Tensor, "_R 1 T T"] | None


def cut_into_blocks(
    lengths_B: Int64[np.ndarray, " B"],
    num_lead: int,
    *,
    max_scores: int,
    local_radius: int | None,
    device: torch.device,
) -> tuple[Block, ...]:
    """Group rows by their lengths, which count ``num_lead`` vectors before each text.

    ``max_scores`` is how many scores of one head a block may have; a row that has more is a block of its own.
    In local layers text sees text within the radius, and each vector of the lead itself alone.
    """
    order, starts_B = np.argsort(-lengths_B, kind="stable"), np.cumsum(lengths_B) - lengths_B
    scores = lengths_B[order] ** 2
    blocks: list[Block] = []
    first = 0
    while first < len(order):
        alike = int(np.searchsorted(-scores, -MIN_SHARE_OF_SCORES * scores[first], side="right"))
        end = max(first + 1, min(alike, first + max_scores // int(scores[first])))
        rows = order[first:end]
        blocks.append(_block(starts_B[rows], lengths_B[rows], num_lead, local_radius, device))
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
