from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.attention import Workspace
from cairn.pipeline.model.engine.transformer import (
    ACTIVATIONS,
    Activation,
    Transformer,
    add_projection,
    project,
)
from cairn.pipeline.model.engine.weights import Linear

CPU = torch.device("cpu")


def linear(rows: int, columns: int, dtype: torch.dtype, *, bias: bool) -> Linear:
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    return Linear(weight=weight, bias=torch.randn(rows, generator=generator).to(dtype) if bias else None)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 300])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS.values()])
def test_packed_projection_multiplies_adds_and_activates_as_the_plain_one(
    activation: Activation | None, num_rows: int, dtype: torch.dtype, tolerance: float, bias: bool
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
def test_backbone_on_a_processor_multiplies_packed_weights(tiny_model_folder: Path):
    backbone = load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"), CPU)
    assert isinstance(backbone, Transformer)
    assert all(
        layer.qkv.weight.is_mkldnn and layer.attention_output.weight.is_mkldnn for layer in backbone.layers
    )
