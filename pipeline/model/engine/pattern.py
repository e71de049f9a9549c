"""The seam between the engine and attention: how a batch is laid out, and which token sees which.

A pattern is made for one batch and used by all its layers: the engine lays tokens out with ``pack``, calls
``rotate_`` and ``attend`` in each layer, and lays the text's states back into rows with ``unpack``.

    c c c │ s s │ t t t t t t        c  unplaced vectors: no position, not rotated, in no token's window
    c c c │ s s │ t t t · · ·        s  vectors with positions before the text, such as a soft prompt
    ◀── lead ──▶                     t  text, · padding
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from cairn.pipeline.model.engine.attention import RelativeBias, Workspace
from cairn.pipeline.model.engine.rotary import RotaryTable
from jaxtyping import Float, Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What attention must know of a model; ``local_radius`` = None has global layers only."""

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    max_positions: int
    norm_first: bool
    is_causal: bool = False
    local_radius: int | None = None

    @property
    def heads_by_kind(self) -> list[int]:
        """Return how many heads queries, keys and values have."""
        return [self.num_heads, self.num_key_value_heads, self.num_key_value_heads]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassSettings:
    """What all batches of one temperature share.

    ``temperature`` divides every logit, ``rotary`` is by ``is_local``.
    """

    shape: Shape
    rotary: Mapping[bool, RotaryTable]
    temperature: float
    workspace: Workspace
    device: torch.device
    relative_bias: RelativeBias | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """B rows: the lengths of their texts, the width T, what stands before them, its first position."""

    lengths_B: Int64[np.ndarray, " B"]
    num_tokens: int
    num_lead: int = 0
    num_unplaced: int = 0
    first_position: int = 0

    @property
    def width(self) -> int:
        """Return how many vectors a row has, padding included."""
        return self.num_lead + self.num_tokens

    @property
    def num_placed(self) -> int:
        """Return how many vectors of the lead have a position."""
        return self.num_lead - self.num_unplaced

    def positions(self, place: Int64[torch.Tensor, " N"]) -> Int64[torch.Tensor, " N"]:
        """Return the positions of places in a row; 0 for what has none, whose angle is no rotation."""
        position = place - self.num_unplaced + self.first_position
        return torch.where(place < self.num_unplaced, 0, position)

    def without_lead(self) -> Batch:
        """Return the texts alone, at the positions they have behind their lead."""
        return Batch(
            lengths_B=self.lengths_B,
            num_tokens=self.num_tokens,
            first_position=self.first_position + self.num_placed,
        )


class Pattern(ABC):
    """A batch laid out as N tokens; P heads are those of queries, keys and values together.

    ``drop_lead_at`` is the layer behind whose attention only the text goes on, None where there is no lead.
    """

    drop_lead_at: int | None = None

    def __init__(self, batch: Batch, settings: PassSettings) -> None:
        self._batch = batch
        self._settings = settings

    @abstractmethod
    def pack(self, x_BSD: Float[torch.Tensor, "B S D"]) -> Float[torch.Tensor, "N D"]:
        """Lay rows of lead and text out."""

    @abstractmethod
    def unpack(self, x_MD: Float[torch.Tensor, "M D"]) -> Float[torch.Tensor, "B T D"]:
        """Return the text's vectors in rows; positions after a row's length hold no meaning."""

    @abstractmethod
    def rotate_(self, heads_NPd: Float[torch.Tensor, "N P d"], *, is_local: bool) -> None:
        """Turn queries and keys by their positions, in place, where the model has rotary ones."""

    @abstractmethod
    def attend(
        self, heads_NPd: Float[torch.Tensor, "N P d"], *, is_local: bool, drop_lead: bool
    ) -> torch.Tensor:
        """Mix the values of one layer; return ``M D`` of all tokens, of the text when the lead goes."""

    @abstractmethod
    def text(self, x_ND: Float[torch.Tensor, "N D"]) -> Float[torch.Tensor, "M D"]:
        """Return the text's vectors alone, as memory of their own."""

    def without_lead(self) -> Pattern:
        """Return the pattern of the layers after the one that dropped the lead.

        Only a lead without positions can be dropped before the last layer, so the text's own stay.
        """
        return type(self)(self._batch.without_lead(), self._settings)
