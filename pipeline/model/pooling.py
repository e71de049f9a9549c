"""Hidden states to one embedding a chunk: the mean over a span of positions.

Every pooling is this mean, and ``pipeline/poolings.py`` says over which span. LMK pooling (algorithm 2) is
kept per landmark: a document's vector is the mean of its chunks' vectors, taken later. Sums are in float32
whatever the model computes in.

A vector is the first dimensions of an embedding, normalised again (Matryoshka; m³BERT §2.1). Inside the model
everything keeps its full width, the context's embeddings too.
"""

from __future__ import annotations

import numpy as np
import torch
from cairn.pipeline.errors import ConfigError
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


def require_dims(truncate_dim: int | None, model_dim: int) -> int:
    """Return the width of the vectors; raise :class:`ConfigError` for more dimensions than the model has."""
    if truncate_dim is None:
        return model_dim
    if not 1 <= truncate_dim <= model_dim:
        raise ConfigError(
            f"dims must lie between 1 and the model's {model_dim}, got {truncate_dim}; "
            "leave it out to keep all"
        )
    return truncate_dim


def first_dims(embeddings_ND: Float32[np.ndarray, "N D"], vector_dim: int) -> Float32[np.ndarray, "N V"]:
    """Keep the first dimensions of every row and divide it by its length.

    A row of zeros becomes NaN, which no caller lets pass.
    """
    vectors_NV = embeddings_ND[:, :vector_dim]
    with np.errstate(invalid="ignore", over="ignore"):
        return vectors_NV / np.linalg.norm(vectors_NV, axis=1, keepdims=True)
