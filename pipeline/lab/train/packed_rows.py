"""Rows of token ids as a model in training reads them: end to end, without padding.

    [CLS] z [LMK]                      a row of one chunk
    [CLS] z1 [LMK] z2 [LMK] …          a row of several (LMK §4, algorithm 1)

N tokens of a batch    B rows    M chunks, B where each has a row of its own    D width
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from cairn.pipeline.ragged import ranges
from jaxtyping import Float32, Int32, Int64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """B rows of token ids end to end; ``windows`` numbers each row's window, the rows of one stand together.

    ``pooled_start`` and ``pooled_end`` are positions within a chunk's row, whose mean is its embedding.
    ``num_prefix`` tokens behind [CLS] are not the text's own; None: no row has any. ``pooled_row`` is the row
    of each chunk, in order; None: every row is one chunk. Rows of a tokenizer without [CLS] begin with the
    prefix.
    """

    ids_N: Int32[np.ndarray, " N"]
    lengths_B: Int64[np.ndarray, " B"]
    windows_B: Int64[np.ndarray, " B"]
    pooled_start_B: Int64[np.ndarray, " M"]
    pooled_end_B: Int64[np.ndarray, " M"]
    num_prefix_B: Int64[np.ndarray, " B"] | None = None
    pooled_row_M: Int64[np.ndarray, " M"] | None = None
    has_cls: bool = True

    def __len__(self) -> int:
        return len(self.lengths_B)

    @property
    def chunk_rows(self) -> Int64[np.ndarray, " M"]:
        """Return the row of each chunk."""
        return np.arange(len(self)) if self.pooled_row_M is None else self.pooled_row_M

    @property
    def own_lengths(self) -> Int64[np.ndarray, " B"]:
        """Return the tokens of each row without [CLS], prefix and [LMK]; rows are of one chunk."""
        return self.lengths_B - 1 - self.has_cls - (0 if self.num_prefix_B is None else self.num_prefix_B)

    @property
    def alone(self) -> PackedRows:
        """Return each chunk in a row and a window of its own and pooled whole, but for prefixes left out."""
        if self.pooled_row_M is not None:
            return self._apart(self.pooled_row_M).alone
        start_B = np.zeros(len(self), np.int64)
        if self.num_prefix_B is not None:
            head_B = self.has_cls + self.num_prefix_B
            is_taken_in_B = (self.pooled_start_B == 0) & (self.pooled_end_B > head_B)
            start_B = np.where((self.num_prefix_B > 0) & ~is_taken_in_B, head_B, 0)
        return PackedRows(
            ids_N=self.ids_N,
            lengths_B=self.lengths_B,
            windows_B=np.arange(len(self)),
            pooled_start_B=start_B,
            pooled_end_B=self.lengths_B,
            has_cls=self.has_cls,
        )

    def _apart(self, row_M: Int64[np.ndarray, " M"]) -> PackedRows:
        """Return each chunk of a row of several in a row of its own, behind the row's [CLS] and prefix."""
        num_prefix_B = np.zeros(len(self), np.int64) if self.num_prefix_B is None else self.num_prefix_B
        head_M = self.has_cls + num_prefix_B[row_M]
        is_first_M = np.diff(row_M, prepend=-1) > 0
        own_start_M = np.where(is_first_M, head_M, np.roll(self.pooled_end_B, 1))
        own_M = self.pooled_end_B - own_start_M
        row_start_M = (np.cumsum(self.lengths_B) - self.lengths_B)[row_M]
        spans = np.stack([row_start_M, row_start_M + own_start_M], axis=1)
        return PackedRows(
            ids_N=self.ids_N[ranges(spans.ravel(), np.stack([head_M, own_M], axis=1).ravel())],
            lengths_B=head_M + own_M,
            windows_B=np.arange(len(row_M)),
            pooled_start_B=head_M,
            pooled_end_B=head_M + own_M,
            num_prefix_B=num_prefix_B[row_M],
            has_cls=self.has_cls,
        )


def pooled(x_ND: torch.Tensor, rows: PackedRows) -> Float32[torch.Tensor, "M D"]:
    """Average each chunk's span, in float32."""
    starts_B = np.cumsum(rows.lengths_B) - rows.lengths_B
    num_pooled_M = rows.pooled_end_B - rows.pooled_start_B
    chunk_P = np.repeat(np.arange(len(num_pooled_M)), num_pooled_M)
    token_P = ranges(starts_B[rows.chunk_rows] + rows.pooled_start_B, num_pooled_M)
    tokens, owners, sizes = (torch.from_numpy(x).to(x_ND.device) for x in (token_P, chunk_P, num_pooled_M))
    sums_MD = x_ND.new_zeros((len(num_pooled_M), x_ND.shape[1]), dtype=torch.float32).index_add_(
        0, owners, x_ND[tokens].float()
    )
    return sums_MD / sizes[:, None]
