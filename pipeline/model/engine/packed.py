"""A batch as rows laid end to end, the layout of a GPU: no product is spent on padding.

    rectangle   c c │ t t t t         packed   c c t t t t c c t t
                c c │ t t · ·                  ▔▔▔▔▔▔▔▔▔▔▔ ▔▔▔▔▔▔▔  the kernel is told where each row ends

On CUDA in half precision attention is torch's variable-length flash kernel, local layers by its window.
Elsewhere it is computed row by row, the plain form that the tests hold the kernels against.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.model.engine.pattern import Batch, PassSettings, Pattern
from jaxtyping import Float, Int64


class Packed(Pattern):
    """N vectors, those of all rows."""

    def __init__(self, batch: Batch, settings: PassSettings) -> None:
        super().__init__(batch, settings)
        lengths_B = torch.from_numpy(batch.lengths_B)
        place_S = torch.arange(batch.width)
        is_kept_BS = place_S < lengths_B[:, None] + batch.num_lead
        kept_N = is_kept_BS.reshape(-1).nonzero()[:, 0]
        place_N = kept_N % batch.width
        self._kept_N = kept_N.to(settings.device)
        self._text_M = (place_N >= batch.num_lead).nonzero()[:, 0].to(settings.device)
        is_placed_N = place_N >= batch.num_unplaced
        self._placed_M = is_placed_N.nonzero()[:, 0].to(settings.device)
        self._unplaced_U = (~is_placed_N).nonzero()[:, 0].to(settings.device)
        self._all, self._texts, self._placed = (
            _Rows(lengths_B + extra, settings.device)
            for extra in (batch.num_lead, 0, batch.num_lead - batch.num_unplaced)
        )
        position_N = batch.positions(place_N).to(settings.device)
        self._angles = {kind: table.at(position_N) for kind, table in settings.rotary.items()}

    def pack(self, x_BSD: Float[torch.Tensor, "B S D"]) -> Float[torch.Tensor, "N D"]:
        return x_BSD.reshape(-1, x_BSD.shape[2])[self._kept_N]

    def unpack(self, x_MD: Float[torch.Tensor, "M D"]) -> Float[torch.Tensor, "B T D"]:
        batch, kept_M = self._batch, self._kept_N[self._text_M]
        place_M = kept_M // batch.width * batch.num_tokens + kept_M % batch.width - batch.num_lead
        x_BTD = x_MD.new_zeros(len(batch.lengths_B) * batch.num_tokens, x_MD.shape[1])
        x_BTD[place_M] = x_MD
        return x_BTD.view(len(batch.lengths_B), batch.num_tokens, -1)

    def rotate_(self, heads_NPd: Float[torch.Tensor, "N P d"], *, is_local: bool) -> None:
        if is_local in self._angles:
            table, workspace = self._settings.rotary[is_local], self._settings.workspace
            table.rotate_(heads_NPd, self._angles[is_local], workspace)

    def attend(
        self, heads_NPd: Float[torch.Tensor, "N P d"], *, is_local: bool, drop_lead: bool
    ) -> torch.Tensor:
        shape = self._settings.shape
        query, key, value = heads_NPd.split(shape.heads_by_kind, dim=1)
        if shape.is_causal and self._batch.num_unplaced and not drop_lead:
            return self._mix_causal(query, key, value).flatten(1)
        if not is_local or shape.local_radius is None:
            queries, rows = (query[self._text_M], self._texts) if drop_lead else (query, self._all)
            window = (-1, 0) if shape.is_causal else (-1, -1)
            return self._mix(queries, key, value, rows, self._all, window).flatten(1)
        window = (shape.local_radius, shape.local_radius)
        if self._batch.num_unplaced == 0:
            mixed_NHd = self._mix(query, key, value, self._all, self._all, window)
        else:
            # Without a position a vector sees itself alone: its own value comes out.
            mixed_NHd = value.clone()
            query_MHd, key_MHd, value_MHd = (x[self._placed_M] for x in (query, key, value))
            mixed_NHd[self._placed_M] = self._mix(
                query_MHd, key_MHd, value_MHd, self._placed, self._placed, window
            )
        return self.text(mixed_NHd.flatten(1)) if drop_lead else mixed_NHd.flatten(1)

    def _mix_causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Float[torch.Tensor, "N H d"]:
        """Let vectors without position see all of their kind, and the rest of a row what stands before it."""
        mixed_NHd = torch.empty_like(query)
        placed_M, unplaced_U = self._placed_M, self._unplaced_U
        mixed_NHd[placed_M] = self._mix(query[placed_M], key, value, self._placed, self._all, (-1, 0))
        lengths_B = torch.full((len(self._batch.lengths_B),), self._batch.num_unplaced)
        rows = _Rows(lengths_B, self._settings.device)
        mixed_NHd[unplaced_U] = self._mix(
            query[unplaced_U], key[unplaced_U], value[unplaced_U], rows, rows, (-1, -1)
        )
        return mixed_NHd

    def text(self, x_ND: Float[torch.Tensor, "N D"]) -> Float[torch.Tensor, "M D"]:
        return x_ND[self._text_M]

    def _mix(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        queries: _Rows,
        keys: _Rows,
        window: tuple[int, int],
    ) -> Float[torch.Tensor, "Q H d"]:
        scale = self._settings.shape.head_dim**-0.5 / self._settings.temperature
        shares_keys = self._settings.shape.num_heads != self._settings.shape.num_key_value_heads
        if self._settings.device.type == "cuda":
            # It loads torch's compiler, which takes a second.
            from torch.nn.attention.varlen import varlen_attn

            sharing: dict[str, Any] = {"enable_gqa": True} if shares_keys else {}  # torch 2.11 has no such
            mixed = varlen_attn(
                query.contiguous(),
                key.contiguous(),
                value.contiguous(),
                queries.ends,
                keys.ends,
                queries.longest,
                keys.longest,
                scale=scale,
                window_size=window,
                **sharing,
            )
            assert isinstance(mixed, torch.Tensor)
            return mixed
        parts: list[torch.Tensor] = []
        by_row = (query.split(queries.lengths), key.split(keys.lengths), value.split(keys.lengths))
        for row_query, row_key, row_value in zip(*by_row, strict=True):
            seen = _in_window(len(row_query), len(row_key), window).to(self._settings.device)
            arguments = (x.transpose(0, 1) for x in (row_query, row_key, row_value))
            mixed_HQd = F.scaled_dot_product_attention(
                *arguments, attn_mask=seen, scale=scale, enable_gqa=shares_keys
            )
            parts.append(mixed_HQd.transpose(0, 1))
        return torch.cat(parts)


class _Rows:
    """Where rows end in a packed batch: ``ends`` counts from 0, in int32 on the device."""

    def __init__(self, lengths_B: Int64[torch.Tensor, " B"], device: torch.device) -> None:
        self.lengths: list[int] = lengths_B.tolist()
        self.longest = max(self.lengths, default=0)
        self.ends = F.pad(lengths_B.cumsum(0), (1, 0)).to(device=device, dtype=torch.int32)


def _in_window(num_queries: int, num_keys: int, window: tuple[int, int]) -> torch.Tensor:
    """Say which keys each query sees; queries are the last of the row, and -1 sets no bound."""
    ahead = torch.arange(num_keys)[None] - torch.arange(num_keys - num_queries, num_keys)[:, None]
    back, forth = (num_keys if side < 0 else side for side in window)
    return (ahead >= -back) & (ahead <= forth)
