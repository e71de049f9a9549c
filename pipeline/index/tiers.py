"""When segments, and fragments of Lance, are merged: in tiers of eight, as a counter to base eight carries.

A segment of n rows is in tier log8 n, and in that of a newer one where that is higher. Eight of a tier
become one, together with the smaller ones behind them. So there are at most seven of a tier, and a row moves
up whenever it is written again. A segment with many deleted rows is written again sooner. Runs of segments
reach to the newest, since rows keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FACTOR: Final = 8
MAX_DELETED_SHARE: Final = 0.3
"""A segment of which more is deleted is merged: searches read deleted rows, too."""
WHOLE_CHUNKS: Final = 1_024
"""A collection of at most so many chunks is one segment, made again at each publication: in 0.1 s."""


def first_to_merge(live: Sequence[int], stored: Sequence[int]) -> int | None:
    """Return the first of the newest parts that are to become one, None where none are.

    ``stored`` counts the rows of each part, ``live`` those that are not deleted.
    """
    shares = enumerate(zip(live, stored, strict=True))
    first = next((part for part, (left, all_) in shares if all_ - left > MAX_DELETED_SHARE * all_), None)
    while True:
        sizes = list(live) if first is None else [*live[:first], sum(live[first:])]
        due = _first_of_eight(sizes)
        if due is None:
            return first
        first = due


def _first_of_eight(sizes: Sequence[int]) -> int | None:
    tiers: list[int] = []
    for size in reversed(sizes):
        tiers.append(max(tier_of(size), tiers[-1] if tiers else 0))
    for tier in sorted(set(tiers)):
        if tiers.count(tier) >= FACTOR:
            return len(sizes) - 1 - max(place for place, each in enumerate(tiers) if each == tier)
    return None


def tier_of(num_rows: int) -> int:
    """Return the tier of a segment by its size alone."""
    return (max(num_rows, 1).bit_length() - 1) // 3
