"""What is trained beside a base's parameters: low-rank updates of its matrices, latent attention behind it.

    W' = W + alpha / r · up · down      down (r, in) drawn from the seed
                                        up (out, r) at zero: training begins at the base

Low-rank updates are a parametrization of torch, so that every product is one with W' itself: what is saved is
W', an ordinary matrix of an ordinary model, and no vector moves when it is merged. With dropout a step leaves
out a share of each update's inputs, the same ones for all tokens: rows are not seen one by one in W'. Source:
Hu et al. 2021 (LoRA), §4.1, with its initial values; dropout as in NV-Embed, appendix C. Differs: all
matrices of a layer get an update unless told otherwise; LoRA's own dropout draws the inputs for each token.

A new block of latent attention begins as the plain mean: both its output matrices are zero. Source: NV-Embed
§3.2 (512 latents, 8 heads, a gated MLP four times as wide) in the published names and shapes of
:mod:`cairn.pipeline.model.latent_attention`; the paper does not say how its block begins.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from typing import Final

import torch
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.own_tensors import LATENT_ATTENTION
from cairn.pipeline.model.folders.own_tensors import LATENT_ATTENTION as PREFIX
from cairn.pipeline.model.latent_attention import PUBLISHED_HEADS
from jaxtyping import Float
from torch import nn
from torch.nn.utils import parametrize
from typing_extensions import override

ALPHA_OF_RANK: Final = 2.0
"""Alpha where none is chosen, as a multiple of the rank: the update counts twice, whatever its rank."""


class LowRankUpdate(nn.Module):
    """What is added to one matrix."""

    def __init__(
        self, num_out: int, num_in: int, rank: int, scale: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(num_out, rank))
        self.down = nn.Parameter(
            (2.0 * torch.rand(rank, num_in, generator=generator) - 1.0) / math.sqrt(num_in)
        )
        self.scale = scale
        self.kept_I: torch.Tensor | None = None
        """What each input counts while some are left out."""

    @override
    def forward(self, weight: Float[torch.Tensor, "out in"]) -> Float[torch.Tensor, "out in"]:
        """Return W', in W's own precision, as it is saved."""
        down = self.down if self.kept_I is None else self.down * self.kept_I
        with torch.autocast(weight.device.type, enabled=False):
            return torch.addmm(weight, self.up, down, alpha=self.scale)


def add_low_rank(model: LandmarkEncoder, config: TrainConfig) -> None:
    """Freeze the base's parameters and give its matrices updates.

    A rank that no matrix has room for raises :class:`ConfigError`.
    """
    own = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name.startswith(("landmark_attention.", LATENT_ATTENTION))
    ]
    model.requires_grad_(False)
    for parameter in own:
        parameter.requires_grad_(True)
    generator = torch.Generator().manual_seed(config.seed)
    scale = ALPHA_OF_RANK if config.lora_alpha is None else config.lora_alpha / config.lora_rank
    for module in model.layer_matrices(attention_only=config.lora_matrices == "attention"):
        num_out, num_in = module.get_parameter("weight").shape
        if config.lora_rank > min(num_out, num_in):
            raise ConfigError(
                f"lora_rank must be at most {min(num_out, num_in)}, the base model's width, got "
                f"{config.lora_rank}"
            )
        update = LowRankUpdate(num_out, num_in, config.lora_rank, scale, generator)
        parametrize.register_parametrization(module, "weight", update)


@contextlib.contextmanager
def dropped_inputs(model: nn.Module, share: float, seed: int) -> Generator[None]:
    """Leave out a ``share`` of each update's inputs within the block, as drawn from ``seed``.

    The others count 1 / (1 - share), so that the mean over draws is the whole update.
    """
    updates = [module for module in model.modules() if isinstance(module, LowRankUpdate)] if share else []
    generator = torch.Generator().manual_seed(seed)
    for update in updates:
        is_kept_I = torch.rand(update.down.shape[1], generator=generator) >= share
        update.kept_I = (is_kept_I / (1.0 - share)).to(update.down.device)
    try:
        yield
    finally:
        for update in updates:
            update.kept_I = None


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
