"""Sequence dropout (CDE §4.2): in training a null token takes a context vector's place with some probability.

It teaches the second stage to do with less context, or none: at inference, where nothing is dropped, the null
token stands in for the context a caller does not give. Pure and differentiable in both inputs; which vectors
fall is the caller's generator's business.

Source: Morris & Rush 2024 (CDE), §4.2, embedding without context; drawn for every row of a batch, as the
public code does.
"""

from __future__ import annotations

import torch
from jaxtyping import Float

from pipeline.errors import ConfigError


def drop_context(
    context_CD: Float[torch.Tensor, "*B C D"],
    null_D: Float[torch.Tensor, " D"],
    probability: float,
    generator: torch.Generator,
) -> Float[torch.Tensor, "*B C D"]:
    """Replace each context vector by the null token with ``probability``; 0 leaves all, 1 leaves none.

    The generator lives on the device of the context. Gradients flow to the vectors that stayed and, summed,
    to the null token.
    """
    if not 0.0 <= probability <= 1.0:
        raise ConfigError(
            f"the probability of sequence dropout must lie between 0 and 1, got {probability}; 0 drops "
            "nothing"
        )
    draws = torch.rand(context_CD.shape[:-1], generator=generator, device=context_CD.device)
    return torch.where((draws < probability).unsqueeze(-1), null_D, context_CD)
