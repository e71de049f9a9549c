"""Importance of parts that are known to matter, or not to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cairn.pipeline.lab.compress.importance import gate_importance, most_important_layers
from cairn.pipeline.lab.compress.plain_pass import embed_row, open_gates, read_engine
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.types import silent_progress

ROWS = [np.random.default_rng(seed).integers(5, 40, 10) for seed in range(4)]


@pytest.fixture
def engine(make_bert, model_size):
    return read_engine(read_checkpoint(make_bert(model_size(layers=3))), is_causal=False)


def test_importance_is_the_mean_squared_change_by_a_gate(engine):
    found = gate_importance(engine, ROWS, 0, silent_progress)
    estimate = torch.stack(
        [gate_importance(engine, ROWS, seed, silent_progress).heads_LH for seed in range(60)]
    ).mean(0)
    exact = torch.zeros_like(estimate)
    for ids in ROWS:
        gates = open_gates(engine)
        for value in embed_row(engine, ids, gates=gates):
            [gradient] = torch.autograd.grad(value, gates.heads_LH, retain_graph=True)
            exact += gradient.square() / len(ROWS)
    assert found.heads_LH.shape == (3, 4)
    torch.testing.assert_close(estimate, exact, rtol=0.5, atol=0)


def test_parts_that_add_nothing_are_least_important(engine):
    engine.layers[1].mlp.down.weight[:, [3, 9]] = 0
    engine.layers[2].attention_output.weight[:, 8:16] = 0
    found = gate_importance(engine, ROWS, 0, silent_progress)
    assert sorted(found.inner_LI[1].argsort()[:2].tolist()) == [3, 9]
    assert int(found.heads_LH[2].argmin()) == 1


def test_layer_that_moves_embeddings_least_goes_first(engine):
    whole = torch.stack([embed_row(engine, ids) for ids in ROWS])
    changes = {
        left_out: sum(
            1 - float(embed_row(engine, ids, layers=tuple({0, 1, 2} - {left_out})) @ vector)
            for ids, vector in zip(ROWS, whole, strict=True)
        )
        for left_out in range(3)
    }
    least = min(changes, key=changes.__getitem__)
    kept = most_important_layers(engine, ROWS, 2, keeps_first=False, progress=silent_progress)
    assert kept == tuple(sorted({0, 1, 2} - {least}))
    assert most_important_layers(engine, ROWS, 1, keeps_first=True, progress=silent_progress) == (0,)
