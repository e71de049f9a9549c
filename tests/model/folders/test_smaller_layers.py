"""A checkpoint with fewer parts computes what the whole one does with those parts gated off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.compress.plain_pass import Gates, last_states, read_engine
from cairn.pipeline.lab.compress.pruning import KeptParts, require_prunable, smaller_checkpoint
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder

from tests.model.published import LENGTHS, load, published, published_hidden, random_ids, worst

IDS = np.array([2, 9, 11, 7, 30, 31, 12, 8, 40, 15, 22, 3])
FAMILIES = ["bert", "modernbert", "nomic_bert", "gte", "mistral", "qwen3"]


@pytest.fixture
def folder_of(
    tiny_model_folder: Path,
    make_modernbert: Callable[..., Path],
    make_nomic_bert: Callable[..., Path],
    make_gte: Callable[..., Path],
    make_decoder: Callable[..., Path],
) -> Callable[[str], Path]:
    makers: dict[str, Callable[[], Path]] = {
        "bert": lambda: tiny_model_folder,
        "modernbert": make_modernbert,
        "nomic_bert": make_nomic_bert,
        "gte": make_gte,
    }
    return lambda family: makers.get(family, lambda: make_decoder(family))()


def gates_without(engine: Any, groups: list[torch.Tensor] | None, inner: list[torch.Tensor] | None) -> Gates:
    num_layers, shape = engine.num_layers, engine.shape
    num_groups = shape.num_key_value_heads
    width = engine.layers[0].mlp.linears[1].weight.shape[1]
    heads, neurons = torch.ones(num_layers, num_groups), torch.ones(num_layers, width)
    for gates, kept in ((heads, groups), (neurons, inner)):
        for layer, stays in enumerate(kept or []):
            gates[layer] = torch.isin(torch.arange(gates.shape[1]), stays).float()
    return Gates(heads_LH=heads.repeat_interleave(shape.num_heads // num_groups, 1), inner_LI=neurons)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_pass_equals_the_engine(folder_of, family):
    engine = read_engine(read_checkpoint(folder_of(family)), is_causal=False)
    expected = engine.hidden_states(IDS[None], np.array([len(IDS)]))[0]
    with torch.no_grad():
        torch.testing.assert_close(last_states(engine, IDS), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_neurons_equal_the_whole_model_with_the_others_off(folder_of, family):
    checkpoint = read_checkpoint(folder_of(family))
    engine = read_engine(checkpoint, is_causal=False)
    inner = [torch.tensor([0, 3, 4 + layer, 20, 41]) for layer in range(engine.num_layers)]
    parts = KeptParts(layers=tuple(range(engine.num_layers)), inner=inner)
    smaller = read_engine(smaller_checkpoint(checkpoint, parts), is_causal=False)
    assert smaller.layers[0].mlp.linears[1].weight.shape[1] == 5
    with torch.no_grad():
        expected = last_states(engine, IDS, gates=gates_without(engine, None, inner))
        torch.testing.assert_close(last_states(smaller, IDS), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "llama"])
def test_fewer_heads_equal_the_whole_model_with_the_others_off(folder_of, family):
    checkpoint = read_checkpoint(folder_of(family))
    engine = read_engine(checkpoint, is_causal=False)
    groups = [torch.tensor([1]), torch.tensor([0])]
    smaller = read_engine(
        smaller_checkpoint(checkpoint, KeptParts(layers=(0, 1), groups=groups)), is_causal=False
    )
    assert (smaller.shape.num_heads, smaller.shape.num_key_value_heads) == (2, 1)
    with torch.no_grad():
        expected = last_states(engine, IDS, gates=gates_without(engine, groups, None))
        torch.testing.assert_close(last_states(smaller, IDS), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "layers"), [("bert", (1,)), ("modernbert", (0, 2, 3)), ("mistral", (1,))])
def test_fewer_layers_equal_the_whole_model_that_skips_the_others(folder_of, family, layers):
    checkpoint = read_checkpoint(folder_of(family))
    engine = read_engine(checkpoint, is_causal=False)
    smaller = read_engine(smaller_checkpoint(checkpoint, KeptParts(layers=layers)), is_causal=False)
    assert smaller.num_layers == len(layers)
    with torch.no_grad():
        expected = last_states(engine, IDS, layers=layers)
        torch.testing.assert_close(last_states(smaller, IDS), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_pruned_decoder_saved_is_read_alike_by_transformers(folder_of, family, tmp_path):
    checkpoint = read_checkpoint(folder_of(family))
    parts = KeptParts(layers=(1,), groups=[torch.tensor([1])], inner=[torch.arange(7)])
    save_encoder_folder(tmp_path / "small", smaller_checkpoint(checkpoint, parts), EncoderConfig())
    backbone = load(tmp_path / "small")
    ids = random_ids(backbone)
    theirs = published_hidden(published(tmp_path / "small"), ids, LENGTHS, is_causal=False)
    assert worst(backbone.hidden_states(ids, LENGTHS), theirs) < 1e-4


def test_heads_of_a_family_without_head_dim_are_refused(tiny_model_folder):
    with pytest.raises(ConfigError, match="heads must go with a family"):
        require_prunable(read_checkpoint(tiny_model_folder), with_heads=True)
