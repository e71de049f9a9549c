"""A batch as a padded rectangle, the layout of a CPU.

Batches there hold rows of nearly one length, and products of one shape are fast.
"""

from __future__ import annotations

import torch
from cairn.pipeline.model.engine.attention import attend, bias_where, visible_keys
from cairn.pipeline.model.engine.block_local_attention import LocalWindow
from cairn.pipeline.model.engine.pattern import Batch, PassSettings, Pattern
from jaxtyping import Float


class Rectangle:
    """Implements :class:`Pattern` for ``B x S`` tokens, N = B S."""

    def __init__(
        self,
        batch: Batch,
        settings: PassSettings,
    ) -> None:
        self._batch = batch
        self._settings = settings
        width_placed = batch.width - batch.num_unplaced
        self._angles = {
            kind: table.angles(batch.num_unplaced, width_placed, batch.first_position)
            for kind, table in (settings.rotary or {}).items()
        }
        self._bias = self._global_bias()
        self._window: LocalWindow | None = None
        if settings.shape.local_radius is not None:
            self._window = LocalWindow(
                batch.lengths_B + batch.num_placed,
                num_tokens=width_placed,
                num_context=batch.num_unplaced,
                radius=settings.shape.local_radius,
                device=settings.device,
            )

    def pack(self, x_BSD: Float[torch.Tensor, "B S D"]) -> Float[torch.Tensor, "N D"]:
        """See :class:`Pattern`."""
        return x_BSD.reshape(-1, x_BSD.shape[2])

    def unpack(self, x_MD: Float[torch.Tensor, "M D"]) -> Float[torch.Tensor, "B T D"]:
        """See :class:`Pattern`."""
        return x_MD.view(len(self._batch.lengths_B), self._batch.num_tokens, -1)

    def rows(self, x_ND: Float[torch.Tensor, "N D"]) -> Float[torch.Tensor, "B S D"]:
        """Return the vectors of lead and text in rows."""
        return x_ND.view(len(self._batch.lengths_B), self._batch.width, -1)

    def margins(self, *, is_local: bool) -> tuple[int, int]:
        """See :class:`Pattern`."""
        return (self._window.lead, self._window.trail) if is_local and self._window else (0, 0)

    def rotate_(self, heads_NPd: Float[torch.Tensor, "N P d"], *, is_local: bool) -> None:
        """See :class:`Pattern`."""
        if self._settings.rotary is not None:
            rows_BSPd = heads_NPd.view(-1, self._batch.width, *heads_NPd.shape[1:])
            self._settings.rotary[is_local].rotate_(
                rows_BSPd, self._angles[is_local], self._settings.workspace
            )

    def attend(
        self, padded_NPd: Float[torch.Tensor, "N P d"], _layer: int, /, *, is_local: bool, drop_lead: bool
    ) -> torch.Tensor:
        """See :class:`Pattern`."""
        shape, workspace, temperature = (
            self._settings.shape,
            self._settings.workspace,
            self._settings.temperature,
        )
        num_heads, num_kv = shape.num_heads, shape.num_key_value_heads
        if is_local and self._window:
            mixed_ND = self._window.attend(
                padded_NPd.view(-1, 3, num_heads, shape.head_dim), workspace, temperature
            )
            return self.text(mixed_ND) if drop_lead else mixed_ND
        rows_BPSd = padded_NPd.view(-1, self._batch.width, *padded_NPd.shape[1:]).transpose(1, 2)
        query, key, value = rows_BPSd.split([num_heads, num_kv, num_kv], dim=1)
        bias, skip = self._bias, self._batch.num_lead if drop_lead else 0
        if bias is not None and bias.shape[2] > 1:
            bias = bias[:, :, skip:]
        mixed_BQHd = attend(query[:, :, skip:], key, value, bias, workspace, temperature)
        return mixed_BQHd.reshape(-1, num_heads * shape.head_dim)

    def text(self, x_ND: Float[torch.Tensor, "N D"]) -> Float[torch.Tensor, "M D"]:
        """See :class:`Pattern`."""
        x_BSD = x_ND.view(-1, self._batch.width, x_ND.shape[1])
        return x_BSD[:, self._batch.num_lead :].reshape(-1, x_ND.shape[1])

    def without_lead(self) -> Pattern:
        """See :class:`Pattern`.

        Only a lead without positions can be dropped before the last layer, so the text's own stay.
        """
        return Rectangle(
            self._batch.without_lead(),
            self._settings,
        )

    def _global_bias(self) -> Float[torch.Tensor, "B 1 _Q S"] | None:
        batch = self._batch
        visible_BS = visible_keys(batch.lengths_B, batch.num_tokens, batch.num_lead, self._settings.device)
        if self._settings.shape.is_causal:
            order_S = torch.arange(batch.width, device=self._settings.device)
            # Keys without a position come before all queries.
            sees_SS = (order_S[None] <= order_S[:, None]) | (order_S[None] < batch.num_unplaced)
            visible = sees_SS[None] if visible_BS is None else sees_SS & visible_BS[:, None]
            return bias_where(visible[:, None])
        return None if visible_BS is None else bias_where(visible_BS[:, None, None])
