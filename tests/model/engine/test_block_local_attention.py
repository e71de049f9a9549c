from __future__ import annotations

import numpy as np
import pytest
import torch
from cairn.pipeline.model.engine.attention import Workspace
from cairn.pipeline.model.engine.rectangle import LocalWindow

HEADS, HEAD_DIM = 2, 4


def _naive(qkv_BS3Hd, lengths, num_context, radius):
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
    window = LocalWindow(
        lengths, num_tokens=num_tokens, num_context=num_context, radius=radius, device=torch.device("cpu")
    )
    mixed = window.attend(qkv.flatten(0, 1).to(dtype), Workspace(torch.device("cpu"))).float()
    mixed = mixed.view(*shape[:2], HEADS, HEAD_DIM)
    assert float((mixed - _naive(qkv, lengths, num_context, radius)).abs().max()) <= worst
