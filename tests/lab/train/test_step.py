from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.lab.train.adapters import add_low_rank
from cairn.pipeline.lab.train.contrastive import draw_batch
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.pair_data import TrainingData
from cairn.pipeline.lab.train.pair_vectors import PairVectors
from cairn.pipeline.lab.train.pairs import TrainingPairs, text_numbers
from cairn.pipeline.lab.train.processes import ALONE, Processes
from cairn.pipeline.lab.train.sequences import SequenceMaker, make_units
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.folders.checkpoint import read_checkpoint

from tests.lab.train.conftest import train_step


@pytest.fixture
def data(
    tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs]
) -> tuple[TrainingData, list[tuple[int, ...]]]:
    pairs = make_pairs(24)
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((2, 24, 5)).astype(np.float32)
    maker = SequenceMaker(
        read_checkpoint(tiny_model_folder), pairs, pooling="lmk", max_query_tokens=16, max_document_tokens=64
    )
    return (
        TrainingData(
            maker=maker,
            vectors=PairVectors(document_NV=vectors[0], query_NV=vectors[1], fingerprint="test"),
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
            "max_gradient_norm": 1e9,
        }
        | settings
    )


def gradients(
    folder: Path,
    data: tuple[TrainingData, list[tuple[int, ...]]],
    config: TrainConfig,
    step: int = 0,
    teacher: bool = True,
    processes: Processes = ALONE,
) -> tuple[Any, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    model = LandmarkEncoder(
        read_checkpoint(folder),
        context_size=config.context_documents if config.reads_context else None,
        first_stage_layers=config.first_stage_layers,
        null_token=config.context_dropout > 0,
    )
    if config.lora_rank:
        add_low_rank(model, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    taught_by = LandmarkEncoder(read_checkpoint(folder)).requires_grad_(False) if teacher else None
    report = train_step(model, taught_by, data[0], data[1], step, config, processes)
    return report, {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("context_dropout", [0.0, 0.4])
@pytest.mark.parametrize("dims", [(), (8, 32)])
@pytest.mark.parametrize(("layers", "first_stage_layers"), [((), 0), ((1, 2), 0), ((), 1)])
def test_train_step_in_micro_batches_gives_the_gradient_of_the_whole(
    tiny_model_folder: Path,
    data: Any,
    dims: tuple[int, ...],
    layers: tuple[int, ...],
    first_stage_layers: int,
    context_dropout: float,
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


def test_train_step_leaves_the_same_inputs_of_updates_out_in_every_micro_batch(
    tiny_model_folder: Path, data: Any
):
    settings = {"lora_rank": 2, "lora_dropout": 0.3}
    _, whole = gradients(tiny_model_folder, data, config_of(micro_batch_tokens=100_000, **settings))
    _, found = gradients(tiny_model_folder, data, config_of(micro_batch_tokens=60, **settings))
    _, without = gradients(tiny_model_folder, data, config_of(lora_rank=2))
    for name, gradient in whole.items():
        assert float((found[name] - gradient).abs().max()) <= 2e-4 * max(1.0, float(gradient.abs().max())), (
            name
        )
    assert any(float((without[name] - gradient).abs().max()) > 1e-2 for name, gradient in whole.items())


@pytest.mark.parametrize("size", [2, 3])
def test_train_step_of_several_processes_gives_each_the_gradient_of_one(
    tiny_model_folder: Path, data: Any, in_threads: Callable[..., Any], size: int
):
    config = config_of(context_dropout=0.4, matryoshka_dims=(8, 32))
    one, expected = gradients(tiny_model_folder, data, config)
    for report, found in in_threads(
        size, lambda processes: gradients(tiny_model_folder, data, config, processes=processes)
    ):
        assert report.loss == pytest.approx(one.loss, abs=1e-5)
        assert report.num_tokens == one.num_tokens
        assert set(found) == set(expected)
        for name, gradient in expected.items():
            assert float((found[name] - gradient).abs().max()) <= 1e-5 * max(
                1.0, float(gradient.abs().max())
            ), name


def test_train_step_reaches_gates_null_token_and_every_weight(tiny_model_folder: Path, data: Any):
    report, found = gradients(tiny_model_folder, data, config_of(context_dropout=0.5))
    assert report.num_context == 6
    assert {
        name for name, _ in LandmarkEncoder(read_checkpoint(tiny_model_folder)).named_parameters()
    } == set(found)


def test_train_step_the_same_step_is_the_same_bit_for_bit_and_another_is_not(
    tiny_model_folder: Path, data: Any
):
    one, again, other = (
        gradients(tiny_model_folder, data, config_of(context_dropout=0.3), step) for step in (4, 4, 5)
    )
    assert one[0] == again[0]
    assert all(torch.equal(one[1][name], again[1][name]) for name in one[1])
    assert one[0].loss != other[0].loss


def test_train_step_chunk_attention_leaves_gates_alone(tiny_model_folder: Path, data: Any):
    _, found = gradients(tiny_model_folder, data, config_of(attention="chunk"))
    assert all(
        "landmark_attention" not in name or not gradient.abs().max() for name, gradient in found.items()
    )


def test_train_step_distillation_pulls_a_moved_model_back(tiny_model_folder: Path, data: Any):
    without, _ = gradients(tiny_model_folder, data, config_of(), teacher=False)
    weighed, _ = gradients(tiny_model_folder, data, config_of(distillation_weight=2.0))
    assert weighed.loss > without.loss


def test_train_step_gradient_is_clipped(tiny_model_folder: Path, data: Any):
    report, found = gradients(tiny_model_folder, data, config_of(max_gradient_norm=0.01))
    assert report.gradient_norm > 0.01
    assert sum(float(gradient.pow(2).sum()) for gradient in found.values()) ** 0.5 == pytest.approx(
        0.01, rel=1e-3
    )


def test_train_step_in_bf16_is_near_fp32(tiny_model_folder: Path, data: Any):
    exact, _ = gradients(tiny_model_folder, data, config_of())
    rounded, _ = gradients(tiny_model_folder, data, config_of(precision="bf16"))
    assert rounded.loss == pytest.approx(exact.loss, rel=0.05)
    assert rounded.loss != exact.loss


def test_draw_batch_context_is_absent_in_its_share_of_steps(data: Any):
    config = config_of(context_absence=0.5)
    contexts = [
        draw_batch(data[0], data[1], np.random.default_rng(step), config, 96)[1] for step in range(60)
    ]
    assert 15 < sum(context is None for context in contexts) < 45
    assert {len(context) for context in contexts if context is not None} == {6}


def test_draw_batch_hard_negatives_stand_behind_the_documents(data: Any):
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
def test_single_interval_cuts_every_sequence_alike(
    data: tuple[TrainingData, list[tuple[int, ...]]], interval: int
):
    training, units = data
    config = config_of(landmark_intervals=(interval,), context_documents=0, title_share=0.0)
    batch, _ = draw_batch(training, units, np.random.default_rng(0), config, 512)
    num_queries = len(batch.pair_Q)
    alike = training.maker.documents(batch.pair_D.tolist(), interval)[0]
    assert len(batch.rows) - num_queries == len(alike)
    assert batch.rows.own_lengths.max() <= interval
