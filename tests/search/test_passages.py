import numpy as np
import pytest
from cairn.pipeline.search.candidates import ScoredWindows
from cairn.pipeline.search.passages import ChosenPassage, best_of_each, best_within, joined

SPANS = np.arange(0, 110, 10)
"""Ten chunks of ten characters: four of document 0, six of document 1."""
START, END = SPANS[:-1], SPANS[1:]


def scored(scores: list[float]) -> ScoredWindows:
    """Windows of two chunks: three of document 0, five of document 1."""
    first = np.array([0, 1, 2, 4, 5, 6, 7, 8])
    return ScoredWindows(
        owner=np.array([0] * 3 + [1] * 5),
        first=first,
        end=first + 2,
        scores=np.array(scores),
        parts={"chunk": np.array(scores) / 10},
    )


SCORES = [0.2, 0.1, 0.9, 0.3, 0.8, 0.7, 0.4, 0.6]


def spans(passages) -> list[tuple[int, int, float]]:
    return [(passage.first, passage.end, passage.score) for passage in passages]


def within(max_characters: int, max_documents: int) -> dict[int, list[ChosenPassage]]:
    """Return what a search with a budget shows of each document."""
    found = best_within(
        scored(SCORES), lambda first, end: int(END[end - 1] - START[first]), max_characters, max_documents
    )
    return {owner: joined(pieces) for owner, pieces in found.items()}


def test_best_of_each_are_its_best_windows_that_share_no_chunk() -> None:
    first, second = best_of_each(scored(SCORES), 2, 2, 3)
    assert spans(first) == [(2, 4, 0.9), (0, 2, 0.2)]
    assert spans(second) == [(5, 7, 0.8), (8, 10, 0.6)]


@pytest.mark.parametrize(("max_characters", "of_second"), [(70, (5, 10, 0.8)), (49, (5, 7, 0.8))])
def test_best_within_ends_at_what_does_not_fit_and_joins_what_stands_side_by_side(
    max_characters: int, of_second: tuple[int, int, float]
) -> None:
    found = {owner: spans(passages) for owner, passages in within(max_characters, 2).items()}
    assert found == {0: [(2, 4, 0.9)], 1: [of_second]}


def test_best_within_carries_the_parts_of_the_best_window() -> None:
    assert [dict(p.parts) for p in within(70, 2)[1]] == [{"chunk": pytest.approx(0.08)}]


@pytest.mark.parametrize("max_characters", range(5, 120, 5))
def test_best_within_is_never_longer_than_its_budget(max_characters: int) -> None:
    found = within(max_characters, 2)
    characters = [10 * (passage.end - passage.first) for passages in found.values() for passage in passages]
    assert sum(characters) <= max_characters
    assert bool(characters) == (max_characters >= 20)


def test_best_within_passes_over_further_documents() -> None:
    assert list(within(1_000, 1)) == [0]
    assert spans(within(1_000, 1)[0]) == [(0, 4, 0.9)]
