from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.lab.analysis.attention_by_position import lay_out, measure_positions, position_shares

from tests.lab.analysis.numpy_bert import run_bert


def naive_shares(weights: np.ndarray, pooled: list[int], text: list[int], bins: int) -> list[float]:
    received = [
        sum(weights[h, i, j] for h in range(len(weights)) for i in pooled) / len(weights) / len(pooled)
        for j in text
    ]
    shares = [0.0] * bins
    for place, amount in enumerate(received):
        shares[place * bins // len(text)] += amount / sum(received)
    return shares


def test_shares_equal_a_loop_over_heads_and_positions():
    weights = np.random.default_rng(0).dirichlet(np.ones(13), (3, 13))
    is_pooled, is_text = np.arange(13) == 0, (np.arange(13) > 0) & (np.arange(13) < 12)
    shares, special = position_shares(weights, is_pooled, is_text, 4)

    assert shares.tolist() == pytest.approx(naive_shares(weights, [0], list(range(1, 12)), 4))
    assert special == pytest.approx(weights[:, 0, [0, 12]].sum(axis=1).mean())


def test_landmarks_alone_are_pooled_in_their_layout(backbone):
    row, is_pooled, is_text = lay_out(backbone, [7, 8, 9, 10, 11], "lmk", 2)

    assert row == [2, 7, 8, 3, 9, 10, 3, 11, 3]
    assert np.flatnonzero(is_pooled).tolist() == [3, 6, 8]
    assert np.flatnonzero(is_text).tolist() == [1, 2, 4, 5, 7]


def test_layouts_are_measured_on_the_last_layer(backbone, rows, tiny_model_folder):
    measured = {each.layout: each for each in measure_positions(backbone, rows, 8)}
    pooled = {"cls": [0], "mean": list(range(26)), "lmk": [9, 18, 27]}
    text = {"cls": list(range(1, 25)), "mean": list(range(1, 25))}
    text["lmk"] = [place for place in range(1, 28) if place % 9]

    assert list(measured) == ["cls", "mean", "lmk"]
    for layout, own in measured.items():
        expected = np.zeros(10)
        for ids in rows:
            step = 8 if layout == "lmk" else 24
            row = [2] + [token for start in range(0, 24, step) for token in [*ids[start : start + step], 3]]
            weights = run_bert(tiny_model_folder, row)[1][-1].weights
            expected += np.array(naive_shares(weights, pooled[layout], text[layout], 10)) / len(rows)
        assert own.shares == pytest.approx(expected.tolist(), abs=1e-5)
