"""What is kept of chunks' own tokens while they pass through the transformer: codes, or states.

    batch of chunks ─▶ states of own tokens ─▶ rewrite ─▶ rows of each chunk ─▶ TokenRows, in chunk order

Documents keep the codes of a token projection, queries their unit states, which the search projects.

    T tokens    P pooled vectors    M chunks    D model dim
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.ragged import ranges
from cairn.pipeline.token_vectors.codes import FAR, pool_neighbours, runs_of
from cairn.pipeline.token_vectors.projection import TokenProjection
from jaxtyping import Float, Int64

Rewrite = Callable[
    [Float[torch.Tensor, "T D"], Int64[np.ndarray, " m1"]], tuple[np.ndarray, Int64[np.ndarray, " m1"]]
]
"""From states of chunks and the offsets of their tokens to what is kept, and its offsets."""


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


class TokenKeeper:
    """Gathers what ``rewrite`` keeps of each chunk, whatever the order of batches; ``empty`` is no row.

    Rows of runs of ``pool_tokens`` tokens tell where they begin; None: rows do not.
    """

    def __init__(
        self,
        num_M: Int64[np.ndarray, " M"],
        rewrite: Rewrite,
        empty: np.ndarray,
        pool_tokens: int | None = None,
    ) -> None:
        self._pool_tokens = pool_tokens
        self._num_M = num_M
        self._rewrite = rewrite
        self._empty = empty
        self._parts = [empty] * len(num_M)

    def keep(self, chunk_m: Int64[np.ndarray, " m"], own_TD: Float[torch.Tensor, "T D"]) -> None:
        """Take the states of some chunks, one after another."""
        offsets = np.concatenate([[0], np.cumsum(self._num_M[chunk_m])])
        rows, offsets = self._rewrite(own_TD, offsets)
        for place, chunk in enumerate(chunk_m.tolist()):
            self._parts[chunk] = rows[offsets[place] : offsets[place + 1]]

    def finish(
        self, start_char_T: Int64[np.ndarray, " T"], chunk_start_M: Int64[np.ndarray, " M"]
    ) -> TokenRows:
        """Return the rows of all chunks, in their order, given where tokens and chunks begin."""
        rows = TokenRows(
            rows=np.concatenate([self._empty, *self._parts]),
            offsets=np.concatenate([[0], np.cumsum([len(part) for part in self._parts], dtype=np.int64)]),
        )
        if self._pool_tokens is None:
            return rows
        token_offsets = np.concatenate([[0], np.cumsum(self._num_M)])
        return with_steps(rows, token_offsets, start_char_T, chunk_start_M, self._pool_tokens)


def keep_codes(num_M: Int64[np.ndarray, " M"], projection: TokenProjection) -> TokenKeeper:
    """Keep the codes of a projection, neighbours pooled as it was trained."""
    codec = projection.codec
    matrix_DV = torch.from_numpy(projection.matrix_DV)

    def rewrite(
        own_TD: Float[torch.Tensor, "T D"], offsets: Int64[np.ndarray, " m1"]
    ) -> tuple[np.ndarray, Int64[np.ndarray, " m1"]]:
        vectors_TV = F.normalize(own_TD.float() @ matrix_DV.to(own_TD.device), dim=1).cpu().numpy()
        pooled_PV, pooled_offsets = pool_neighbours(vectors_TV, offsets, projection.pool_tokens)
        return codec.encode(pooled_PV), pooled_offsets

    empty = np.zeros((0, codec.vector_bytes), np.uint8)
    return TokenKeeper(num_M, rewrite, empty, projection.pool_tokens)


def with_steps(
    codes: TokenRows,
    token_offsets: Int64[np.ndarray, " M1"],
    start_char_T: Int64[np.ndarray, " T"],
    chunk_start_M: Int64[np.ndarray, " M"],
    pool_tokens: int,
) -> TokenRows:
    """Add a byte to each row: by how many characters its token begins behind the one before.

    The first of a chunk counts from the chunk's start. :data:`FAR` characters or more are FAR.
    """
    first_token_P, offsets = runs_of(token_offsets, pool_tokens)
    assert np.array_equal(offsets, codes.offsets), "a row a run of tokens"
    start_P = start_char_T[first_token_P]
    before_P = np.concatenate([[0], start_P[:-1]]) if len(start_P) else start_P
    sizes_M = np.diff(offsets)
    before_P[offsets[:-1][sizes_M > 0]] = chunk_start_M[sizes_M > 0]
    steps_P = np.clip(start_P - before_P, 0, FAR).astype(np.uint8)
    return replace(codes, rows=np.concatenate([codes.rows, steps_P[:, None]], axis=1))


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


def keep_states(num_M: Int64[np.ndarray, " M"], model_dim: int) -> TokenKeeper:
    """Keep unit states in float32."""

    def rewrite(
        own_TD: Float[torch.Tensor, "T D"], offsets: Int64[np.ndarray, " m1"]
    ) -> tuple[np.ndarray, Int64[np.ndarray, " m1"]]:
        return F.normalize(own_TD.float(), dim=1).cpu().numpy(), offsets

    return TokenKeeper(num_M, rewrite, np.zeros((0, model_dim), np.float32))
