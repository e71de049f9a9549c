from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.token_vectors.codes import REACH, TokenCodec, unit


def vectors(rows: int, dims: int = 16, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return unit((generator.standard_normal((rows, dims)) * np.linspace(2, 0.5, dims)).astype(np.float32))


def codec(bits: int, rows: np.ndarray) -> TokenCodec:
    return TokenCodec(rms_V=np.sqrt((rows**2).mean(0)), bits=bits)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_the_even_steps_written_out(bits: int):
    rows = vectors(20)
    own = codec(bits, rows)
    packed = own.encode(rows)
    for row, code in zip(rows, packed, strict=True):
        written = "".join(f"{byte:08b}" for byte in code.tolist())
        for dim, value in enumerate(row):
            step = 2 * REACH[bits] * own.rms_V[dim] / 2**bits
            expected = min(max(int(np.floor(value / step)) + 2 ** (bits - 1), 0), 2**bits - 1)
            assert int(written[dim * bits : (dim + 1) * bits], 2) == expected


@pytest.mark.parametrize(("bits", "cosine"), [(2, 0.9), (4, 0.99), (8, 0.9999)])
def test_decoded_vectors_are_near_what_was_encoded(bits: int, cosine: float):
    rows = vectors(500)
    decoded = codec(bits, rows).decode(codec(bits, rows).encode(rows))

    assert np.linalg.norm(decoded, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert (decoded * rows).sum(1).mean() >= cosine


@pytest.mark.parametrize(("dims", "bits"), [(16, 3), (15, 4), (2, 2)])
def test_bits_and_dims_that_fill_no_byte_are_refused(dims: int, bits: int):
    with pytest.raises(ConfigError, match="of a token vector must"):
        TokenCodec(rms_V=np.ones(dims, np.float32), bits=bits)
