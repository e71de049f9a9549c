"""NaN and infinity end a run in a sentence, and what was good before is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.lab.train.contrastive import PairTask, train
from cairn.pipeline.lab.train.distill import DistillTask, distill
from cairn.pipeline.lab.train.pretrain import PretrainTask, pretrain
from cairn.pipeline.lab.train.settings import DistillConfig, PretrainConfig, TrainConfig
from cairn.pipeline.lab.train.trainer import NotFiniteError, RunState, TrainingLog, require_finite
from safetensors.torch import load_file, save_file

from tests.lab.train.conftest import LOOP_SETTINGS, tiny_pairs
from tests.tiny_models import make_tiny_model

OFTEN = {"precision": "fp32", "evaluate_every": 1, "checkpoint_every": 2}


@pytest.fixture
def overflowing(tmp_path: Path) -> str:
    """Return a model whose weights are finite, and whose states are not."""
    folder = make_tiny_model(tmp_path / "overflowing")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if ".layer." in name and name.endswith("weight"):
            tensor.mul_(3e37)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture
def start(tmp_path: Path, tiny_model_folder: Path) -> Callable[..., Any]:
    """Return what starts each of the three trainings, from ``base`` or towards ``teacher``."""
    generator = np.random.default_rng(0)
    texts, pairs = tmp_path / "texts.jsonl", tmp_path / "pairs.jsonl"
    words = ["the", "old", "cat", "sat", "on", "a", "mat", "river", "stone", "path"]
    lines = [" ".join(generator.choice(words, 12)) for _ in range(40)]
    texts.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    pairs.write_text("".join(json.dumps(record) + "\n" for record in tiny_pairs(60)))
    tiny, folder = str(tiny_model_folder), tmp_path / "run"

    def call(verb: str, base: str = tiny, teacher: str = tiny) -> Any:
        if verb == "train":
            config = TrainConfig(**{**LOOP_SETTINGS, **OFTEN})
            return train([pairs], folder, config, base=base)
        if verb == "pretrain":
            return pretrain(
                [texts], folder, PretrainConfig(steps=4, batch_rows=4, max_tokens=24, **OFTEN), base=base
            )
        config = DistillConfig(steps=4, batch_texts=8, max_tokens=24, **OFTEN)
        return distill(teacher, base, [texts], folder, config)

    return call


@pytest.mark.parametrize("verb", ["train", "pretrain", "distill"])
def test_score_that_is_not_finite_ends_the_run_and_keeps_what_was_good(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    task: Any = {"train": PairTask, "pretrain": PretrainTask, "distill": DistillTask}[verb]
    evaluate = task.evaluate

    def spoiled(self: Any, state: RunState, log: TrainingLog) -> RunState:
        if state.step == 3:
            with torch.no_grad():
                self.model.token_table.fill_(float("nan"))
        return evaluate(self, state, log)

    monkeypatch.setattr(task, "evaluate", spoiled)
    with pytest.raises(
        ModelError, match=r"must be finite, got .* after step 3; .*00000002 is the last good checkpoint"
    ):
        start(verb)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["00000002"]
    best = load_file(tmp_path / "run" / "best" / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in best.values())


@pytest.mark.parametrize("verb", ["train", "pretrain", "distill"])
def test_base_whose_states_are_not_finite_is_refused_before_training(
    start: Callable[..., Any], overflowing: str, tmp_path: Path, verb: str
) -> None:
    with pytest.raises(ModelError, match="before anything was trained; fetch the models again"):
        start(verb, base=overflowing)
    assert not (tmp_path / "run" / "best").exists()


def test_teacher_whose_states_are_not_finite_is_refused(
    start: Callable[..., Any], overflowing: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="heldout_cosine must be finite, got nan after step 0, before"):
        start("distill", teacher=overflowing)
    assert not (tmp_path / "run" / "best").exists()


def test_base_that_a_teacher_cannot_be_laid_onto_is_refused(
    overflowing: str, tiny_model_folder: Path, start: Callable[..., Any], tmp_path: Path
) -> None:
    config = TrainConfig(**{**LOOP_SETTINGS, "teacher": str(tiny_model_folder), "distillation_weight": 1.0})
    with pytest.raises(ModelError, match="vectors of the surrogate must be finite, got NaN or infinity"):
        train([tmp_path / "pairs.jsonl"], tmp_path / "run", config, base=overflowing)


def test_require_finite_names_what_is_not() -> None:
    require_finite({"loss": 1.0})
    with pytest.raises(NotFiniteError, match=r"^loss and gradient must be finite, got nan and inf$"):
        require_finite({"loss": float("nan"), "gradient": float("inf"), "lr": 1.0})
