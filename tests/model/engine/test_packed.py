from __future__ import annotations

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.attention import Workspace
from cairn.pipeline.model.engine.packed import Packed
from cairn.pipeline.model.engine.pattern import Batch, PassSettings, Shape

from tests.model.published import random_ids, worst

FAMILIES = ["bert", "modernbert", "nomic_bert"]
LENGTHS = np.array([30, 4, 61, 1, 17])
CPU = torch.device("cpu")


def _load(folder):
    return load_backbone(EncoderConfig(model=str(folder), precision="fp32"), CPU)


@pytest.fixture(scope="module")
def context():
    return np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_context", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_the_rectangle(make, family, context, with_context, temperature):
    backbone, given = _load(make(family)), context if with_context else None
    ids = random_ids(backbone, LENGTHS)
    padded = backbone.hidden_states(ids, LENGTHS, given, temperature)
    backbone.pattern_type = Packed
    assert worst(backbone.hidden_states(ids, LENGTHS, given, temperature), padded, LENGTHS) <= 1e-5


@pytest.mark.parametrize("num_unplaced", [0, 5, 9])
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_packed_lead_with_positions_equals_the_rectangle(make, family, num_unplaced):
    backbone = _load(make(family))
    x = torch.randn(len(LENGTHS), 9 + 61, 32, generator=torch.Generator().manual_seed(0))
    batch = Batch(lengths_B=LENGTHS, num_tokens=61, num_lead=9, num_unplaced=num_unplaced)
    padded = backbone.encode_embedded(x.clone(), backbone.pattern_of(batch))
    backbone.pattern_type = Packed
    packed = backbone.encode_embedded(x.clone(), backbone.pattern_of(batch))
    assert worst(packed, padded, LENGTHS) <= 1e-5


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_shared_key_heads_equal_the_naive_softmax(is_causal):
    shape = Shape(
        num_heads=4, num_key_value_heads=2, head_dim=8, max_positions=64, norm_first=True, is_causal=is_causal
    )
    lengths = np.array([5, 2])
    batch = Batch(lengths_B=lengths, num_tokens=5)
    settings = PassSettings(shape=shape, rotary={}, temperature=0.5, workspace=Workspace(CPU), device=CPU)
    pattern = Packed(batch, settings)
    heads = torch.randn(7, 8, 8, generator=torch.Generator().manual_seed(0))
    mixed = pattern.attend(heads, 0, is_local=False, drop_lead=False).view(7, 4, 8)
    for first, last in ((0, 5), (5, 7)):
        for head in range(4):
            query, key, value = (
                heads[first:last, head],
                heads[first:last, 4 + head // 2],
                heads[first:last, 6 + head // 2],
            )
            scores = query @ key.T / 8**0.5 / 0.5
            if is_causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            assert float((scores.softmax(-1) @ value - mixed[first:last, head]).abs().max()) <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("with_context", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_kernels_on_a_gpu_agree_with_the_cpu(make, family, context, with_context):
    folder, given = make(family), context if with_context else None
    exact = _load(folder)
    rounded = load_backbone(EncoderConfig(model=str(folder), precision="bf16"), torch.device("cuda"))
    assert rounded.pattern_type is Packed
    ids = random_ids(exact, LENGTHS)
    ours, theirs = (
        rounded.hidden_states(ids, LENGTHS, given).float().cpu(),
        exact.hidden_states(ids, LENGTHS, given),
    )
    cosines = torch.cosine_similarity(ours, theirs, dim=-1)
    assert min(float(cosines[row, :length].min()) for row, length in enumerate(LENGTHS.tolist())) >= 0.999
