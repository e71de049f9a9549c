"""How context stands before a text, for every backbone that reads one.

docs/concepts/context.md has the table these claims are of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.model.backbone_loader import load_backbone

LENGTHS = np.array([30, 11, 3])
CONTEXT = np.random.default_rng(0).normal(size=(6, 32)).astype(np.float32)
SHUFFLED = CONTEXT[[3, 0, 5, 1, 4, 2]]
WITHOUT_POSITIONS = ("bert", "roberta", "modernbert", "nomic_bert", "cde-1")
ALL = (*WITHOUT_POSITIONS, "cde-2")


@pytest.fixture(scope="module")
def load(
    tiny_model_folder: Any,
    tiny_roberta_folder: Any,
    modernbert_folder: Any,
    nomic_bert_folder: Any,
    make_cde: Callable[..., Any],
) -> Callable[..., Any]:
    folders = {
        "bert": lambda: tiny_model_folder,
        "roberta": lambda: tiny_roberta_folder,
        "modernbert": lambda: modernbert_folder,
        "nomic_bert": lambda: nomic_bert_folder,
        "cde-1": lambda: make_cde(1),
        "cde-2": lambda: make_cde(2),
    }
    return lambda name: load_backbone(EncoderConfig(model=str(folders[name]()), precision="fp32"))


def states(backbone: Any, context: np.ndarray | None, seed: int = 0) -> list[torch.Tensor]:
    ids = np.random.default_rng(seed).integers(5, 60, (len(LENGTHS), int(LENGTHS.max())))
    hidden = backbone.hidden_states(ids, LENGTHS, context)
    return [hidden[row, :length].float() for row, length in enumerate(LENGTHS)]


def largest_difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("name", WITHOUT_POSITIONS)
def test_order_of_a_context_without_positions_changes_nothing(name, load):
    backbone = load(name)
    assert largest_difference(states(backbone, CONTEXT), states(backbone, SHUFFLED)) <= 1e-5


def test_order_of_a_context_with_positions_matters(load):
    backbone = load("cde-2")
    assert largest_difference(states(backbone, CONTEXT), states(backbone, SHUFFLED)) > 1e-3


def test_order_of_a_context_matters_to_nomic_bert_where_the_checkpoint_gives_it_positions(make_cde):
    folder = make_cde(1, disable_transductive_rotary_embedding=False)
    backbone = load_backbone(EncoderConfig(model=str(folder), precision="fp32"))
    assert largest_difference(states(backbone, CONTEXT), states(backbone, SHUFFLED)) > 1e-3


@pytest.mark.parametrize("name", ALL)
def test_context_reaches_the_text(name, load):
    backbone = load(name)
    assert largest_difference(states(backbone, CONTEXT), states(backbone, None)) > 1e-3
    assert (
        largest_difference(
            states(backbone, CONTEXT), states(backbone, np.ascontiguousarray(CONTEXT[:, ::-1]))
        )
        > 1e-3
    )


@pytest.mark.parametrize("name", ALL)
def test_text_without_context_has_the_states_of_an_empty_one(name, load):
    backbone = load(name)
    assert largest_difference(states(backbone, None), states(backbone, CONTEXT[:0])) <= 1e-6
