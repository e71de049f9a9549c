from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.analysis.traced_pass import require_attention, trace_row, value_weights
from cairn.pipeline.model.backbone_loader import load_backbone

from tests.lab.analysis.numpy_bert import run_bert


def test_trace_equals_the_model_in_numpy(backbone, rows, tiny_model_folder):
    states, layers = run_bert(tiny_model_folder, rows[0], 0.8)
    trace = trace_row(backbone, rows[0], 0.8)

    assert len(trace.states) == len(states) == 3
    for own, expected in zip(trace.states, states, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-4)
    for own, expected in zip(trace.attentions, layers, strict=True):
        np.testing.assert_allclose(own.read_TD, expected.read, atol=1e-4)
        np.testing.assert_allclose(own.logits(), expected.logits, atol=1e-4)
        np.testing.assert_allclose(own.weights(), expected.weights, atol=1e-5)
        np.testing.assert_allclose(own.value_HTd, expected.values, atol=1e-4)


def test_value_weights_are_those_of_the_file(backbone, rows, tiny_model_folder):
    _, layers = run_bert(tiny_model_folder, rows[0])

    for own, expected in zip(value_weights(backbone), layers, strict=True):
        np.testing.assert_allclose(own, expected.value_weight, atol=1e-6)


def test_trace_of_local_and_global_layers_equals_the_published_attention(
    make_modernbert: Callable[..., Path], rows
):
    from transformers import ModernBertModel

    folder = make_modernbert()
    backbone = require_attention(load_backbone(EncoderConfig(model=str(folder), precision="fp32")), "m")
    trace = trace_row(backbone, rows[0])
    model = ModernBertModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = model(torch.tensor([rows[0]]), output_attentions=True).attentions

    assert {True, False} == set(trace.is_local)
    for own, published in zip(trace.attentions, expected, strict=True):
        assert torch.allclose(own.weights(), published[0], atol=1e-4)


def test_model_in_two_stages_is_refused(make_cde: Callable[..., Path]):
    config = EncoderConfig(model=str(make_cde(1)), precision="fp32")
    with pytest.raises(ConfigError, match="a model that shows its attention"):
        require_attention(load_backbone(config), config.model)
