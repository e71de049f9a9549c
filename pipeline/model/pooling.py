"""Hidden states to one embedding a chunk: the mean over a span of positions.

Every pooling is this mean, and ``pipeline/poolings.py`` says over which span. LMK pooling (algorithm 2) is
kept per landmark: a document's vector is the mean of its chunks' vectors, taken later. Sums are in float32
whatever the model computes in. Nothing is normalised here.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int64


def pool_spans(
    hidden_BTD: Float[torch.Tensor, "B T D"],
    row_M: Int64[torch.Tensor, " M"],
    start_M: Int64[torch.Tensor, " M"],
    end_M: Int64[torch.Tensor, " M"],
) -> Float32[torch.Tensor, "M D"]:
    """Average positions ``start:end`` of each chunk's row.

    ``row`` must not decrease, spans are never empty.
    """
    num_rows, num_tokens, _ = hidden_BTD.shape
    if bool((end_M - start_M == 1).all()):
        return hidden_BTD[row_M, start_M].float()
    # The rank of a chunk among those of its row, to lay ragged rows of chunks out as one rectangle.
    rank_M = torch.arange(len(row_M), device=row_M.device) - torch.searchsorted(row_M, row_M)
    positions_T = torch.arange(num_tokens, device=row_M.device)
    inside_MT = (positions_T >= start_M[:, None]) & (positions_T < end_M[:, None])
    inside_BLT = hidden_BTD.new_zeros((num_rows, int(rank_M.max()) + 1, num_tokens), dtype=torch.float32)
    inside_BLT[row_M, rank_M] = inside_MT.float()
    # Positions after a row's length may hold anything finite; a zero weight silences them.
    sums_BLD = inside_BLT @ hidden_BTD.float()
    return sums_BLD[row_M, rank_M] / (end_M - start_M)[:, None]
