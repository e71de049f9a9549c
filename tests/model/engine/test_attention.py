from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from cairn.pipeline.model.engine import attention
from cairn.pipeline.model.engine.attention import Workspace, attend, bias_where
from cairn.pipeline.model.engine.pattern import LocalWindow

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


def _naive_window(qkv_BS3Hd, lengths, num_context, radius):
    """Every query with every key of its row, one by one."""
    query, key, value = qkv_BS3Hd.permute(2, 0, 3, 1, 4).double()
    scores = query @ key.transpose(2, 3) / HEAD_DIM**0.5
    for row, length in enumerate(lengths.tolist()):
        for i in range(scores.shape[2]):
            for j in range(scores.shape[3]):
                is_text = min(i, j) >= num_context and j < num_context + length and i < num_context + length
                if i != j and not (is_text and abs(i - j) <= radius):
                    scores[row, :, i, j] = -torch.inf
    return (scores.softmax(-1) @ value).transpose(1, 2).float()


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
    assert float((mixed - _naive_window(qkv, lengths, num_context, radius)).abs().max()) <= worst
