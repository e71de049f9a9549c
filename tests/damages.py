"""Ways in which a stored file can be damaged."""

from __future__ import annotations

from collections.abc import Iterator


def flipped_bits(content: bytes) -> Iterator[bytes]:
    """Yield a content once for each of its bits, with that bit flipped."""
    for position in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            yield bytes(flipped)
