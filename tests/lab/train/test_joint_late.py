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
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.pair_data import TrainingData
from cairn.pipeline.lab.train.pair_vectors import PairVectors
from cairn.pipeline.lab.train.pairs import TrainingPairs, text_numbers
from cairn.pipeline.lab.train.processes import ALONE, Processes
from cairn.pipeline.lab.train.sequences import SequenceMaker, make_units
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.lab.train.token_head import TokenHead, begin_head, groups_of, project_tokens
from cairn.pipeline.lab.train.trainer import read_log
from cairn.pipeline.model.backbone_loader import load_backbone, token_projection_of
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config

from tests.lab.train.conftest import train_step

LATE: dict[str, Any] = {"late_weight": 1.0, "late_dims": 8, "late_bits": 4}


@pytest.fixture
def pairs(make_pairs: Callable[..., TrainingPairs]) -> TrainingPairs:
    return make_pairs(24)


def maker_of(folder: Path, pairs: TrainingPairs) -> SequenceMaker:
    return SequenceMaker(
        read_checkpoint(folder), pairs, pooling="lmk", max_query_tokens=16, max_document_tokens=64
    )


def gradients(
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
    whole, expected = gradients(tiny_model_folder, pairs, micro_batch_tokens=100_000)
    parts, found = gradients(tiny_model_folder, pairs, micro_batch_tokens=60)
    assert parts.late_loss == pytest.approx(whole.late_loss, abs=1e-4)
    assert_equal_gradients(found, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_late_term_of_several_processes_gives_each_the_gradient_of_one(
    tiny_model_folder: Path, pairs: TrainingPairs, in_threads: Callable[..., Any], size: int
):
    _, expected = gradients(tiny_model_folder, pairs)
    shared = in_threads(size, lambda processes: gradients(tiny_model_folder, pairs, processes))
    for _, found in shared:
        assert_equal_gradients(found, expected)


def test_late_term_moves_the_transformer_and_without_it_no_head_is_there(
    tiny_model_folder: Path, pairs: TrainingPairs
):
    light, one = gradients(tiny_model_folder, pairs, late_weight=0.001)
    heavy, other = gradients(tiny_model_folder, pairs, late_weight=5.0)
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


def test_train_late_learns_to_find_documents_by_tokens(run: Any, tmp_path: Path):
    run("late", steps=40, evaluate_every=40, checkpoint_every=40, late_distillation_weight=0.0, **LATE)
    losses = [
        record["late_loss"] for record in read_log(tmp_path / "late" / "log.jsonl") if "late_loss" in record
    ]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_train_late_dims_beyond_the_model_are_refused(run: Any):
    with pytest.raises(ConfigError, match="late_dims must be at most the base model's 32, got 64"):
        run("wide", steps=1, late_weight=1.0, late_dims=64)
    with pytest.raises(ConfigError, match="must fill whole bytes at 2 bits, got 47"):
        TrainConfig(steps=1, late_dims=47)
