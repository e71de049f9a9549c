from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.errors import ModelError
from cairn.pipeline.token_vectors.projection import (
    LATE_NAME,
    REACH,
    TokenProjection,
    read_token_projection,
)


@pytest.fixture
def projection() -> TokenProjection:
    generator = np.random.default_rng(0)
    return TokenProjection(
        matrix_DV=generator.standard_normal((32, 8)).astype(np.float16).astype(np.float32),
        weight_codes_X=generator.integers(1, 256, 50).astype(np.uint8),
        weight_step=0.04,
        rms_V=generator.uniform(0.1, 0.5, 8).astype(np.float32),
        base_sha256="a" * 64,
    )


def read(folder: Path, **changes: object) -> TokenProjection | None:
    expected = {"model_dim": 32, "vocabulary_size": 50, "weights_sha256": "a" * 64}
    return read_token_projection(folder, **{**expected, **changes})  # pyright: ignore[reportArgumentType]


def test_saved_projection_is_read_as_it_was(projection: TokenProjection, tmp_path: Path):
    projection.save(tmp_path)
    found = read(tmp_path)

    assert found is not None
    assert found.fingerprint == projection.fingerprint
    assert np.array_equal(found.rms_V, projection.rms_V)
    assert found.base_sha256 == projection.base_sha256
    other = replace(projection, matrix_DV=projection.matrix_DV + 1), replace(projection, weight_step=1.0)
    assert len({each.fingerprint for each in (projection, *other)}) == 3


def test_codes_are_the_even_steps_written_out_and_compare_as_their_middles(projection: TokenProjection):
    states = np.random.default_rng(2).standard_normal((20, 32)).astype(np.float32)
    codes, query = projection.encode(states), projection.project(states[:3])
    product = states[:3] @ projection.matrix_DV
    expected = product / np.linalg.norm(product, axis=1, keepdims=True)
    np.testing.assert_allclose(query, expected, atol=1e-5)
    written_out = np.empty((20, 8))
    for row, (vector, code) in enumerate(zip(projection.project(states), codes, strict=True)):
        bits = "".join(f"{byte:08b}" for byte in code.tolist())
        for dim, value in enumerate(vector):
            step = 2 * REACH * projection.rms_V[dim] / 4
            expected = min(max(int(np.floor(value / step)) + 2, 0), 3)
            assert int(bits[2 * dim : 2 * dim + 2], 2) == expected
            written_out[row, dim] = (expected - 1.5) * step
    written_out /= np.linalg.norm(written_out, axis=1, keepdims=True)

    np.testing.assert_allclose(projection.similarities(codes, query), written_out @ query.T, atol=1e-5)


DAMAGED = "must be a whole token projection of format 2, got a damaged file or another format"


@pytest.mark.parametrize(
    "damage",
    [
        {"matrix_DV": np.full((32, 8), np.nan, np.float32)},
        {"matrix_DV": np.full((32, 8), np.inf, np.float32)},
        {"rms_V": np.full(8, np.nan, np.float32)},
        {"rms_V": np.zeros(8, np.float32)},
        {"matrix_DV": np.zeros((32, 0), np.float32), "rms_V": np.zeros(0, np.float32)},
        {"matrix_DV": np.zeros((32, 7), np.float32), "rms_V": np.ones(7, np.float32)},
        {"weight_codes_X": np.full(50, np.nan, np.float32)},
        {"weight_step": np.nan},
        b"",
        b"\x07" * 40,
    ],
    ids=lambda damage: " ".join(damage) if isinstance(damage, dict) else "damaged",
)
def test_projection_that_is_damaged_or_would_give_scores_that_are_no_numbers_is_refused(
    projection: TokenProjection, tmp_path: Path, damage: Any
):
    if isinstance(damage, bytes):
        (tmp_path / LATE_NAME).write_bytes(damage)
    else:
        replace(projection, **damage).save(tmp_path)
    with pytest.raises(ModelError, match=DAMAGED):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_dim": 64}, "states of 64 dimensions and 50 token ids, got one for 32 and 50"),
        (
            {"vocabulary_size": 51},
            "states of 32 dimensions and 51 token ids, got one for 32 and 50",
        ),
        (
            {"weights_sha256": "b" * 64},
            "for its weights, got one that was trained for others",
        ),
    ],
)
def test_projection_of_another_model_is_refused(
    projection: TokenProjection, tmp_path: Path, changes: dict[str, object], sentence: str
):
    projection.save(tmp_path)
    with pytest.raises(ModelError, match=sentence):
        read(tmp_path, **changes)
