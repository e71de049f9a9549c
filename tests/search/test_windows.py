from itertools import pairwise

import numpy as np
import pytest
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.search.candidates import window_scores
from cairn.pipeline.search.passages import FIRST_LOOK, ShownTexts, new_pieces, window_size


def settings_of(interval: int) -> dict[str, dict[str, int]]:
    return {"encoder": {"landmark_interval": interval}}


def test_window_scores_of_opposite_landmarks_are_zero() -> None:
    vectors = np.array([[1.0, 0.0], [-1.0, 0.0]], np.float32)
    assert window_scores(vectors, np.array([0.6, 0.8], np.float32), 2).tolist() == [0.0]


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


def test_new_pieces_go_on_beyond_the_first_look() -> None:
    first, end = windows_of([3 * FIRST_LOOK], 1)
    scores = np.random.default_rng(0).integers(0, 9, 3 * FIRST_LOOK).astype(np.float64)
    assert [window for window, _, _ in new_pieces(scores, first, end)] == np.argsort(
        -scores, kind="stable"
    ).tolist()


NOTICE = "Whoever finds a stone by the river may keep it, but for those that stand in a wall or a bridge."
OWN = "Granite is hard and takes a polish, so it is laid where many feet walk, on steps and in courts."


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        (NOTICE, False),
        (f"{NOTICE[:60]}\n  {NOTICE[61:]}", False),
        (NOTICE[20:80], False),
        (f"{OWN[:40]} {NOTICE}", False),
        (f"{NOTICE[40:]} {OWN}", True),
        (OWN, True),
        (NOTICE[:30], True),
    ],
    ids=["copy", "other white space", "part", "mostly copied", "mostly own", "own", "few words"],
)
def test_shown_texts_take_no_passage_that_another_document_shows_for_the_most_part(
    text: str, is_taken: bool
) -> None:
    shown = ShownTexts()
    assert shown.takes(0, f"Stones. {NOTICE} They are grey.")
    assert shown.takes(1, text) is is_taken
    assert shown.takes(0, NOTICE)
