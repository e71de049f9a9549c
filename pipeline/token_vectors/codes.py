"""Projected token vectors as few bits: dimensions cut into even steps, codes packed into bytes.

    step      2 · reach / 2^bits of each dimension, reach a multiple of its root mean square
    code      the step a component falls into, clipped to the first and the last
    packed    8 / bits codes a byte, the first in the highest bits

The steps come with the model, not with the collection, so codes of two segments are joined without decoding.
A decoded vector is the middle of its steps at unit length. Source: Max 1960, table II, for the reach of an
even quantiser of a normal variable; ColBERTv2 and PLAID for the packing. Differs: no centroids, no residuals.

    P tokens    V vector dim
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.products import inner_products
from jaxtyping import Float, Float32, UInt8

FAR: Final = 255
"""Characters from one token to the next from which on their number is not kept."""

REACH: Final = {2: 1.991, 4: 2.682, 8: 3.94}
"""Half the range of 2^bits even steps with the least squared error, in root mean squares."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenCodec:
    """How vectors become codes and back; ``rms_V`` are the root mean squares of the model's dimensions."""

    rms_V: Float32[np.ndarray, " V"]
    bits: int

    def __post_init__(self) -> None:
        require_packable(len(self.rms_V), self.bits)

    @property
    def vector_bytes(self) -> int:
        """Return the bytes of one coded vector."""
        return len(self.rms_V) * self.bits // 8

    def encode(self, vectors_PV: Float[np.ndarray, "P V"]) -> UInt8[np.ndarray, "P bytes"]:
        """Return the packed codes of vectors."""
        levels = 1 << self.bits
        codes_PV = np.clip(np.floor(vectors_PV / self._steps() + levels / 2), 0, levels - 1).astype(np.uint8)
        packed = np.zeros((len(vectors_PV), self.vector_bytes), np.uint8)
        for place, shift in enumerate(self._shifts()):
            packed |= codes_PV[:, place :: 8 // self.bits] << shift
        return packed

    def decode(self, codes: UInt8[np.ndarray, "P bytes"]) -> Float32[np.ndarray, "P V"]:
        """Return unit vectors for packed codes."""
        levels = 1 << self.bits
        codes_PV = np.empty((len(codes), len(self.rms_V)), np.float32)
        for place, shift in enumerate(self._shifts()):
            codes_PV[:, place :: 8 // self.bits] = (codes >> shift) & (levels - 1)
        return unit((codes_PV + np.float32(0.5 - levels / 2)) * self._steps())

    def cosines(
        self, codes: UInt8[np.ndarray, "P bytes"], query_qV: Float32[np.ndarray, "q V"]
    ) -> Float32[np.ndarray, "P q"]:
        """Return the inner products of decoded vectors with a query's, without decoding them.

        The steps go to the query, and a byte's levels are looked up.
        """
        levels_PV = _levels_of_bytes(self.bits)[codes].reshape(len(codes), len(self.rms_V))
        steps_V = self._steps()
        norms_P = np.sqrt(inner_products(levels_PV * levels_PV, steps_V * steps_V))
        return inner_products(levels_PV, (query_qV * steps_V).T) / norms_P[:, None]

    def _steps(self) -> Float32[np.ndarray, " V"]:
        return (2 * REACH[self.bits] / (1 << self.bits) * self.rms_V).astype(np.float32)

    def _shifts(self) -> range:
        return range(8 - self.bits, -1, -self.bits)


@cache
def _levels_of_bytes(bits: int) -> Float32[np.ndarray, "256 n"]:
    """Return the middles of the steps that each byte stands for, in steps."""
    codes = np.arange(256, dtype=np.int64)[:, None] >> np.arange(8 - bits, -1, -bits)
    return ((codes & ((1 << bits) - 1)) + 0.5 - (1 << bits) / 2).astype(np.float32)


def require_packable(dims: int, bits: int) -> None:
    """Raise :class:`ConfigError` where vectors of so many dimensions and bits do not fill whole bytes."""
    if bits not in REACH:
        raise ConfigError(f"bits of a token vector must be one of {', '.join(map(str, REACH))}, got {bits}")
    if dims % (8 // bits):
        raise ConfigError(
            f"dims of a token vector must fill whole bytes at {bits} bits, got {dims}; "
            f"choose a multiple of {8 // bits}"
        )


def unit(vectors_PV: Float32[np.ndarray, "P V"]) -> Float32[np.ndarray, "P V"]:
    """Return the rows at length one; a row of zeros stays."""
    norms_P1 = np.linalg.norm(vectors_PV, axis=1, keepdims=True)
    return vectors_PV / np.maximum(norms_P1, np.finfo(np.float32).tiny)
