"""Claims of step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.lab.train.contrastive import draw_batch
from cairn.pipeline.lab.train.gradients import FirstStage, SecondStage, cached_backward, plain_backward
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.losses import contrastive_loss
from cairn.pipeline.lab.train.pair_data import PairVectors, TrainingData
from cairn.pipeline.lab.train.pairs import text_numbers
from cairn.pipeline.lab.train.sequences import SequenceMaker, make_units
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from torch import nn

from tests.lab.train.conftest import train_step


@pytest.fixture
def data(tiny_model_folder, make_pairs):
    pairs = make_pairs(24)
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((2, 24, 5)).astype(np.float32)
    maker = SequenceMaker(
        read_checkpoint(tiny_model_folder), pairs, pooling="lmk", max_query_tokens=16, max_document_tokens=64
    )
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
    tiny_model_folder, data, dims, layers, first_stage_layers, context_dropout
):
    settings = {
        "matryoshka_dims": dims,
        "matryoshka_layers": layers,
        "first_stage_layers": first_stage_layers,
        "context_dropout": context_dropout,
    }
    whole, expected = gradients(tiny_model_folder, data, config_of(micro_batch_tokens=100_000, **settings))
    parts, found = gradients(tiny_model_folder, data, config_of(micro_batch_tokens=60, **settings))
    assert parts.loss == pytest.approx(whole.loss, abs=1e-4)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= 2e-4 * max(1.0, float(gradient.abs().max())), (
            name
        )


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


def test_draw_batch_hard_negatives_stand_behind_the_documents(data):
    mined = np.full((24, 2), -1)
    mined[0] = [20, 21]
    mined[1] = [20, -1]
    batch, _ = draw_batch(
        TrainingData(
            maker=data[0].maker,
            vectors=data[0].vectors,
            document_number_N=data[0].document_number_N,
            hard_negatives_Nk=mined,
        ),
        [(0, 1)],
        np.random.default_rng(0),
        config_of(),
        96,
    )
    assert batch.pair_D.tolist() == [0, 1, 20, 21]
    assert batch.positive_Q.tolist() == [0, 1]


@pytest.mark.parametrize("interval", [8, 16])
def test_single_interval_cuts_every_sequence_alike(data, interval):
    training, units = data
    config = config_of(landmark_intervals=(interval,), context_documents=0, title_share=0.0)
    batch, _ = draw_batch(training, units, np.random.default_rng(0), config, 512)
    num_queries = len(batch.pair_Q)
    alike = training.maker.documents(batch.pair_D.tolist(), interval)[0]
    assert len(batch.rows) - num_queries == len(alike)
    starts_M = np.where(np.diff(batch.rows.pooled_row, prepend=-1), 1, np.roll(batch.rows.pooled_end, 1))
    assert (batch.rows.pooled_start - starts_M).max() <= interval


C, M, W, D = 10, 24, 7, 5


class TwoStages(nn.Module):
    """Two small networks; the second attends to the context, some of which falls to a null token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.m1 = nn.Sequential(nn.Linear(W, 9), nn.Tanh(), nn.Linear(9, D))
        self.m2 = nn.Sequential(nn.Linear(W, 9), nn.Tanh(), nn.Linear(9, D))
        self.null = nn.Parameter(torch.randn(D))
        self.calls = 0
        self.rows: list[int] = []

    def first(self, documents: torch.Tensor) -> FirstStage:
        return lambda: self.m1(documents)

    def second(self, texts: torch.Tensor, seed: int) -> SecondStage:
        def embed(context: torch.Tensor | None) -> tuple[torch.Tensor]:
            self.calls += 1
            self.rows.append(len(texts))
            queries = self.m2(texts)
            if context is None:
                return (queries,)
            is_dropped = torch.rand(len(context), 1, generator=torch.Generator().manual_seed(seed)) < 0.3
            seen = torch.where(is_dropped, self.null, context)
            return (queries + (queries @ seen.T).softmax(1) @ seen,)

        return embed

    def micro_batches(
        self, documents_a_part: int, texts_a_part: int
    ) -> tuple[list[FirstStage], list[SecondStage]]:
        generator = torch.Generator().manual_seed(1)
        documents, texts = torch.randn(C, W, generator=generator), torch.randn(M, W, generator=generator)
        first = [self.first(part) for part in documents.split(documents_a_part)]
        second = [self.second(part, seed) for seed, part in enumerate(texts.split(texts_a_part))]
        return first, second


def loss_of(embedded: tuple[torch.Tensor, ...]) -> torch.Tensor:
    (embeddings,) = embedded
    queries, documents = nn.functional.normalize(embeddings, dim=1).split(M // 2)
    return contrastive_loss(queries, documents, torch.arange(M // 2), temperature=0.1, tile=5)


def cache_gradients(
    backward: Callable[..., torch.Tensor], documents_a_part: int, texts_a_part: int
) -> tuple[float, dict[str, torch.Tensor]]:
    model = TwoStages()
    value = backward(*model.micro_batches(documents_a_part, texts_a_part), loss_of)
    assert not value.requires_grad
    return float(value), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize(("documents_a_part", "texts_a_part"), [(10, 24), (3, 5), (1, 1), (10, 7), (4, 24)])
def test_cached_backward_through_both_stages_equals_the_plain_gradient(documents_a_part, texts_a_part):
    loss, found = cache_gradients(cached_backward, documents_a_part, texts_a_part)
    expected_loss, expected = cache_gradients(plain_backward, documents_a_part, texts_a_part)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert set(found) == set(expected) == {name for name, _ in TwoStages().named_parameters()}
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-5, name


def test_cached_backward_of_a_frozen_first_stage_trains_the_second():
    model = TwoStages()
    model.m1.requires_grad_(False)
    cached_backward(*model.micro_batches(3, 5), loss_of)
    assert all(parameter.grad is not None for parameter in model.m2.parameters())


def test_cached_backward_one_micro_batch_is_computed_once():
    model = TwoStages()
    cached_backward(*model.micro_batches(10, 24), loss_of)
    assert model.calls == 1


def test_cached_backward_several_micro_batches_are_computed_twice_each():
    model = TwoStages()
    cached_backward(*model.micro_batches(10, 6), loss_of)
    assert model.rows == [6] * 8
