import numpy as np
import pytest

from pipeline.search.fusion import best_first, fuse_hybrid, relative_scores, weighted_mean


def test_weighted_mean_matches_a_naive_loop() -> None:
    parts = [np.array([0.1, 0.9, -0.5], np.float32), np.array([0.4, 0.2, 0.3], np.float32)]
    naive = [(0.25 * float(a) + 0.5 * float(b)) / 0.75 for a, b in zip(*parts, strict=True)]
    assert weighted_mean(parts, [0.25, 0.5]) == pytest.approx(naive, abs=1e-12)


def test_relative_scores_lie_between_floor_and_best() -> None:
    assert relative_scores(np.array([2.0, 4.0, 3.0])).tolist() == [0.0, 1.0, 0.5]
    assert relative_scores(np.array([2.0, 4.0]), floor=0.0).tolist() == [0.5, 1.0]


def test_relative_scores_of_equal_scores_are_one() -> None:
    assert relative_scores(np.array([0.3, 0.3])).tolist() == [1.0, 1.0]


def test_relative_scores_of_nothing_are_nothing() -> None:
    assert len(relative_scores(np.empty(0))) == 0


def test_fuse_hybrid_matches_a_naive_loop() -> None:
    rng = np.random.default_rng(0)
    dense, bm25 = rng.standard_normal(20), np.maximum(rng.standard_normal(20), 0) * 9
    low, high, top = min(dense), max(dense), max(bm25)
    naive = [(0.7 * (d - low) / (high - low) + 0.4 * b / top) / 1.1 for d, b in zip(dense, bm25, strict=True)]
    assert fuse_hybrid(dense, bm25, 0.7, 0.4) == pytest.approx(naive, abs=1e-12)


def test_fuse_hybrid_does_not_depend_on_the_scale_of_the_cosines() -> None:
    rng = np.random.default_rng(1)
    dense, bm25 = rng.random(20), rng.random(20)
    assert fuse_hybrid(0.7 + 0.1 * dense, bm25, 1.0, 1.0) == pytest.approx(fuse_hybrid(dense, bm25, 1.0, 1.0))


def test_best_first_breaks_ties_by_doc_id_whatever_the_order() -> None:
    ids, scores = ["c", "a", "d", "b"], np.array([0.5, 0.5, 0.9, 0.5])
    for seed in range(5):
        shuffled = np.random.default_rng(seed).permutation(4)
        best = best_first(scores[shuffled], [ids[i] for i in shuffled], 3)
        assert [ids[shuffled[i]] for i in best] == ["d", "a", "b"]
