"""Rotary positions (RoPE): queries and keys turned by an angle that grows with the position.

Halves are paired, dimension i with i + d/2, as all published encoders here have it. Text positions start at 0
unless told otherwise. Context vectors in front of the text have no position: their queries and keys are not
turned, so their order does not matter (CDE §10.4). Tables are in float32 and made once, for the positions the
model has. A configuration may stretch frequencies to longer texts, in one of the ways that are constant over
the length of a text; those that change with it or also scale the attention (dynamic, yarn, longrope) are
refused.

    default   f                                     f of pair i: base^(-2 i / d)
    linear    f / factor
    llama3    f where waves are short, f / factor where they are long, a blend between
    ntk       base * factor and f / factor^(2/d); with ``mixed_b`` the plain base and f / e^(a m^b) of pair m

Source: Su, "Rectified NTK-RoPE" (fixed and mixed, as GTE publishes them); Llama 3.1's published
configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.attention import Workspace
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from jaxtyping import Float, Float32, Int64


def even_head_dim(width: int, num_heads: int) -> int:
    """Return the width of a head, whose dimensions must pair up."""
    if width % (2 * num_heads):
        raise ModelError(
            f"a model with rotary positions must have a hidden size that its heads divide into even parts, "
            f"got {width} for {num_heads} heads; config.json does not fit the model"
        )
    return width // num_heads


Stretch = Callable[[Float32[torch.Tensor, " E"]], Float32[torch.Tensor, " E"]]
"""From the plain frequencies of a head's E pairs to those for texts longer than were trained on."""


class RotaryTable:
    """Cosines and sines of every position, for ``rotary_dim`` of a head's dimensions."""

    def __init__(
        self,
        *,
        rotary_dim: int,
        theta: float,
        num_positions: int,
        device: torch.device,
        stretch: Stretch | None = None,
    ) -> None:
        frequencies_E = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
        if stretch is not None:
            frequencies_E = stretch(frequencies_E)
        angles_PE = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies_E
        self.rotary_dim = rotary_dim
        self._cos_PE = angles_PE.cos().to(device)
        self._sin_PE = angles_PE.sin().to(device)

    def at(
        self, position_N: Int64[torch.Tensor, " N"]
    ) -> tuple[Float32[torch.Tensor, "N E"], Float32[torch.Tensor, "N E"]]:
        """Return cosines and sines of positions, one each; those of position 0 do not turn."""
        return self._cos_PE[position_N], self._sin_PE[position_N]

    def rotate_(
        self,
        x_SPd: Float[torch.Tensor, "*B S P d"],
        angles: tuple[Float32[torch.Tensor, "S E"], Float32[torch.Tensor, "S E"]],
        workspace: Workspace,
    ) -> None:
        """Turn the heads of queries and keys in place, in float32 whatever they are stored in."""
        cos, sin = (table[:, None] for table in angles)
        first, second = x_SPd[..., : self.rotary_dim].chunk(2, dim=-1)
        old_first, old_second = first.float(), second.float()
        new_first = workspace.take("rotated first", tuple(first.shape), torch.float32)
        new_second = workspace.take("rotated second", tuple(first.shape), torch.float32)
        torch.mul(old_first, cos, out=new_first).addcmul_(old_second, sin, value=-1)
        torch.mul(old_second, cos, out=new_second).addcmul_(old_first, sin)
        first.copy_(new_first)
        second.copy_(new_second)


_KINDS: Final = ("default", "linear", "llama3", "ntk")


def read_rotary(
    checkpoint: Checkpoint,
    rotary_dim: int,
    num_positions: int,
    device: torch.device,
    default_theta: float = 10_000.0,
) -> RotaryTable:
    """Read today's ``rope_parameters`` or the older ``rope_scaling`` beside ``rope_theta``."""
    parameters = {**_mapping(checkpoint, "rope_scaling"), **_mapping(checkpoint, "rope_parameters")}
    theta = _number(parameters, "rope_theta", checkpoint.number("rope_theta", default=default_theta))
    partial = checkpoint.number("partial_rotary_factor", default=1.0)
    rotated = _number(parameters, "partial_rotary_factor", partial)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _KINDS or rotated != 1.0:
        raise ModelError(
            f"rotary positions must be of a kind among {', '.join(_KINDS)} over the whole head, got "
            f"{kind!r} over {rotated:g} of it; choose another model"
        )
    stretch: Stretch | None = None
    factor = 1.0 if kind == "default" else _number(parameters, "factor")
    if kind == "linear":
        stretch = lambda frequencies_E: frequencies_E / factor  # noqa: E731
    elif kind == "llama3":
        stretch = _llama3(parameters, factor, checkpoint.config.get("max_position_embeddings"))
    elif factor > 1 and parameters.get("mixed_b") is not None:
        stretch = _mixed_ntk(factor, _number(parameters, "mixed_b"))
    elif factor > 1:  # the published code stretches by no other
        theta *= factor
        stretch = lambda frequencies_E: frequencies_E / factor ** (1 / len(frequencies_E))  # noqa: E731
    return RotaryTable(
        rotary_dim=rotary_dim, theta=theta, num_positions=num_positions, device=device, stretch=stretch
    )


def _mapping(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    value: Any = checkpoint.config.get(name) or {}
    if not isinstance(value, dict):
        raise ModelError(
            f"{name} of the model must hold settings by name, got {value!r}; fetch config.json again"
        )
    return value


def _number(parameters: Mapping[str, Any], name: str, default: Any = None) -> float:
    value: Any = parameters.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(
            f"{name} of the model's rotary positions must be a positive number, got {value!r}; fetch "
            "config.json again"
        )
    return float(value)


def _llama3(parameters: Mapping[str, Any], factor: float, max_positions: Any) -> Stretch:
    trained = _number(parameters, "original_max_position_embeddings", max_positions)
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    if not low < high:
        raise ModelError(
            f"low_freq_factor must be below high_freq_factor, got {low:g} and {high:g}; fetch "
            "config.json again"
        )

    def stretch(frequencies_E: torch.Tensor) -> torch.Tensor:
        waves_in_text_E = trained * frequencies_E / (2 * math.pi)
        kept_E = ((waves_in_text_E - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies_E * (kept_E + (1 - kept_E) / factor)

    return stretch


def _mixed_ntk(factor: float, power: float) -> Stretch:
    def stretch(frequencies_E: torch.Tensor) -> torch.Tensor:
        numbers_E = torch.arange(1, len(frequencies_E) + 1, dtype=torch.float32)
        return frequencies_E / torch.exp(math.log(factor) * (numbers_E / len(frequencies_E)) ** power)

    return stretch
