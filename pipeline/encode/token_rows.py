"""What is kept of chunks' own tokens while they pass through the transformer: codes, or states.

    batch of chunks ─▶ states of own tokens ─▶ rewrite ─▶ rows of each chunk ─▶ TokenRows, in chunk order

Documents keep the codes of a codebook, queries their unit states.

    T tokens    M chunks    D model dim
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.ragged import ranges
from cairn.pipeline.token_vectors.codebook import TokenCoder
from cairn.pipeline.types import FAR
from jaxtyping import Bool, Float, Float32, Int64

Rewrite = Callable[[Float[torch.Tensor, "T D"]], np.ndarray]
"""From states of tokens to the row that is kept of each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenRows:
    """Rows of groups laid end to end; group ``i`` owns ``offsets[i]:offsets[i + 1]``."""

    rows: np.ndarray
    offsets: Int64[np.ndarray, " n1"]

    def take(self, groups: Int64[np.ndarray, " n"]) -> TokenRows:
        """Return the rows of some groups, in their order; a group of -1 has none."""
        sizes = np.where(groups < 0, 0, np.diff(self.offsets, append=self.offsets[-1])[groups])
        rows = self.rows[ranges(np.where(groups < 0, 0, self.offsets[groups]), sizes)]
        return TokenRows(rows=rows, offsets=np.concatenate([[0], np.cumsum(sizes)]))


def kept_where(codes: TokenRows, is_kept_T: Bool[np.ndarray, " T"]) -> TokenRows:
    """Return the rows of some tokens; groups may lose some or all of theirs."""
    ends_T1 = np.concatenate([[0], np.cumsum(is_kept_T)])
    return TokenRows(rows=codes.rows[is_kept_T], offsets=ends_T1[codes.offsets])


class TokenKeeper:
    """Gathers what ``rewrite`` keeps of each chunk's states, whatever the order of batches."""

    def __init__(self, num_M: Int64[np.ndarray, " M"], rewrite: Rewrite, model_dim: int) -> None:
        self._num_M = num_M
        self._rewrite = rewrite
        self._empty = rewrite(torch.zeros((0, model_dim)))
        self._parts = [self._empty] * len(num_M)

    def keep(self, chunk_m: Int64[np.ndarray, " m"], own_TD: Float[torch.Tensor, "T D"]) -> None:
        """Take the states of some chunks, one after another."""
        parts = np.split(self._rewrite(own_TD), np.cumsum(self._num_M[chunk_m])[:-1])
        for chunk, part in zip(chunk_m.tolist(), parts, strict=True):
            self._parts[chunk] = part

    def finish(self) -> TokenRows:
        """Return the rows of all chunks, in their order."""
        return TokenRows(
            rows=np.concatenate([self._empty, *self._parts]),
            offsets=np.concatenate([[0], np.cumsum(self._num_M, dtype=np.int64)]),
        )


def codes_by(codebook: TokenCoder | None) -> Rewrite | None:
    """Return what keeps the codes of a codebook, None without one."""
    return None if codebook is None else lambda states_TD: codebook.encode(unit_states(states_TD))


def unit_states(own_TD: Float[torch.Tensor, "T D"]) -> Float32[np.ndarray, "T D"]:
    """Keep unit states in float32."""
    return F.normalize(own_TD.float(), dim=1).cpu().numpy()


def with_steps(
    codes: TokenRows, start_char_T: Int64[np.ndarray, " T"], chunk_start_M: Int64[np.ndarray, " M"]
) -> TokenRows:
    """Add a byte to each row: by how many characters its token begins behind the one before.

    The first of a chunk counts from the chunk's start. :data:`FAR` characters or more are FAR.
    """
    before_T = np.concatenate([[0], start_char_T[:-1]]) if len(start_char_T) else start_char_T
    is_filled_M = np.diff(codes.offsets) > 0
    before_T[codes.offsets[:-1][is_filled_M]] = chunk_start_M[is_filled_M]
    steps_T = np.clip(start_char_T - before_T, 0, FAR).astype(np.uint8)
    return replace(codes, rows=np.concatenate([codes.rows, steps_T[:, None]], axis=1))


def joined_codes(
    codes: TokenRows, text_offsets: Int64[np.ndarray, " N1"], start_char_M: Int64[np.ndarray, " M"]
) -> TokenRows:
    """Return codes of chunks as those of their texts: text ``i`` has chunks ``text_offsets[i]`` to the next.

    A later chunk's first step counts from the token before it, not from the chunk's start.
    """
    rows = codes.rows.copy()
    steps_M1 = np.concatenate([[0], np.cumsum(rows[:, -1], dtype=np.int64)])[codes.offsets]
    last_char_M = start_char_M + np.diff(steps_M1)
    is_later_M = np.diff(codes.offsets) > 0
    is_later_M[text_offsets[:-1]] = False
    later = np.flatnonzero(is_later_M)
    first_tokens = codes.offsets[later]
    steps = rows[first_tokens, -1] + start_char_M[later] - last_char_M[later - 1]
    rows[first_tokens, -1] = np.clip(steps, 0, FAR)
    return TokenRows(rows=rows, offsets=codes.offsets[text_offsets])
