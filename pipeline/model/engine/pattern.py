"""The seam between the engine and attention: how a batch is laid out, and which token sees which.

A pattern is made for one batch and used by all its layers: the engine lays tokens out with ``pack``, calls
``rotate_`` and ``attend`` in each layer, and lays the text's states back into rows with ``unpack``.

    c c c │ s s │ t t t t t t        c  unplaced vectors: no position, not rotated, in no token's window
    c c c │ s s │ t t t · · ·        s  vectors with positions before the text, such as a soft prompt
    ◀── lead ──▶                     t  text, · padding

A CPU lays a batch out as a padded rectangle, a GPU packs it (``packed``). Batches of a CPU hold rows of
nearly one length, and products of one shape are fast. Local layers cost as much as the batch is long: a block
of queries sees its own keys and ``radius`` around.

    tokens of all rows laid end to end   … | block g-1 | block g | block g+1 | …
    queries of block g                                  ▔▔▔▔▔▔▔▔▔
    keys of block g                            ◀ radius ▔▔▔▔▔▔▔▔▔ radius ▶

A mask takes back what a block sees too much: tokens further than the radius, other rows, padding. Keys and
values of neighbouring blocks overlap in memory. Context vectors have no position, so in a local layer each
sees itself alone, and only global layers carry context to text. Padding sees itself too, so that its outputs
stay finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from cairn.pipeline.model.engine.attention import RelativeBias, Workspace, attend, bias_where
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


class Rectangle(Pattern):
    """``B x S`` tokens, N = B S."""

    def __init__(self, batch: Batch, settings: PassSettings) -> None:
        super().__init__(batch, settings)
        position_S = batch.positions(torch.arange(batch.width)).to(settings.device)
        self._angles = {kind: table.at(position_S) for kind, table in settings.rotary.items()}
        self._bias = self._global_bias()
        self._window: LocalWindow | None = None
        if settings.shape.local_radius is not None:
            self._window = LocalWindow(
                batch.lengths_B + batch.num_placed,
                num_tokens=batch.width - batch.num_unplaced,
                num_context=batch.num_unplaced,
                radius=settings.shape.local_radius,
                device=settings.device,
            )

    def pack(self, x_BSD: Float[torch.Tensor, "B S D"]) -> Float[torch.Tensor, "N D"]:
        return x_BSD.reshape(-1, x_BSD.shape[2])

    def unpack(self, x_MD: Float[torch.Tensor, "M D"]) -> Float[torch.Tensor, "B T D"]:
        return x_MD.view(len(self._batch.lengths_B), self._batch.num_tokens, -1)

    def rotate_(self, heads_NPd: Float[torch.Tensor, "N P d"], *, is_local: bool) -> None:
        if is_local in self._angles:
            rows_BSPd, settings = heads_NPd.view(-1, self._batch.width, *heads_NPd.shape[1:]), self._settings
            settings.rotary[is_local].rotate_(rows_BSPd, self._angles[is_local], settings.workspace)

    def attend(
        self, heads_NPd: Float[torch.Tensor, "N P d"], *, is_local: bool, drop_lead: bool
    ) -> torch.Tensor:
        settings, shape = self._settings, self._settings.shape
        workspace, temperature = settings.workspace, settings.temperature
        if is_local and self._window:
            heads_N3Hd = heads_NPd.view(-1, 3, shape.num_heads, shape.head_dim)
            mixed_ND = self._window.attend(heads_N3Hd, workspace, temperature)
            return self.text(mixed_ND) if drop_lead else mixed_ND
        rows_BPSd = heads_NPd.view(-1, self._batch.width, *heads_NPd.shape[1:]).transpose(1, 2)
        query, key, value = rows_BPSd.split(shape.heads_by_kind, dim=1)
        bias, skip = self._bias, self._batch.num_lead if drop_lead else 0
        if bias is not None and bias.shape[2] > 1:
            bias = bias[:, :, skip:]
        mixed_BQHd = attend(query[:, :, skip:], key, value, bias, workspace, temperature)
        return mixed_BQHd.reshape(-1, shape.num_heads * shape.head_dim)

    def text(self, x_ND: Float[torch.Tensor, "N D"]) -> Float[torch.Tensor, "M D"]:
        x_BSD = x_ND.view(-1, self._batch.width, x_ND.shape[1])
        return x_BSD[:, self._batch.num_lead :].reshape(-1, x_ND.shape[1])

    def _global_bias(self) -> Float[torch.Tensor, "_B _H _Q S"] | None:
        seen, settings, relative = self._seen_bias(), self._settings, self._settings.relative_bias
        if relative is None:
            return seen
        bias_1HSS = relative.of_rows(self._batch.width, self._batch.num_unplaced, settings.temperature)
        return bias_1HSS if seen is None else bias_1HSS + seen

    def _seen_bias(self) -> Float[torch.Tensor, "B 1 _Q S"] | None:
        batch, device, visible_BS = self._batch, self._settings.device, None
        order_S = torch.arange(batch.width, device=device)
        # Validity is by true length, as padding may be a token that texts use too.
        if int(batch.lengths_B.min(initial=batch.num_tokens)) < batch.num_tokens:
            lengths_B = torch.from_numpy(batch.lengths_B).to(device)
            visible_BS = order_S < (lengths_B + batch.num_lead)[:, None]
        if self._settings.shape.is_causal:
            # Keys without a position come before all queries.
            sees_SS = (order_S[None] <= order_S[:, None]) | (order_S[None] < batch.num_unplaced)
            visible = sees_SS[None] if visible_BS is None else sees_SS & visible_BS[:, None]
            return bias_where(visible[:, None])
        return None if visible_BS is None else bias_where(visible_BS[:, None, None])


MIN_BLOCK: Final = 16
"""Narrower blocks would cost more in calls than they save in products."""


class LocalWindow:
    """The window of one batch of B equally wide rows; made once, used by all its local layers."""

    def __init__(
        self,
        lengths_B: Int64[np.ndarray, " B"],
        *,
        num_tokens: int,
        num_context: int,
        radius: int,
        device: torch.device,
    ) -> None:
        num_rows, width = len(lengths_B), num_context + num_tokens
        is_padded = int(lengths_B.min(initial=num_tokens)) < num_tokens
        self._width = width
        self.block = max(radius, MIN_BLOCK)
        self.num_keys = self.block + 2 * radius
        self.is_blocked = width > self.num_keys
        if not self.is_blocked:
            # Rows of one length share one mask.
            tags_BS = _row_tags(lengths_B if is_padded else lengths_B[:1], num_tokens, num_context, device)
            self.bias = bias_where(_seen(tags_BS[:, :, None], tags_BS[:, None, :], 0, radius)[:, None])
            return
        tags_BS = _row_tags(lengths_B, num_tokens, num_context, device)
        num_all = num_rows * width
        self.num_blocks = -(-num_all // self.block)
        # So many rows of zeros stand before the tokens, and the rest of the last block and as many behind.
        self.lead, self.num_padded = radius, self.num_blocks * self.block + 2 * radius
        tags = torch.full((self.num_padded,), -1, device=device)
        tags[radius : radius + num_all] = tags_BS.reshape(-1)
        keys_GK = tags.unfold(0, self.num_keys, self.block)
        queries_Gb = tags[radius : radius + self.num_blocks * self.block].view(-1, self.block)
        self.bias = bias_where(_seen(queries_Gb[:, :, None], keys_GK[:, None, :], radius, radius)[:, None])

    def attend(
        self, qkv_N3Hd: Float[torch.Tensor, "N 3 H d"], workspace: Workspace, temperature: float = 1.0
    ) -> Float[torch.Tensor, "M D"]:
        """Mix values inside the window."""
        num_heads, head_dim = qkv_N3Hd.shape[2:]
        if not self.is_blocked:
            query, key, value = qkv_N3Hd.view(-1, self._width, 3, num_heads, head_dim).permute(2, 0, 3, 1, 4)
            return attend(query, key, value, self.bias, workspace, temperature).reshape(
                -1, num_heads * head_dim
            )
        num_tokens, num_inside, end = len(qkv_N3Hd), self.num_blocks * self.block, self.lead + len(qkv_N3Hd)
        padded_N3Hd = workspace.take("padded", (self.num_padded, *qkv_N3Hd.shape[1:]), qkv_N3Hd.dtype)
        padded_N3Hd[: self.lead].zero_()
        padded_N3Hd[self.lead : end] = qkv_N3Hd
        padded_N3Hd[end:].zero_()
        step = padded_N3Hd.stride(0)

        def blocks(part: int, first: int, length: int) -> torch.Tensor:
            return padded_N3Hd[first:, part].as_strided(
                (self.num_blocks, num_heads, length, head_dim), (self.block * step, head_dim, step, 1)
            )

        query = blocks(0, self.lead, self.block)
        mixed = attend(
            query, blocks(1, 0, self.num_keys), blocks(2, 0, self.num_keys), self.bias, workspace, temperature
        )
        return mixed.reshape(num_inside, num_heads * head_dim)[:num_tokens]


def _row_tags(
    lengths_B: Int64[np.ndarray, " B"], num_tokens: int, num_context: int, device: torch.device
) -> Int64[torch.Tensor, "B S"]:
    """Return the row a text token belongs to, -1 for context and padding."""
    lengths = torch.from_numpy(lengths_B).to(device)
    position_S = torch.arange(-num_context, num_tokens, device=device)
    is_text_BS = (position_S >= 0) & (position_S < lengths[:, None])
    return torch.where(is_text_BS, torch.arange(len(lengths), device=device)[:, None], -1)


def _seen(query_tags: torch.Tensor, key_tags: torch.Tensor, first_query: int, radius: int) -> torch.Tensor:
    """Say which keys a query sees: those of its own row within the radius, and itself."""
    queries = torch.arange(query_tags.shape[1], device=query_tags.device)[:, None] + first_query
    distance = (queries - torch.arange(key_tags.shape[2], device=query_tags.device)).abs()
    return ((query_tags == key_tags) & (query_tags >= 0) & (distance <= radius)) | (distance == 0)
