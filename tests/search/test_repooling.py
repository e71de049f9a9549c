import numpy as np
import pytest

from pipeline.errors import ConfigError
from pipeline.search.repooling import group_size, group_starts, pool_groups

SETTINGS = {"encoder": {"landmark_interval": 128}}


def naive_groups(vectors: np.ndarray, counts: list[int], group: int) -> list[list[np.ndarray]]:
    documents, row = [], 0
    for count in counts:
        members = [vectors[row + first : row + min(first + group, count)] for first in range(0, count, group)]
        documents.append([m.mean(axis=0) / np.linalg.norm(m.mean(axis=0)) for m in members])
        row += count
    return documents


@pytest.mark.parametrize("group", [1, 2, 3, 5, 100])
def test_pool_groups_matches_a_naive_mean_of_members(group: int) -> None:
    counts = [1, 4, 7, 3, 1, 6]
    vectors = np.random.default_rng(0).standard_normal((sum(counts), 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    naive = naive_groups(vectors, counts, group)
    starts, offsets = group_starts(np.array(counts), group)
    assert np.diff(offsets).tolist() == [len(groups) for groups in naive]
    np.testing.assert_allclose(pool_groups(vectors, starts), np.concatenate(naive), atol=1e-6)


def test_pool_groups_of_opposite_vectors_stay_finite() -> None:
    pooled = pool_groups(np.array([[1.0, 0.0], [-1.0, 0.0]], np.float32), np.array([0]))
    assert pooled.tolist() == [[0.0, 0.0]]


def test_group_size_of_nothing_asked_is_one() -> None:
    assert group_size(None, SETTINGS) == 1


def test_group_size_of_a_multiple_is_the_quotient() -> None:
    assert group_size(384, SETTINGS) == 3


@pytest.mark.parametrize("chunk_tokens", [1, 64, 127, 129, 200])
def test_group_size_of_another_number_names_the_allowed_ones(chunk_tokens: int) -> None:
    with pytest.raises(ConfigError, match=r"128, 256, 384"):
        group_size(chunk_tokens, SETTINGS)
