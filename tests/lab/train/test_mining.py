from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.lab.train.pair_vectors import NONE_FOUND, mine_hard_negatives

N, V = 41, 6


def world() -> tuple[np.ndarray, np.ndarray, list[str], list[str]]:
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((2, N, V)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    documents = [f"text {place % 35}" for place in range(N)]
    for place in range(35, N):
        vectors[1, place] = vectors[1, place - 35]
    return vectors[0], vectors[1], documents, [f"s{place % 3}" for place in range(N)]


NO_PAIRS = np.zeros(0, np.int64)


@pytest.mark.parametrize("num_negatives", [1, 4, 30])
@pytest.mark.parametrize("margin", [0.0, 0.02, 0.4])
def test_mine_hard_negatives_equals_the_rule_written_out(num_negatives: int, margin: float):
    query, document, texts, sources = world()
    left_out = np.array([3, 8])
    mined = mine_hard_negatives(
        query,
        document,
        texts,
        sources,
        num_negatives=num_negatives,
        max_share=0.95,
        left_out=left_out,
        margin=margin,
    )
    for pair in range(N):
        positive = float(query[pair] @ document[pair])
        limit = min(positive - 0.05 * abs(positive), positive - margin)
        seen: dict[str, int] = {}
        for other in range(N):
            if sources[other] == sources[pair] and other not in left_out and texts[other] != texts[pair]:
                seen.setdefault(texts[other], other)
        allowed = [other for other in seen.values() if float(query[pair] @ document[other]) < limit]
        expected = sorted(allowed, key=lambda other: -float(query[pair] @ document[other]))[:num_negatives]
        assert mined[pair].tolist() == expected + [NONE_FOUND] * (num_negatives - len(expected))


def test_mine_hard_negatives_a_pair_alone_in_its_source_has_none():
    query, document, texts, _ = world()
    mined = mine_hard_negatives(
        query,
        document,
        texts,
        [str(place) for place in range(N)],
        num_negatives=2,
        max_share=0.95,
        left_out=NO_PAIRS,
    )
    assert (mined == NONE_FOUND).all()
