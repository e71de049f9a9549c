"""Landmark attention against one dense product over the whole window, its mask and gates written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cairn.pipeline.model.engine.attention import attend
from cairn.pipeline.model.engine.landmark_attention import Memory, cut_into_blocks, landmark_attention
from cairn.pipeline.model.engine.workspace import Workspace
from hypothesis import given, settings
from hypothesis import strategies as st

CPU, WORKSPACE = torch.device("cpu"), Workspace(torch.device("cpu"))
HEADS, HEAD_DIM = 4, 8
CLOSED = float("-inf")


def _inputs(num_tokens, num_kv=HEADS, num_context=0, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    query, key, value = (random(num_tokens, heads, HEAD_DIM) for heads in (HEADS, num_kv, num_kv))
    memory = Memory(
        key_GCd=random(num_kv, num_context, HEAD_DIM), value_GCd=random(num_kv, num_context, HEAD_DIM)
    )
    return query, key, value, memory if num_context else None, random(HEADS).float(), random(HEADS).float()


def _naive(query, key, value, memory, gates, context_gates, lengths, windows, temperature=1.0, radius=None):
    """One window a product: every token against every token and context vector, a bias for each pair."""
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    window = torch.tensor(windows)[row]
    is_landmark = torch.cat([row[1:] != row[:-1], torch.tensor([True])])
    distance = (torch.arange(len(row))[:, None] - torch.arange(len(row))).abs()
    is_own = (row[:, None] == row) & (True if radius is None else distance <= radius)
    is_other = (window[:, None] == window) & (row[:, None] != row) & is_landmark
    bias = torch.full((HEADS, len(row), len(row)), CLOSED)
    bias[:, is_own] = 0.0
    bias = torch.where(is_other, gates[:, None, None], bias)
    if memory is not None:
        key = torch.cat([key, memory.key_GCd.transpose(0, 1)])
        value = torch.cat([value, memory.value_GCd.transpose(0, 1)])
        bias = torch.cat(
            [bias, context_gates[:, None, None].expand(-1, len(row), len(key) - len(row))], dim=2
        )
    key, value = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (key, value))
    logits = torch.einsum("ihd,jhd->hij", query, key) / (temperature * HEAD_DIM**0.5) + bias
    return torch.einsum("hij,jhd->ihd", logits.softmax(dim=2), value)


def _ours(
    query,
    key,
    value,
    memory,
    gates,
    context_gates,
    lengths,
    windows,
    *,
    temperature=1.0,
    radius=None,
    scores_per_step=1 << 16,
):
    blocks = cut_into_blocks(
        np.array(lengths),
        np.array(windows),
        scores_per_step=scores_per_step,
        num_context=0 if memory is None else memory.key_GCd.shape[1],
        local_radius=radius,
        device=CPU,
    )
    return landmark_attention(
        query,
        key,
        value,
        blocks,
        mix=lambda *inputs: attend(*inputs, WORKSPACE, temperature),
        gates_H=gates,
        memory=memory,
        context_gates_H=context_gates,
        is_local=radius is not None,
    )


WINDOWS = {
    "one chunk": ([7], [0]),
    "one window": ([9, 9, 9, 4], [5] * 4),
    "single chunks": ([9, 3, 6], [2, 0, 1]),
    "mixed": ([9, 8, 9, 2, 5, 9, 9, 3, 1, 7], [3, 3, 3, 3, 0, 1, 1, 1, 1, 2]),
    "many": ([6] * 17 + [9, 2] * 4, [0] * 17 + [number for number in range(1, 5) for _ in range(2)]),
}


@pytest.mark.parametrize("scores_per_step", [1, 300, 1 << 20])
@pytest.mark.parametrize("num_kv", [HEADS, 2], ids=["own heads", "shared heads"])
@pytest.mark.parametrize("num_context", [0, 5])
@pytest.mark.parametrize("radius", [None, 2], ids=["global", "local"])
@pytest.mark.parametrize("layout", WINDOWS)
def test_attention_batch_of_windows_equals_dense_reference(
    layout, radius, num_context, num_kv, scores_per_step
):
    lengths, windows = WINDOWS[layout]
    inputs = _inputs(sum(lengths), num_kv, num_context)
    ours = _ours(*inputs, lengths, windows, radius=radius, temperature=0.8, scores_per_step=scores_per_step)
    torch.testing.assert_close(
        ours, _naive(*inputs, lengths, windows, radius=radius, temperature=0.8), atol=1e-5, rtol=0
    )


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=7), min_size=1, max_size=5),
    num_context=st.integers(0, 3),
    scores_per_step=st.integers(1, 2_000),
)
def test_attention_any_windows_equal_dense_reference(texts, num_context, scores_per_step):
    lengths = [length for text in texts for length in text]
    windows = [number for number, text in enumerate(texts) for _ in text]
    inputs = _inputs(sum(lengths), num_context=num_context)
    ours = _ours(*inputs, lengths, windows, scores_per_step=scores_per_step)
    torch.testing.assert_close(ours, _naive(*inputs, lengths, windows), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "part", ["query", "key", "value", "memory key", "memory value", "gates", "context gates"]
)
def test_attention_gradients_equal_those_of_the_dense_reference(part):
    lengths, windows = WINDOWS["mixed"]
    gradients = []
    for attention in (_ours, _naive):
        query, key, value, memory, gates, context_gates = _inputs(sum(lengths), num_context=3)
        leaves = dict(
            zip(
                ("query", "key", "value", "memory key", "memory value", "gates", "context gates"),
                (query, key, value, memory.key_GCd, memory.value_GCd, gates, context_gates),
                strict=True,
            )
        )
        leaf = leaves[part].requires_grad_()
        weights = torch.randn(query.shape, generator=torch.Generator().manual_seed(3))
        (
            attention(query, key, value, memory, gates, context_gates, lengths, windows) * weights
        ).sum().backward()
        gradients.append(leaf.grad)
    assert float(gradients[1].abs().max()) > 1e-3
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_blocks_grow_no_faster_than_the_window_has_landmarks():
    """The keys gathered for n chunks of g tokens are n (g + n - 1), no dense n² g²."""
    chunk, sizes = 66, (31, 124, 303)
    for num_chunks in sizes:
        blocks = cut_into_blocks(
            np.full(num_chunks, chunk), np.zeros(num_chunks, np.int64), scores_per_step=1 << 17, device=CPU
        )
        assert sum(block.keys_RS.numel() for block in blocks) == num_chunks * (chunk + num_chunks - 1)
        assert max(len(block.keys_RS) * chunk * block.keys_RS.shape[1] for block in blocks) <= 1 << 17


def test_blocks_hold_rows_of_nearly_one_shape():
    lengths, windows = np.array([60] * 40 + [5] * 40), np.arange(80)
    blocks = cut_into_blocks(lengths, windows, scores_per_step=1 << 30, device=CPU)
    assert [tuple(block.keys_RS.shape) for block in blocks] == [(40, 60), (40, 5)]
