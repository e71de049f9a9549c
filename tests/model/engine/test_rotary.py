from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cairn.pipeline.model.engine.attention import Workspace
from cairn.pipeline.model.engine.pattern import Batch
from cairn.pipeline.model.engine.rotary import RotaryTable

from tests.model.published import load

CPU = torch.device("cpu")


def _table(rotary_dim=8, theta=100.0):
    return RotaryTable(rotary_dim=rotary_dim, theta=theta, num_positions=20, device=CPU)


def _vectors():
    return torch.randn(2, 7, 6, 8, generator=torch.Generator().manual_seed(0))


def _rotated(table, vectors, num_context=0, first_position=0):
    turned = vectors.clone()
    batch = Batch(
        lengths_B=np.array([7 - num_context]),
        num_tokens=7 - num_context,
        num_lead=num_context,
        num_unplaced=num_context,
        first_position=first_position,
    )
    table.rotate_(turned, table.at(batch.positions(torch.arange(7))), Workspace(CPU))
    return turned


def _naive(vectors, positions, rotary_dim=8, theta=100.0):
    """Pairs (i, i + d/2) as complex numbers, turned by position / theta^(2i/d)."""
    half = rotary_dim // 2
    angles = torch.tensor(positions).double()[:, None] / theta ** (torch.arange(half).double() / half)
    pairs = torch.complex(vectors[..., :half].double(), vectors[..., half:rotary_dim].double())
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([pairs.real, pairs.imag, vectors[..., rotary_dim:].double()], dim=-1)


@pytest.mark.parametrize(
    ("rotary_dim", "num_context", "first_position", "positions"),
    [
        (8, 0, 0, range(7)),
        (4, 0, 0, range(7)),
        (8, 3, 0, [0, 0, 0, 0, 1, 2, 3]),
        (8, 2, 9, [0, 0, *range(9, 14)]),
    ],
    ids=["whole heads", "a part of each head", "context is not turned", "from a first position on"],
)
def test_rotate_equals_complex_multiplication(rotary_dim, num_context, first_position, positions):
    vectors = _vectors()
    turned = _rotated(_table(rotary_dim=rotary_dim), vectors, num_context, first_position)
    assert torch.equal(turned[:, :num_context], vectors[:, :num_context])
    assert float((turned - _naive(vectors, positions, rotary_dim=rotary_dim)).abs().max()) <= 1e-6


def test_rotate_bf16_is_the_rounded_float32():
    vectors = _vectors().bfloat16()
    assert torch.equal(_rotated(_table(), vectors), _rotated(_table(), vectors.float()).bfloat16())


def test_mixed_ntk_divides_frequencies_as_published(make):
    scaling = {"type": "ntk", "factor": 8.0, "mixed_b": 0.625}
    cos, sin = load(make("new", rope_scaling=scaling)).rotary[False].at(torch.tensor([1]))
    a = math.log(8.0) / 4**0.625
    expected = [500.0 ** (-2 * pair / 8) / math.exp(a * (pair + 1) ** 0.625) for pair in range(4)]
    assert torch.atan2(sin, cos)[0].tolist() == pytest.approx(expected)
