"""What a configuration says of rotary positions: the base, and how frequencies are stretched to longer texts.

    default   f                                     f of pair i: base^(-2 i / d)
    linear    f / factor
    llama3    f where waves are short, f / factor where they are long, a blend between
    ntk       base * factor and f / factor^(2/d); with ``mixed_b`` the plain base and f / e^(a m^b) of pair m

These four are constant over the length of a text. Kinds that change with it or also scale the attention
(dynamic, yarn, longrope) are refused. Reads today's ``rope_parameters`` and the older ``rope_scaling`` beside
``rope_theta``.

Source: Su, "Rectified NTK-RoPE" (fixed and mixed, as GTE publishes them); Llama 3.1's published
configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.rotary import Stretch
from cairn.pipeline.model.folders.checkpoint import Checkpoint

KINDS: Final = ("default", "linear", "llama3", "ntk")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSettings:
    """The base of the frequencies, and what is done to them; None leaves them plain."""

    theta: float
    stretch: Stretch | None = None


def read_rope(checkpoint: Checkpoint, *, default_theta: float = 10_000.0) -> RopeSettings:
    """Read a configuration; a kind that is not built raises :class:`ModelError`."""
    parameters = {**_mapping(checkpoint, "rope_scaling"), **_mapping(checkpoint, "rope_parameters")}
    theta = _number(parameters, "rope_theta", checkpoint.number("rope_theta", default=default_theta))
    rotated = _number(
        parameters, "partial_rotary_factor", checkpoint.number("partial_rotary_factor", default=1.0)
    )
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in KINDS or rotated != 1.0:
        raise ModelError(
            f"rotary positions must be of a kind among {', '.join(KINDS)} over the whole head, got "
            f"{kind!r} over {rotated:g} of it; "
            "choose another model"
        )
    if kind == "default":
        return RopeSettings(theta=theta)
    factor = _number(parameters, "factor")
    if kind == "linear":
        return RopeSettings(theta=theta, stretch=lambda frequencies_E: frequencies_E / factor)
    if kind == "llama3":
        trained = _number(
            parameters, "original_max_position_embeddings", checkpoint.config.get("max_position_embeddings")
        )
        low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
        if not low < high:
            raise ModelError(
                f"low_freq_factor must be below high_freq_factor, got {low:g} and {high:g}; fetch "
                "config.json again"
            )
        return RopeSettings(theta=theta, stretch=_llama3(factor, low, high, trained))
    # The published code stretches by factors above 1 only.
    if factor <= 1:
        return RopeSettings(theta=theta)
    if parameters.get("mixed_b") is not None:
        return RopeSettings(theta=theta, stretch=_mixed_ntk(factor, _number(parameters, "mixed_b")))
    return RopeSettings(
        theta=theta * factor, stretch=lambda frequencies_E: frequencies_E / factor ** (1 / len(frequencies_E))
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


def _llama3(factor: float, low: float, high: float, trained: float) -> Stretch:
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
