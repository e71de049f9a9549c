from __future__ import annotations

import math

import numpy as np
import pytest
from cairn.pipeline.index.tiers import FACTOR, first_to_merge


def first_of(*live: int, deleted: int = 0) -> int | None:
    """Return the first to merge where all but ``deleted`` rows of the first part are left."""
    return first_to_merge(live, [live[0] + deleted, *live[1:]])


def test_seven_segments_of_a_size_stand_and_the_eighth_merges_them() -> None:
    assert first_of(*[10] * 7) is None
    assert first_of(*[10] * 8) == first_of(*[10] * 4, 1, *[10] * 3) == 0, (
        "a smaller one before counts as they do"
    )
    assert first_of(10_000, *[10] * 8) == 1


def test_merge_that_makes_an_eighth_of_the_next_size_takes_those_along() -> None:
    assert first_of(*[64] * 7, *[8] * 8) == 0


def test_segment_with_many_deleted_rows_is_merged_with_all_behind_it() -> None:
    assert first_of(600, 3, deleted=400) == 0
    assert first_of(800, 3, deleted=200) is None


@pytest.mark.parametrize("sizes", [[20], [1], [3, 500], range(1, 300)])
def test_segments_stay_few_and_rows_are_seldom_written_again(sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    segments, written, most = [200_000], [0], 0
    for _ in range(3_000):
        segments, written = [*segments, int(rng.choice(sizes))], [*written, 1]
        first = first_to_merge(segments, segments)
        if first is not None:
            merged = sum(segments[first:])
            segments, written = [*segments[:first], merged], [*written[:first], 1 + max(written[first:])]
        most = max(most, len(segments))
    tiers = math.log(sum(segments), FACTOR)
    assert most <= FACTOR * tiers
    assert max(written) <= math.ceil(tiers) + 1
