"""Rows of token ids as a model in training reads them: end to end, without padding.

N tokens of a batch    B rows, a chunk each    D width
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Int32, Int64

from pipeline.ragged import ranges


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """B rows of token ids end to end; ``windows`` numbers each row's window, the rows of one stand together.

    ``pooled_start`` and ``pooled_end`` are positions within each row, whose mean is the row's embedding.
    ``num_prefix`` tokens behind [CLS] are not the text's own; None: no row has any.
    """

    ids_N: Int32[np.ndarray, " N"]
    lengths_B: Int64[np.ndarray, " B"]
    windows_B: Int64[np.ndarray, " B"]
    pooled_start_B: Int64[np.ndarray, " B"]
    pooled_end_B: Int64[np.ndarray, " B"]
    num_prefix_B: Int64[np.ndarray, " B"] | None = None

    def __len__(self) -> int:
        return len(self.lengths_B)

    @property
    def own_lengths(self) -> Int64[np.ndarray, " B"]:
        """Return the tokens of each row without [CLS], prefix and [LMK]."""
        return self.lengths_B - 2 - (0 if self.num_prefix_B is None else self.num_prefix_B)

    @property
    def alone(self) -> PackedRows:
        """Return the same rows each in a window of its own and pooled whole, but for prefixes left out."""
        start_B = np.zeros(len(self), np.int64)
        if self.num_prefix_B is not None:
            is_left_out_B = (self.num_prefix_B > 0) & (self.pooled_start_B > 0)
            start_B = np.where(is_left_out_B, 1 + self.num_prefix_B, 0)
        return PackedRows(
            ids_N=self.ids_N,
            lengths_B=self.lengths_B,
            windows_B=np.arange(len(self)),
            pooled_start_B=start_B,
            pooled_end_B=self.lengths_B,
        )


def pooled(x_ND: torch.Tensor, rows: PackedRows) -> Float32[torch.Tensor, "B D"]:
    """Average each row's span, in float32."""
    starts_B = np.cumsum(rows.lengths_B) - rows.lengths_B
    num_pooled_B = rows.pooled_end_B - rows.pooled_start_B
    row_P = np.repeat(np.arange(len(rows)), num_pooled_B)
    token_P = ranges(starts_B + rows.pooled_start_B, num_pooled_B)
    tokens, owners, sizes = (torch.from_numpy(x).to(x_ND.device) for x in (token_P, row_P, num_pooled_B))
    sums_BD = x_ND.new_zeros((len(rows), x_ND.shape[1]), dtype=torch.float32).index_add_(
        0, owners, x_ND[tokens].float()
    )
    return sums_BD / sizes[:, None]
