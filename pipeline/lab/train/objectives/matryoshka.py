"""Matryoshka: a loss computed at several widths, so that the first d dimensions retrieve by themselves.

With the vectors of several layers side by side, each layer counts as a width of its own.

Source: Kusupati et al. 2022 (Matryoshka representation learning); m³BERT §2.1 for layers. Differs: weights
sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from cairn.pipeline.errors import ConfigError
from jaxtyping import Float32


def over_widths(
    loss_of_width: Callable[[int], Float32[torch.Tensor, ""]],
    dims: Sequence[int],
    weights: Sequence[float] | None = None,
) -> Float32[torch.Tensor, ""]:
    """Return the weighted mean of a loss that is computed from the first so many dimensions.

    ``weights`` = None weighs all alike.
    """
    weights = [1.0] * len(dims) if weights is None else weights
    if len(weights) != len(dims) or not dims or min(weights) < 0 or not sum(weights) > 0:
        raise ConfigError(
            f"Matryoshka weights must be one number of at least 0 for each of the {len(dims)} dims, not "
            f"all 0, got {list(weights)}"
        )
    total = sum(weights)
    terms = [weight / total * loss_of_width(dim) for dim, weight in zip(dims, weights, strict=True) if weight]
    return torch.stack(terms).sum()
