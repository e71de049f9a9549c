from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cairn.pipeline.lab.train.mixer import Compared, CutVectors, Judgements, Rotation, RotationBatch
from cairn.pipeline.lab.train.settings import MixerConfig
from cairn.pipeline.lab.train.token_head import principal_rotation
from cairn.pipeline.lab.train.trainer import FrozenBaseRun, read_log
from cairn.pipeline.types import silent_progress
from torch.nn import functional

WIDTH, TELLING = 12, 3


def vectors(num: int, scale: np.ndarray, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(num, len(scale))) * scale).astype(np.float32)


def test_principal_rotation_is_orthogonal_and_says_most_first():
    scale = np.array([0.1, 3.0, 1.0, 0.5])
    rotation_DD = principal_rotation(vectors(4_000, scale))
    np.testing.assert_allclose(rotation_DD @ rotation_DD.T, np.eye(4), atol=1e-6)
    assert np.abs(rotation_DD).argmax(0).tolist() == [1, 2, 3, 0]
    second_moments = ((vectors(4_000, scale) @ rotation_DD) ** 2).mean(0)
    assert (np.diff(second_moments) < 0).all()


def test_principal_rotation_does_not_centre():
    shifted = vectors(2_000, np.ones(3)) * 0.1 + np.array([0.0, 0.0, 5.0], np.float32)
    np.testing.assert_allclose(principal_rotation(shifted.astype(np.float32))[:, 0], [0, 0, 1], atol=1e-2)


def rotation_batch(step: int) -> RotationBatch:
    """Return queries whose answers agree with them in a few directions that carry little.

    The rest is large and says nothing.
    """
    generator = np.random.default_rng(step)
    telling = generator.normal(size=(16, TELLING))
    scale = np.concatenate([np.full(TELLING, 1.0), np.full(WIDTH - TELLING, 1.5)])

    def side() -> torch.Tensor:
        rest = generator.normal(size=(16, WIDTH - TELLING))
        return functional.normalize(
            torch.from_numpy((np.concatenate([telling, rest], axis=1) * scale).astype(np.float32)), dim=1
        )

    query_QD, passage_MD = side(), side()
    is_answer_QM = torch.eye(16, dtype=torch.bool)
    nothing = torch.zeros(16, 1)
    judged = Judgements(
        base=Compared(passage_QM=query_QD @ passage_MD.T, sequence_QS=nothing, best_QS=nothing),
        is_answer_QM=is_answer_QM,
        is_left_out_QM=torch.zeros_like(is_answer_QM),
        is_left_out_QS=torch.zeros(16, 1, dtype=torch.bool),
        sequence_Q=torch.zeros(16, dtype=torch.int64),
    )
    return query_QD, passage_MD, judged


def hits(rotation_DD: torch.Tensor, dim: int) -> float:
    found = []
    for step in range(1_000, 1_020):
        query_QD, passage_MD, _ = rotation_batch(step)
        cosine_QM = (
            functional.normalize((query_QD @ rotation_DD)[:, :dim], dim=1)
            @ functional.normalize((passage_MD @ rotation_DD)[:, :dim], dim=1).T
        )
        found.append(float((cosine_QM.argmax(1) == torch.arange(16)).float().mean()))
    return float(np.mean(found))


def test_rotation_stays_orthogonal_and_puts_what_finds_answers_first(tmp_path: Path):
    sample = np.concatenate([side.numpy() for step in range(50) for side in rotation_batch(step)[:2]])
    start_DD = torch.from_numpy(principal_rotation(sample))
    config = MixerConfig(rotation_steps=150, rotation_lr=0.05, temperature=0.1, distillation_temperature=0.2)
    objective = CutVectors(
        model=Rotation(start_DD), draw=rotation_batch, measure=lambda _: {}, dims=(4,), config=config
    )
    torch.testing.assert_close(objective.model.exact(), start_DD, atol=1e-6, rtol=0)
    FrozenBaseRun(tmp_path / "mixer").train(objective, config.of_rotation, silent_progress, stage="rotation")
    losses = [record["loss"] for record in read_log(tmp_path / "mixer.jsonl")]
    rotation_DD = objective.model.exact()
    assert rotation_DD.dtype == torch.float32
    torch.testing.assert_close(rotation_DD @ rotation_DD.T, torch.eye(WIDTH), atol=1e-5, rtol=0)
    assert len(losses) == 150
    assert np.mean(losses[-20:]) < np.mean(losses[:20])
    assert hits(rotation_DD, 4) > hits(start_DD, 4) + 0.1
    assert hits(rotation_DD, WIDTH) == pytest.approx(hits(start_DD, WIDTH))
