"""Rotary positions (RoPE): queries and keys turned by an angle that grows with the position.

Halves are paired, dimension i with i + d/2, as all published encoders here have it. Text positions start at 0
unless told otherwise. Context vectors in front of the text have no position: their queries and keys are not
turned, so their order does not matter (CDE §10.4). Tables are in float32 and made once, for the positions the
model has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.workspace import Workspace
from jaxtyping import Float, Float32, Int64


def even_head_dim(width: int, num_heads: int) -> int:
    """Return the width of a head, whose dimensions are rotated in pairs.

    Raise :class:`ModelError` when they do not pair up.
    """
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
