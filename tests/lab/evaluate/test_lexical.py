from __future__ import annotations

import math

import numpy as np
import pytest
from cairn.pipeline.lab.evaluate.lexical import search_bm25
from cairn.pipeline.types import silent_progress

TEXTS = ["old stone path", "stone stone river", "mountain", "river path walk river", "cat"]


def naive_bm25(query: str, text: str, k1: float = 1.2, b: float = 0.75) -> float:
    words = [candidate.split() for candidate in TEXTS]
    average = sum(map(len, words)) / len(words)
    own = text.split()
    score = 0.0
    for word in query.split():
        holders = sum(word in candidate for candidate in words)
        idf = math.log(1 + (len(words) - holders + 0.5) / (holders + 0.5))
        count = own.count(word)
        score += idf * count * (k1 + 1) / (count + k1 * (1 - b + b * len(own) / average))
    return score


def test_scores_equal_the_formula_of_bm25():
    found = search_bm25(TEXTS, ["stone path", "river"], 10, silent_progress)

    for query, positions, scores in zip(["stone path", "river"], found.positions, found.scores, strict=True):
        expected = {
            index: naive_bm25(query, text)
            for index, text in enumerate(TEXTS)
            if set(query.split()) & set(text.split())
        }
        assert dict(zip(positions.tolist(), scores.tolist(), strict=True)) == pytest.approx(
            expected, rel=1e-3
        )
        assert np.all(np.diff(scores) <= 0)


def test_query_without_a_known_word_finds_nothing():
    found = search_bm25(TEXTS, ["zebra"], 10, silent_progress)

    assert len(found.positions[0]) == 0


def test_equal_scores_stand_by_position():
    found = search_bm25(["stone", "river", "stone", "stone"], ["stone"], 10, silent_progress)

    assert found.positions[0].tolist() == [0, 2, 3]


def test_limit_keeps_the_best():
    found = search_bm25(TEXTS, ["stone path"], 1, silent_progress)

    assert found.positions[0].tolist() == [0]


def test_index_takes_bytes():
    assert search_bm25(TEXTS, ["stone"], 10, silent_progress).index_bytes > 0


def test_titles_add_to_the_score_of_their_text():
    titles = ["", "stone", "river stone", "", ""]
    found = [search_bm25(TEXTS, ["stone"], 10, silent_progress, given) for given in (None, titles)]
    plain, titled = (
        dict(zip(hits.positions[0].tolist(), hits.scores[0].tolist(), strict=True)) for hits in found
    )

    assert (set(plain), set(titled)) == ({0, 1}, {0, 1, 2})
    assert titled[0] == pytest.approx(plain[0])
    assert titled[1] - plain[1] > titled[2] > 0.0  # the same word in a longer title
