"""Sequence dropout (CDE §4.2): in training a null token takes a context vector's place with some probability.

It teaches the second stage to do with less context, or none. Which vectors fall is drawn for every example,
a window of its own. The context is read once for a whole batch, so an example sees a null token in the place
of each vector that fell, while what the other vectors read of that one stays: the draw is a bias on the
logits of C vectors and one null token.

    vector that stays   0        null token, n fell   log n
    vector that fell    -inf     none fell            -inf

Source: Morris & Rush 2024 (CDE), §4.2, embedding without context. Differs: there the second stage reads the
context again with every text, so that the other vectors do not see the one that fell.

    W examples    C context vectors
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.model.engine.landmark_attention import Memory
from jaxtyping import Bool, Float


def draw_dropped(
    num_examples: int, num_context: int, probability: float, generator: torch.Generator
) -> Bool[torch.Tensor, "W C"]:
    """Draw which context vectors give way to the null token, for each example by itself."""
    if not 0.0 <= probability <= 1.0:
        raise ConfigError(
            f"the probability of sequence dropout must lie between 0 and 1, got {probability}; 0 drops "
            "nothing"
        )
    return torch.rand(num_examples, num_context, generator=generator) < probability


def null_bias(dropped_WC: Bool[torch.Tensor, "W C"]) -> Float[torch.Tensor, "W C1"]:
    """Return what is added to the logits of the context vectors and of one null token behind them."""
    num_W1 = dropped_WC.sum(1, keepdim=True).float()
    kept_WC = torch.zeros(dropped_WC.shape, device=dropped_WC.device).masked_fill(dropped_WC, -torch.inf)
    return torch.cat([kept_WC, num_W1.log()], dim=1)


def with_null_token(
    memory: Sequence[Memory], null: Sequence[Memory], dropped_BC: Bool[torch.Tensor, "B C"]
) -> tuple[Memory, ...]:
    """Return each layer's memory with the null token behind it, and the rows' draw as its bias."""
    bias_BC = null_bias(dropped_BC)
    return tuple(
        Memory(
            key_GCd=torch.cat([own.key_GCd, other.key_GCd], dim=1),
            value_GCd=torch.cat([own.value_GCd, other.value_GCd], dim=1),
            bias_BC=bias_BC,
        )
        for own, other in zip(memory, null, strict=True)
    )
