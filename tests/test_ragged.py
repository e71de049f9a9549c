from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.ragged import places_in_groups, ranges


@pytest.mark.parametrize("sizes", [[], [0], [3], [2, 0, 1], [0, 0, 4, 1, 0]])
def test_ranges_equal_those_of_each_group(sizes):
    starts = [7 * index for index in range(len(sizes))]
    expected = [
        place for start, size in zip(starts, sizes, strict=True) for place in range(start, start + size)
    ]
    assert ranges(np.array(starts, np.int64), np.array(sizes, np.int64)).tolist() == expected


def test_places_in_groups_count_from_zero_in_each():
    assert places_in_groups(np.array([2, 0, 3])).tolist() == [0, 1, 0, 1, 2]
