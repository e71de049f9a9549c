"""A latent attention that is trained behind a base (NV-Embed).

A new block begins as the plain mean: both its output matrices are zero. Source: NV-Embed §3.2 (512 latents, 8
heads, a gated MLP four times as wide) in the published names and shapes of
:mod:`cairn.pipeline.model.latent_attention`; the paper does not say how its block begins.
"""

from __future__ import annotations

from typing import Final

import torch
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.own_tensors import LATENT_ATTENTION as PREFIX
from cairn.pipeline.model.latent_attention import PUBLISHED_HEADS

NUM_LATENTS: Final = 512
"""Of a new block, as in NV-Embed."""

MLP_FACTOR: Final = 4
"""Width of the MLP over that of the model, as in NV-Embed-v2."""


def add_latent_block(
    model: LandmarkEncoder, base: Checkpoint, *, num_latents: int | None = None, seed: int = 0
) -> None:
    """Let a model pool behind latent attention, which is trained and saved with it.

    ``num_latents`` = None is what the base has, else 512. Another number than the base's raises
    :class:`ConfigError`, and so does a new block of a width that eight heads do not divide.
    """
    stored = {name: tensor for name, tensor in base.tensors.items() if PREFIX in name}
    if not all(name.startswith(PREFIX) for name in stored):
        raise ModelError(
            f"training must start from a latent attention named {PREFIX}…, got {min(stored)}; save the base "
            "with Cairn, and start from that folder"
        )
    if not stored:
        model.add_published(
            new_block(NUM_LATENTS if num_latents is None else num_latents, model.model_dim, seed)
        )
        return
    found = len(stored[f"{PREFIX}latents"])
    if num_latents not in (None, found):
        raise ConfigError(f"latents must be the base model's {found}, got {num_latents}; leave them out")
    model.add_published({name: tensor.float().clone() for name, tensor in stored.items()})


def new_block(num_latents: int, model_dim: int, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a new block in float32, drawn from ``seed``."""
    if model_dim % PUBLISHED_HEADS:
        raise ConfigError(
            f"pooling latent must have a base model whose width {PUBLISHED_HEADS} heads divide, got "
            f"{model_dim}; choose another pooling"
        )
    generator = torch.Generator().manual_seed(seed)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator) * sizes[-1] ** -0.5

    attention, mlp = (f"{PREFIX}cross_attend_blocks.{index}" for index in range(2))
    inner = MLP_FACTOR * model_dim
    norms = (f"{attention}.norm", f"{attention}.norm_context", f"{mlp}.norm")
    return {
        f"{PREFIX}latents": torch.randn(num_latents, model_dim, generator=generator),
        **{f"{name}.weight": torch.ones(model_dim) for name in norms},
        **{f"{name}.bias": torch.zeros(model_dim) for name in norms},
        f"{attention}.fn.to_q.weight": drawn(model_dim, model_dim),
        f"{attention}.fn.to_kv.weight": drawn(2 * model_dim, model_dim),
        f"{attention}.fn.to_out.weight": torch.zeros(model_dim, model_dim),
        f"{mlp}.fn.net.0.weight": drawn(2 * inner, model_dim),
        f"{mlp}.fn.net.0.bias": torch.zeros(2 * inner),
        f"{mlp}.fn.net.2.weight": torch.zeros(model_dim, inner),
        f"{mlp}.fn.net.2.bias": torch.zeros(model_dim),
    }
