"""Claims of step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.adapters import add_low_rank
from cairn.pipeline.lab.train.contrastive import draw_batch
from cairn.pipeline.lab.train.grad_cache import FirstStage, SecondStage, cached_backward, plain_backward
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.losses import contrastive_loss
from cairn.pipeline.lab.train.pair_data import TrainingData
from cairn.pipeline.lab.train.pair_vectors import PairVectors
from cairn.pipeline.lab.train.pairs import TrainingPairs, text_numbers
from cairn.pipeline.lab.train.processes import ALONE, Processes
from cairn.pipeline.lab.train.sequences import SequenceMaker, make_units
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.lab.train.token_head import TokenHead, begin_head, groups_of, project_tokens
from cairn.pipeline.model.backbone_loader import load_backbone, token_projection_of
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config
from torch import nn

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


def test_train_step_chunk_attention_leaves_gates_alone(tiny_model_folder: Path, data: Any):
    _, found = gradients(tiny_model_folder, data, config_of(attention="chunk"))
    assert all(
        "landmark_attention" not in name or not gradient.abs().max() for name, gradient in found.items()
    )


def test_train_step_loss_of_widths_and_layers_is_their_mean(tiny_model_folder: Path, data: Any):
    def loss(dims: tuple[int, ...], layers: tuple[int, ...]) -> float:
        config = config_of(matryoshka_dims=dims, matryoshka_layers=layers)
        return gradients(tiny_model_folder, data, config, teacher=False)[0].loss

    assert loss((8, 32), (2,)) == pytest.approx((loss((8,), (2,)) + loss((32,), (2,))) / 2, rel=1e-5)
    assert loss((32,), (1, 2)) == pytest.approx((loss((32,), (1,)) + loss((32,), (2,))) / 2, rel=1e-5)


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


LATE: dict[str, Any] = {"late_weight": 1.0, "late_dims": 8, "late_bits": 4}


@pytest.fixture
def pairs(make_pairs: Callable[..., TrainingPairs]) -> TrainingPairs:
    return make_pairs(24)


def maker_of(folder: Path, pairs: TrainingPairs) -> SequenceMaker:
    return SequenceMaker(
        read_checkpoint(folder), pairs, pooling="lmk", max_query_tokens=16, max_document_tokens=64
    )


def late_gradients(
    folder: Path, pairs: TrainingPairs, processes: Processes = ALONE, **settings: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    config = TrainConfig(
        **{"steps": 9, "context_documents": 6, "max_context_tokens": 12, "max_gradient_norm": 1e9}
        | LATE
        | settings
    )
    vectors = np.random.default_rng(0).standard_normal((2, 24, 5)).astype(np.float32)
    head, idf_X = begin_head(pairs, np.zeros(0, np.int64), str(folder), config)
    data = TrainingData(
        maker=maker_of(folder, pairs),
        vectors=PairVectors(document_NV=vectors[0], query_NV=vectors[1], fingerprint="test"),
        document_number_N=text_numbers(pairs.documents),
        hard_negatives_Nk=np.zeros((24, 0), np.int64),
        idf_X=idf_X,
    )
    model = LandmarkEncoder(read_checkpoint(folder))
    model.head = head
    teacher = LandmarkEncoder(read_checkpoint(folder)).requires_grad_(False)
    units = list(make_units(pairs, range(len(pairs)), 3))
    report = train_step(model, teacher, data, units, 0, config, processes)
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return report, found | {"observed": head.mean_square_V}


def assert_equal_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected) >= {"head.matrix", "head.log_weight"}
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= 2e-4 * max(1.0, float(gradient.abs().max())), (
            name
        )


def test_late_term_in_micro_batches_gives_the_gradient_of_the_whole(
    tiny_model_folder: Path, pairs: TrainingPairs
):
    whole, expected = late_gradients(tiny_model_folder, pairs, micro_batch_tokens=100_000)
    parts, found = late_gradients(tiny_model_folder, pairs, micro_batch_tokens=60)
    assert parts.late_loss == pytest.approx(whole.late_loss, abs=1e-4)
    assert_equal_gradients(found, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_late_term_of_several_processes_gives_each_the_gradient_of_one(
    tiny_model_folder: Path, pairs: TrainingPairs, in_threads: Callable[..., Any], size: int
):
    _, expected = late_gradients(tiny_model_folder, pairs)
    shared = in_threads(size, lambda processes: late_gradients(tiny_model_folder, pairs, processes))
    for _, found in shared:
        assert_equal_gradients(found, expected)


def test_late_term_moves_the_transformer_and_without_it_no_head_is_there(
    tiny_model_folder: Path, pairs: TrainingPairs
):
    light, one = late_gradients(tiny_model_folder, pairs, late_weight=0.001)
    heavy, other = late_gradients(tiny_model_folder, pairs, late_weight=5.0)
    assert heavy.loss > light.loss
    name = "encoder.layer.1.output.dense.weight"
    assert float((one[name] - other[name]).abs().max()) > 1e-4


def test_groups_hold_every_query_once_with_its_answer_and_its_mined_documents(
    tiny_model_folder: Path, pairs: TrainingPairs, monkeypatch: pytest.MonkeyPatch
):
    from cairn.pipeline.lab.train import token_head

    monkeypatch.setattr(token_head, "GROUP_DOCUMENTS", 4)
    units = list(make_units(pairs, range(18), 3))
    batch = maker_of(tiny_model_folder, pairs).make(
        units, np.full(len(units), 32), np.zeros(len(units), bool), [20, 22]
    )
    mined_Qk = np.full((len(batch.pair_Q), 1), -1)
    mined_Qk[0, 0], mined_Qk[5, 0] = 20, 22
    groups = list(groups_of(batch, mined_Qk))
    assert len(groups) > 2
    assert sorted(np.concatenate([group.queries for group in groups]).tolist()) == list(range(18))
    for group in groups:
        assert set(batch.positive_Q[group.queries]) <= set(group.documents.tolist())
        mined = {int(pair) for pair in mined_Qk[group.queries].ravel() if pair >= 0}
        num_answers = batch.positive_Q.max() + 1
        beyond = group.documents[group.documents >= num_answers]
        assert set(batch.pair_D[beyond].tolist()) == mined


def test_token_vectors_in_training_are_those_that_are_served(run: Any, pairs_file: Path, tmp_path: Path):
    run("late", steps=3, context_documents=0, pooling="lmk", **LATE)
    folder = tmp_path / "late" / "model"
    config = replace(encoder_config({"model": str(folder)}), precision="fp32", landmark_interval=16)
    backbone = load_backbone(config)
    projection = token_projection_of(config, backbone)
    assert projection is not None
    texts = ["the cat sat on the old stone path by a river", "walking on a mat " * 12]
    served = DocumentEncoder(config, backbone=backbone, token_projection=projection).encode(texts)
    assert served.chunk_tokens is not None
    pairs = TrainingPairs(queries=("a", "a"), documents=tuple(texts), titles=("", ""), sources=("s", "s"))
    rows, _ = maker_of(folder, pairs).documents([0, 1], 16)
    with torch.no_grad():
        states_ND = LandmarkEncoder(read_checkpoint(folder)).read(rows)[1]
        weights = torch.ones(len(projection.weight_codes_X))
        head = TokenHead(torch.from_numpy(projection.matrix_DV), weights)
        trained = project_tokens(head, states_ND, rows)[:, :-1].numpy()
    codes = served.chunk_tokens.rows[:, :-1]
    np.testing.assert_array_equal(projection.codec.encode(trained), codes)
    assert codes.std(0).min() > 0


def test_train_late_dims_beyond_the_model_are_refused(run: Any):
    with pytest.raises(ConfigError, match="late_dims must be at most the base model's 32, got 64"):
        run("wide", steps=1, late_weight=1.0, late_dims=64)
    with pytest.raises(ConfigError, match="must fill whole bytes at 2 bits, got 47"):
        TrainConfig(steps=1, late_dims=47)


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
def test_cached_backward_through_both_stages_equals_the_plain_gradient(
    documents_a_part: int, texts_a_part: int
):
    loss, found = cache_gradients(cached_backward, documents_a_part, texts_a_part)
    expected_loss, expected = cache_gradients(plain_backward, documents_a_part, texts_a_part)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert set(found) == set(expected) == {name for name, _ in TwoStages().named_parameters()}
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-5, name


@pytest.mark.parametrize(("size", "texts_a_part"), [(2, 5), (3, 7), (4, 12)])
def test_cached_backward_of_several_processes_adds_up_to_the_plain_gradient(
    in_threads: Callable[..., Any], size: int, texts_a_part: int
):
    models = [TwoStages() for _ in range(size)]  # before there are threads, which share torch's generator

    def share(processes: Processes) -> tuple[float, dict[str, torch.Tensor]]:
        model = models[processes.rank]
        value = cached_backward(*model.micro_batches(4, texts_a_part), loss_of, processes)
        processes.add_up_gradients(model.parameters())
        return float(value), {name: parameter.grad for name, parameter in model.named_parameters()}

    expected_loss, expected = cache_gradients(plain_backward, 4, texts_a_part)
    for loss, found in in_threads(size, share):  # of two parts of texts, two of four processes have none
        assert loss == pytest.approx(expected_loss, abs=1e-5)
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
