"""Attention, rotation and products of the engine against naive ones."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from cairn.pipeline.model.engine import attention
from cairn.pipeline.model.engine.attention import Workspace, attend, bias_where
from cairn.pipeline.model.engine.pattern import Batch, LocalWindow
from cairn.pipeline.model.engine.rotary import RotaryTable
from cairn.pipeline.model.engine.transformer import ACTIVATIONS, add_projection, project
from cairn.pipeline.model.engine.weights import Linear

from tests.model.published import load

CPU = torch.device("cpu")


def _inputs(dtype, shape=(3, 2, 10), num_keys=13):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(*shape, 8, generator=generator).to(dtype)
    key, value = torch.randn(2, *shape[:2], num_keys, 8, generator=generator).to(dtype)
    return query, key, value


def _bias(kind):
    generator = torch.Generator().manual_seed(1)
    shape = {"rows": (3, 1, 1, 13), "queries": (3, 1, 10, 13), "shared": (1, 1, 10, 13)}[kind]
    visible = torch.rand(shape, generator=generator) < 0.6
    visible[..., 0] = True
    return visible


def _naive(query, key, value, visible):
    scores = query.double() @ key.double().transpose(2, 3) / query.shape[-1] ** 0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value.double()).transpose(1, 2)


@pytest.mark.parametrize("kind", [None, "rows", "queries", "shared"])
@pytest.mark.parametrize("scores_per_step", [1 << 20, 600, 200, 26, 1])
@pytest.mark.parametrize(("dtype", "worst"), [(torch.float32, 1e-6), (torch.bfloat16, 0.03)])
def test_attend_equals_the_naive_softmax(kind, scores_per_step, dtype, worst, monkeypatch):
    monkeypatch.setattr(attention, "SCORES_PER_STEP", scores_per_step)
    query, key, value = _inputs(dtype)
    visible = None if kind is None else _bias(kind)
    bias = None if visible is None else bias_where(visible)
    mixed = attend(query, key, value, bias, Workspace(CPU))
    assert float((mixed.double() - _naive(query, key, value, visible)).abs().max()) <= worst


@pytest.mark.parametrize("num_keys", [1_024, 1_031])
def test_attend_long_bf16_rows_equal_the_naive_softmax(num_keys):
    query, key, value = _inputs(torch.bfloat16, (1, 2, 5), num_keys)
    mixed = attend(query, key, value, None, Workspace(CPU))
    assert float((mixed.double() - _naive(query, key, value, None)).abs().max()) <= 0.005


def test_take_two_threads_never_share_memory():
    workspace, both = Workspace(CPU), Barrier(2)

    def take():
        both.wait()
        pointer = workspace.take("x", (4,), torch.float32).data_ptr()
        both.wait()
        return pointer

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(take), pool.submit(take)
        assert one.result() != two.result()


HEADS, HEAD_DIM = 2, 4


def _visible_window(lengths, num_context, radius, num_rows):
    """Every vector of a row sees itself, and a token those of its text that are near."""
    visible = torch.eye(num_rows, dtype=torch.bool).repeat(len(lengths), 1, 1, 1)
    for row, length in enumerate(lengths.tolist()):
        for i in range(num_context, num_context + length):
            for j in range(max(i - radius, num_context), min(i + radius + 1, num_context + length)):
                visible[row, 0, i, j] = True
    return visible


CASES = [
    ([50, 50], 0, 5),
    ([50, 31, 3], 0, 5),
    ([64], 0, 16),
    ([65, 1], 0, 16),
    ([50, 20], 7, 5),
    ([50, 50], 30, 1),
    ([70, 70], 0, 20),
    ([20, 12], 0, 5),
    ([20, 20], 3, 5),
    ([33], 0, 0),
]


@pytest.mark.parametrize(("dtype", "worst"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize(("lengths", "num_context", "radius"), CASES)
def test_window_equals_the_masked_full_product(lengths, num_context, radius, dtype, worst):
    lengths = np.array(lengths)
    num_tokens, generator = int(lengths.max()), torch.Generator().manual_seed(0)
    shape = (len(lengths), num_context + num_tokens, 3, HEADS, HEAD_DIM)
    qkv = torch.randn(shape, generator=generator).to(dtype).float()
    window = LocalWindow(lengths, num_tokens=num_tokens, num_context=num_context, radius=radius, device=CPU)
    mixed = window.attend(qkv.flatten(0, 1).to(dtype), Workspace(CPU)).float()
    mixed = mixed.view(*shape[:2], HEADS, HEAD_DIM)
    visible = _visible_window(lengths, num_context, radius, shape[1])
    expected = _naive(*qkv.permute(2, 0, 3, 1, 4), visible)
    assert float((mixed - expected).abs().max()) <= worst


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


def _naive_rotation(vectors, positions, rotary_dim=8, theta=100.0):
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
    assert float((turned - _naive_rotation(vectors, positions, rotary_dim=rotary_dim)).abs().max()) <= 1e-6


def test_rotate_bf16_is_the_rounded_float32():
    vectors = _vectors().bfloat16()
    assert torch.equal(_rotated(_table(), vectors), _rotated(_table(), vectors.float()).bfloat16())


def test_mixed_ntk_divides_frequencies_as_published(make):
    scaling = {"type": "ntk", "factor": 8.0, "mixed_b": 0.625}
    cos, sin = load(make("new", rope_scaling=scaling)).rotary[False].at(torch.tensor([1]))
    a = math.log(8.0) / 4**0.625
    expected = [500.0 ** (-2 * pair / 8) / math.exp(a * (pair + 1) ** 0.625) for pair in range(4)]
    assert torch.atan2(sin, cos)[0].tolist() == pytest.approx(expected)


def linear(rows, columns, dtype, *, bias):
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    return Linear(weight=weight, bias=torch.randn(rows, generator=generator).to(dtype) if bias else None)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 300])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS.values()])
def test_packed_projection_multiplies_adds_and_activates_as_the_plain_one(
    activation, num_rows, dtype, tolerance, bias
):
    plain = linear(48, 40, dtype, bias=bias)
    packed, close = plain.packed(), {"atol": tolerance, "rtol": tolerance / 10}
    x = torch.randn(num_rows, 80, generator=torch.Generator().manual_seed(0)).to(dtype)[:, ::2]
    expected, found = (project(each, x, Workspace(CPU), "product", activation) for each in (plain, packed))
    torch.testing.assert_close(found, expected, **close)
    residual = torch.randn(num_rows, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected, found = (add_projection(each, x, residual.clone()) for each in (plain, packed))
    torch.testing.assert_close(found, expected, **close)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_backbone_on_a_processor_multiplies_packed_weights(tiny_model_folder):
    backbone = load(tiny_model_folder)
    assert all(
        layer.qkv.weight.is_mkldnn and layer.attention_output.weight.is_mkldnn for layer in backbone.layers
    )
