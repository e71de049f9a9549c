"""A step of contrastive training: its batch, its loss, its gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.train.contrastive import batch_loss, draw_batch
from cairn.pipeline.lab.train.gradients import cached_backward
from cairn.pipeline.lab.train.heldout import mean_by_text
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.pair_data import PairVectors, TrainingData, pools_of_sources
from cairn.pipeline.lab.train.pairs import text_numbers
from cairn.pipeline.lab.train.sequences import SequenceMaker, make_units
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.landmarks import Rows

from tests.lab.train.conftest import train_step


@pytest.fixture
def data(tiny_model_folder, make_pairs):
    pairs = make_pairs(24)
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((2, 24, 5)).astype(np.float32)
    served = EncoderConfig(pooling="lmk", attention="full")
    sizes = {"max_query_tokens": 16, "max_document_tokens": 64}
    maker = SequenceMaker(read_checkpoint(tiny_model_folder), pairs, served, **sizes)
    return (
        TrainingData(
            maker=maker,
            vectors=PairVectors(document_NV=vectors[0], query_NV=vectors[1]),
            document_number_N=text_numbers(pairs.documents),
            hard_negatives_Nk=np.zeros((24, 0), np.int64),
        ),
        list(make_units(pairs, range(len(pairs)), 3)),
    )


def config_of(**settings: Any) -> TrainConfig:
    return TrainConfig(
        **{
            "steps": 9,
            "context_documents": 6,
            "max_context_tokens": 12,
            "context_absence": 0.0,
        }
        | settings
    )


def gradients(
    folder: Path,
    data: tuple[TrainingData, list[tuple[int, ...]]],
    config: TrainConfig,
    step: int = 0,
    teacher: bool = True,
    max_norm: float = 1e9,
) -> tuple[Any, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    model = LandmarkEncoder(
        read_checkpoint(folder),
        first_stage_layers=config.first_stage_layers,
        null_token=config.context_dropout > 0,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    taught_by = LandmarkEncoder(read_checkpoint(folder)).requires_grad_(False) if teacher else None
    report = train_step(model, taught_by, data[0], data[1], step, config, max_norm)
    return report, {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize(
    ("dims", "layers", "first_stage_layers", "context_dropout"),
    [
        ((), (), 0, 0.0),
        ((), (1, 2), 0, 0.4),
        ((), (), 1, 0.4),
        ((8, 32), (), 1, 0.0),
        ((8, 32), (1, 2), 0, 0.4),
    ],
)
def test_train_step_in_micro_batches_gives_the_gradient_of_the_whole(
    tiny_model_folder, data, dims, layers, first_stage_layers, context_dropout, monkeypatch
):
    settings = {
        "matryoshka_dims": dims,
        "matryoshka_layers": layers,
        "first_stage_layers": first_stage_layers,
        "context_dropout": context_dropout,
    }
    rows: list[int] = []
    forward = LandmarkEncoder.forward

    def counted(self: LandmarkEncoder, batch: Rows, *context: Any, **how: Any) -> torch.Tensor:
        rows.append(len(batch))
        return forward(self, batch, *context, **how)

    monkeypatch.setattr(LandmarkEncoder, "forward", counted)
    whole, expected = gradients(tiny_model_folder, data, config_of(micro_batch_tokens=100_000, **settings))
    assert len(rows) == 2, "the teacher and the model, once"
    for tokens in (60, 90):  # with 90 the context is one micro-batch and the rows are several
        rows.clear()
        parts, found = gradients(tiny_model_folder, data, config_of(micro_batch_tokens=tokens, **settings))
        third = len(rows) // 3
        assert rows[third : 2 * third] == rows[2 * third :], "the model twice"
        assert third > 5
        assert parts.loss == pytest.approx(whole.loss, abs=1e-4)
        assert set(found) == set(expected)
        for name, gradient in expected.items():
            most = 2e-4 * max(1.0, float(gradient.abs().max()))
            assert float((found[name] - gradient).abs().max()) <= most, name


def test_train_step_reaches_the_null_token_and_every_weight(tiny_model_folder, data):
    report, found = gradients(tiny_model_folder, data, config_of(context_dropout=0.5))
    assert 1 <= report.num_context <= 6
    assert {
        name for name, _ in LandmarkEncoder(read_checkpoint(tiny_model_folder)).named_parameters()
    } == set(found)


def test_train_step_loss_of_widths_and_layers_is_their_mean(tiny_model_folder, data):
    def loss(dims: tuple[int, ...], layers: tuple[int, ...]) -> float:
        config = config_of(matryoshka_dims=dims, matryoshka_layers=layers)
        return gradients(tiny_model_folder, data, config, teacher=False)[0].loss

    assert loss((8, 32), (2,)) == pytest.approx((loss((8,), (2,)) + loss((32,), (2,))) / 2, rel=1e-5)
    assert loss((32,), (1, 2)) == pytest.approx((loss((32,), (1,)) + loss((32,), (2,))) / 2, rel=1e-5)


def test_train_step_distillation_pulls_a_moved_model_back(tiny_model_folder, data):
    without, _ = gradients(tiny_model_folder, data, config_of(), teacher=False)
    weighed, _ = gradients(tiny_model_folder, data, config_of(distillation_weight=2.0))
    assert weighed.loss > without.loss


def test_train_step_gradient_is_clipped(tiny_model_folder, data):
    report, found = gradients(tiny_model_folder, data, config_of(), max_norm=0.01)
    assert report.gradient_norm > 0.01
    assert sum(float(gradient.pow(2).sum()) for gradient in found.values()) ** 0.5 == pytest.approx(
        0.01, rel=1e-3
    )


def test_train_step_in_bf16_is_near_fp32(tiny_model_folder, data):
    exact, _ = gradients(tiny_model_folder, data, config_of())
    rounded, _ = gradients(tiny_model_folder, data, config_of(precision="bf16"))
    assert rounded.loss == pytest.approx(exact.loss, rel=0.05)
    assert rounded.loss != exact.loss


def test_draw_batch_context_is_absent_in_its_share_of_steps(data):
    config = config_of(context_absence=0.5)
    contexts = [
        draw_batch(data[0], data[1], np.random.default_rng(step), config, 96)[1] for step in range(60)
    ]
    assert 15 < sum(context is None for context in contexts) < 45
    assert {len(context) for context in contexts if context is not None} == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(
    ("negatives", "margin"),
    [("batch", 0.0), ("batch", -0.5), ("batch", math.inf), ("own", 0.0), ("own", 2.0)],
)
def test_query_is_ranked_against_the_batch_below_the_margin_or_its_own_negatives_alone(
    data, negatives, margin
):
    """The oracle: softmax over the documents that are left, query by query."""
    mined = np.full((24, 2), -1)
    mined[[0, 1, 2]] = [[20, 21], [20, -1], [9, 21]]
    training = replace(data[0], hard_negatives_Nk=mined)
    config = config_of(negatives=negatives, margin=margin)
    batch, _ = draw_batch(training, [(0, 1), (2, 3)], np.random.default_rng(0), config, 96)
    assert batch.pair_D.tolist() == [0, 1, 2, 3, 20, 21, 9], "mined ones stand behind the documents"
    embeddings_BD = torch.randn(len(batch.text_B), 8, generator=torch.Generator().manual_seed(0))
    texts = mean_by_text(embeddings_BD, batch.text_B, 11)
    said_QN = training.vectors.query_NV[:4] @ training.vectors.document_NV[batch.pair_D].T
    losses: list[float] = []
    for query, positive in enumerate(batch.positive_Q.tolist()):
        is_left_N = said_QN[query] < said_QN[query, positive] + margin
        if negatives == "own":
            is_left_N = np.isin(batch.pair_D, mined[query])
        is_left_N[positive] = True
        left = np.flatnonzero(is_left_N).tolist()
        scores = (texts[4:][left] @ texts[query] / config.temperature).log_softmax(0)
        losses.append(-float(scores[left.index(positive)]))
    found = batch_loss(embeddings_BD, batch, training, None, config, 8)
    assert float(found) == pytest.approx(np.mean(losses), rel=1e-5)


def test_draw_batch_context_is_of_all_documents_of_the_batch_s_one_source(data, make_pairs, monkeypatch):
    training, pairs, drawn = data[0], make_pairs(24), list[list[int]]()
    monkeypatch.setattr(training.maker, "context", lambda positions, _: drawn.append(positions))
    of_sources = replace(training, pool_of_pair=pools_of_sources(pairs, np.array([3, 4])))
    config = config_of(context_documents=20)
    assert [pairs.rows[place].source for place in (0, 1, 12)] == ["s0", "s0", "s1"]
    for units in ([(0, 1), (6, 7)], [(0, 1), (12, 13)]):  # a batch of two sources is of no corpus
        draw_batch(of_sources, units, np.random.default_rng(0), config, 96)
    (context,) = drawn
    assert len(set(context)) == len(context)
    assert set(context) - {0, 1, 6, 7}
    assert set(context) <= {*range(12)} - {3, 4}


def test_single_interval_cuts_every_sequence_alike(data):
    training, units = data
    config = config_of(landmark_intervals=(16,), context_documents=0, title_share=0.0)
    batch, _ = draw_batch(training, units, np.random.default_rng(0), config, 512)
    alike = training.maker.documents(batch.pair_D.tolist(), 16)[0]
    assert len(batch.rows) - len(batch.pair_Q) == len(alike)
    assert batch.rows.num_own.max() == 16


def test_what_is_frozen_or_not_compared_is_handed_no_gradient():
    weight = torch.ones(3, requires_grad=True)
    second = [lambda context_CD: (weight * context_CD, 2 * weight[None])] * 2
    cached_backward([lambda: torch.ones(2, 3)], second, lambda embedded: embedded[0].sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, 4.0, 4.0]
