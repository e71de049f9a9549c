from itertools import pairwise

import numpy as np
import pytest
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.search.candidates import window_scores, window_scores_of_documents
from cairn.pipeline.search.passages import FIRST_LOOK, choose_windows, new_pieces, window_size
from hypothesis import given
from hypothesis import strategies as st


def settings_of(interval: int) -> dict[str, dict[str, int]]:
    return {"encoder": {"landmark_interval": interval}}


def naive_window_scores(vectors: np.ndarray, query: np.ndarray, size: int) -> list[float]:
    scores = []
    for start in range(max(len(vectors) - size, 0) + 1):
        total = sum(vector.astype(np.float64) for vector in vectors[start : start + size])
        scores.append(float(query.astype(np.float64) @ total / np.linalg.norm(total)))
    return scores


def naive_choice(scores: list[float], size: int, limit: int) -> list[int]:
    chosen: list[int] = []
    for start in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        landmarks = set(range(start, start + size))
        if len(chosen) < limit and all(landmarks.isdisjoint(range(other, other + size)) for other in chosen):
            chosen.append(start)
    return chosen


def unit_rows(count: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_window_scores_of_opposite_landmarks_are_zero() -> None:
    vectors = np.array([[1.0, 0.0], [-1.0, 0.0]], np.float32)
    assert window_scores(vectors, np.array([0.6, 0.8], np.float32), 2).tolist() == [0.0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 12, 13, 100])
@pytest.mark.parametrize("counts", [[1], [12], [1, 1, 2], [5, 1, 3, 2, 7, 1]])
def test_window_scores_of_documents_are_those_of_each(counts: list[int], size: int) -> None:
    vectors, query = unit_rows(sum(counts)), unit_rows(1, seed=1)[0]
    own = np.split(vectors, np.cumsum(counts)[:-1])
    expected = [score for rows in own for score in naive_window_scores(rows, query, size)]
    np.testing.assert_allclose(
        window_scores_of_documents(vectors, np.array(counts), query, size), expected, atol=1e-6
    )


@given(
    scores=st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    size=st.integers(1, 6),
    limit=st.integers(1, 8),
)
def test_choose_windows_equals_a_naive_greedy_choice(scores: list[int], size: int, limit: int) -> None:
    assert choose_windows(np.array(scores, np.float32), size, limit) == naive_choice(
        [float(s) for s in scores], size, limit
    )


@pytest.mark.parametrize(
    ("interval", "size"), [(8, 16), (16, 8), (32, 4), (64, 2), (128, 1), (96, 1), (100, 1), (256, 1)]
)
def test_window_size_by_default_is_128_tokens_or_one_landmark(interval: int, size: int) -> None:
    assert window_size(None, settings_of(interval)) == size


@pytest.mark.parametrize("chunk_tokens", [1, 63, 65, 100, 200])
def test_window_size_of_another_number_names_the_allowed_ones(chunk_tokens: int) -> None:
    with pytest.raises(
        ConfigError, match=r"multiple of this collection's 64 \(64, 128, 192, …; left out, it is 128\), got"
    ):
        window_size(chunk_tokens, settings_of(64))


def windows_of(counts: list[int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return first and end chunk of every window of documents with so many chunks."""
    bounds = np.append(0, np.cumsum(counts)).tolist()
    spans = [
        (a + i, min(a + i + size, b)) for a, b in pairwise(bounds) for i in range(max(b - a - size, 0) + 1)
    ]
    return np.array([first for first, _ in spans]), np.array([end for _, end in spans])


def naive_pieces(scores: np.ndarray, first: np.ndarray, end: np.ndarray) -> list[tuple[int, list[int]]]:
    taken: set[int] = set()
    pieces = []
    for window in sorted(range(len(scores)), key=lambda w: (-scores[w], w)):
        new = [chunk for chunk in range(first[window], end[window]) if chunk not in taken]
        if new and scores[window] > -np.inf:
            pieces.append((window, new))
            taken.update(new)
    return pieces


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    size=st.integers(1, 5),
    seed=st.integers(0, 1_000),
)
def test_new_pieces_are_what_no_better_window_holds(counts: list[int], size: int, seed: int) -> None:
    first, end = windows_of(counts, size)
    scores = np.random.default_rng(seed).integers(-3, 3, len(first)).astype(np.float64)
    scores[scores == -3] = -np.inf
    found = [(window, list(range(a, b))) for window, a, b in new_pieces(scores, first, end)]
    assert found == naive_pieces(scores, first, end)


def test_new_pieces_go_on_beyond_the_first_look() -> None:
    first, end = windows_of([3 * FIRST_LOOK], 1)
    scores = np.random.default_rng(0).integers(0, 9, 3 * FIRST_LOOK).astype(np.float64)
    assert [window for window, _, _ in new_pieces(scores, first, end)] == np.argsort(
        -scores, kind="stable"
    ).tolist()
