from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.lab.analysis.landmark_sides import measure_sides, side_ranks

from tests.lab.analysis.numpy_bert import run_bert


def naive_ranks(landmarks: np.ndarray, chunks: np.ndarray) -> list[list[int]]:
    ranks: list[list[int]] = []
    for number, landmark in enumerate(landmarks):
        cosines = [chunk @ landmark / np.linalg.norm(chunk) / np.linalg.norm(landmark) for chunk in chunks]
        ranks.append([sum(other > cosines[side] for other in cosines) for side in (number, number + 1)])
    return ranks


def test_ranks_equal_a_loop_over_landmarks_and_chunks():
    generator = np.random.default_rng(1)
    landmarks, chunks = generator.standard_normal((7, 5)), generator.standard_normal((8, 5))

    assert side_ranks(landmarks, chunks).tolist() == naive_ranks(landmarks, chunks)


def test_hits_equal_the_model_in_numpy(backbone, rows, tiny_model_folder):
    ranks: list[list[int]] = []
    for ids in rows:
        chunks = [[*ids[start : start + 4], 3] for start in range(0, 24, 4)]
        together = run_bert(tiny_model_folder, [2, *(token for chunk in chunks for token in chunk)])[0][-1]
        alone = np.stack([run_bert(tiny_model_folder, [2, *chunk])[0][-1][-1] for chunk in chunks])
        ranks += naive_ranks(together[[5, 10, 15, 20, 25]], alone)
    expected = np.array(ranks)
    measured = measure_sides(backbone, rows, 4)

    assert [each.k for each in measured] == [1, 2, 5]
    for own in measured:
        hits = expected < own.k
        assert (own.left, own.right) == pytest.approx(hits.mean(axis=0).tolist())
        assert own.any == pytest.approx(hits.any(axis=1).mean())
        assert (own.chunks, own.landmarks) == (6, 15)


def test_chance_is_that_of_drawing_chunks(backbone, rows):
    own = measure_sides(backbone, rows, 4)[1]

    assert own.chance == pytest.approx(2 / 6)
    assert own.chance_any == pytest.approx(1 - (4 / 6) * (3 / 5))
