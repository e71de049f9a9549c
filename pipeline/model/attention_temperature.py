"""TempScale: divide every attention logit by one temperature τ, against the collapse of long texts onto one direction.

softmax(QKᵀ / (τ √d)) is computed by scaling the query projection once, when weights are loaded, so it is exact under every attention
kernel and costs nothing. τ < 1 sharpens attention. One τ serves all layers, documents and queries; it belongs to the encoder's
fingerprint.

Source: Zhou et al., "Length-Induced Embedding Collapse in Transformer-based Models", TempScale.
"""

from __future__ import annotations

import torch
from jaxtyping import Float


def scale_queries(
    weight: Float[torch.Tensor, "out D"], bias: Float[torch.Tensor, " out"], temperature: float
) -> tuple[Float[torch.Tensor, "out D"], Float[torch.Tensor, " out"]]:
    """Return a query projection whose logits are those of the given one divided by ``temperature``."""
    if temperature == 1.0:
        return weight, bias
    return weight / temperature, bias / temperature
