from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.errors import DamageError
from cairn.pipeline.token_vectors.codebook import TokenCodebook, load_token_coder, token_idf
from cairn.pipeline.token_vectors.projection import LATE_NAME

from tests.late_models import random_codebook


def unit_states(rows: int, width: int = 32, seed: int = 0) -> np.ndarray:
    states = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    return states / np.linalg.norm(states, axis=1, keepdims=True)


def test_code_names_the_nearest_centroid_of_each_subspace():
    codebook, states = random_codebook(32, num_bytes=4), unit_states(20)
    centroids = codebook.centroids.astype(np.float32)
    parts = states.reshape(20, 4, 1, 8)

    nearest = ((parts - centroids) ** 2).sum(-1).argmin(-1)
    codes = codebook.encode(states)
    np.testing.assert_array_equal(codes, nearest)
    written_out = np.concatenate([centroids[place, codes[:, place]] for place in range(4)], axis=1)
    np.testing.assert_allclose(
        codebook.similarities(codes, states[:3]), written_out @ states[:3].T, atol=1e-6
    )


def test_average_similarity_is_that_of_the_mean_of_all_codes():
    codebook, states = random_codebook(32, num_bytes=4), unit_states(3)
    every = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 4, axis=1)

    mean = codebook.similarities(every, states).mean(axis=0)
    np.testing.assert_allclose(codebook.average_similarities(states), mean, atol=1e-4)


def test_fitted_codes_are_near_what_was_coded_and_the_same_each_time():
    states, weights = unit_states(4_000), np.ones(5, np.float32)
    codebook = TokenCodebook.fit(states, weights, 16)

    of_their_own = codebook.similarities(codebook.encode(states), states).diagonal()
    assert of_their_own.mean() > 0.97
    assert TokenCodebook.fit(states, weights, 16).fingerprint == codebook.fingerprint


@pytest.mark.parametrize(("width", "max_bytes", "num_bytes"), [(384, 24, 24), (1_024, 24, 16), (32, 5, 4)])
def test_code_has_as_many_bytes_as_divide_the_width(width: int, max_bytes: int, num_bytes: int):
    fitted = TokenCodebook.fit(unit_states(300, width), np.ones(3, np.float32), max_bytes)

    assert (fitted.vector_bytes, fitted.model_dim) == (num_bytes, width)


def test_saved_codebook_is_loaded_and_sent_as_it_was(tmp_path: Path):
    codebook = random_codebook()
    codebook.save(tmp_path)
    codes = codebook.encode(unit_states(3))

    for again in (load_token_coder(tmp_path), pickle.loads(pickle.dumps(codebook))):
        assert isinstance(again, TokenCodebook)
        assert again.fingerprint == codebook.fingerprint
        of_again, of_first = (each.similarities(codes, unit_states(2)) for each in (again, codebook))
        np.testing.assert_array_equal(of_again, of_first)


@pytest.mark.parametrize("damage", ["cut", "missing", "nan"])
def test_damaged_codebook_is_refused(tmp_path: Path, damage: str):
    codebook = random_codebook()
    if damage == "nan":
        codebook.centroids[0, 0, 0] = np.nan
    codebook.save(tmp_path)
    path = tmp_path / LATE_NAME
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "missing":
        path.unlink()

    with pytest.raises(DamageError):
        load_token_coder(tmp_path)


def test_token_idf_counts_texts_not_occurrences():
    found = token_idf(np.array([1, 1, 2, 1], np.int32), np.array([0, 3, 4, 4]), 4)

    # Three texts: id 1 stands in two of them, id 2 in one, ids 0 and 3 in none.
    assert found == pytest.approx(np.log1p([3.5 / 0.5, 1.5 / 2.5, 2.5 / 1.5, 3.5 / 0.5]))
