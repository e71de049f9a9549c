"""Groups of unequal size, laid end to end."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64


def places_in_groups(sizes_G: Int64[np.ndarray, " G"]) -> Int64[np.ndarray, " N"]:
    """Return the place of every item within its group: 0 to size - 1 for each group, one after another."""
    return ranges(np.zeros_like(sizes_G), sizes_G)


def ranges(starts_G: Int64[np.ndarray, " G"], sizes_G: Int64[np.ndarray, " G"]) -> Int64[np.ndarray, " N"]:
    """Return ``start`` to ``start + size - 1`` for each group, one after another."""
    ends_G = np.cumsum(sizes_G)
    return np.arange(int(ends_G[-1]) if len(ends_G) else 0) + np.repeat(
        starts_G - (ends_G - sizes_G), sizes_G
    )
