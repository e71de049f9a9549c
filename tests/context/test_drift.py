from __future__ import annotations

import pytest
from cairn.pipeline.context.drift import measure_drift
from cairn.pipeline.errors import FingerprintMismatchError
from hypothesis import given
from hypothesis import strategies as st

pairs = st.lists(st.tuples(st.integers(0, 1_000), st.integers(0, 1_000)), min_size=1, max_size=20).filter(
    lambda rows: sum(a for a, _ in rows) > 0 and sum(b for _, b in rows) > 0
)


@given(pairs)
def test_measure_drift_equals_the_naive_distance(rows: list[tuple[int, int]]) -> None:
    before, now = [a for a, _ in rows], [b for _, b in rows]
    p, q = [a / sum(before) for a in before], [b / sum(now) for b in now]
    drift = measure_drift(before, now, sum(before))
    assert drift.total_variation == pytest.approx(
        sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2, abs=1e-12
    )


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        ([520, 480], "none"),
        ([560, 440], "slight"),
        ([690, 310], "slight"),
        ([710, 290], "re-contextualise"),
        ([1_200, 1_200], "re-contextualise"),
    ],
)
def test_measure_drift_verdict_follows_distance_and_growth(now: list[int], verdict: str) -> None:
    assert measure_drift([500, 500], now, 1_000).verdict == verdict


def test_measure_drift_names_the_clusters_that_moved_most_and_takes_no_other_clusters() -> None:
    assert measure_drift([25, 25, 25, 25], [25, 45, 15, 15], 100).changed_clusters == (1, 2, 3)
    assert measure_drift([50, 50], [10, 10], 100).added_share == 0.0
    assert measure_drift([5, 5], [0, 0], 10).verdict == "none"
    with pytest.raises(FingerprintMismatchError, match="2 and 3"):
        measure_drift([1, 2], [1, 2, 3], 3)
