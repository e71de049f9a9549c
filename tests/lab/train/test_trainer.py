"""The one loop, whatever is trained: kills, time limits, checkpoints, scores, NaN, folders of other runs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline import durable
from cairn.pipeline.errors import (
    DiskFullError,
    FingerprintMismatchError,
    IntegrityError,
    ModelError,
    TryAgainError,
)
from cairn.pipeline.lab.train import trainer
from cairn.pipeline.lab.train.contrastive import PairObjective
from cairn.pipeline.lab.train.distill import FollowedTexts
from cairn.pipeline.lab.train.pretrain import MaskedText
from cairn.pipeline.lab.train.settings import (
    TrainConfig,
)
from cairn.pipeline.lab.train.trainer import (
    claimed_folder,
    make_optimizer,
    newest_checkpoint,
    places_of_step,
    read_log,
)
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.types import ModelScores
from safetensors.torch import load_file, save_file
from torch import nn

from tests.lab.train.conftest import KilledError, dying_after
from tests.tiny_models import make_tiny_model


def written(folder: Path) -> dict[str, bytes]:
    """Return the files of the model that a run has left."""
    return {path.name: path.read_bytes() for path in sorted((folder / "model").rglob("*")) if path.is_file()}


def logged(folder: Path) -> list[dict[str, Any]]:
    records = read_log(folder / "log.jsonl")
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


@pytest.mark.parametrize(
    ("verb", "settings"),
    [
        ("train", {}),
        pytest.param("train", {"precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param("train", {"first_stage_layers": 1}, marks=pytest.mark.slow),
        pytest.param("train", {"pooling": "latent", "latents": 4}, marks=pytest.mark.slow),
        ("pretrain", {"language_smoothing": 0.7}),
        ("distill", {}),
        ("train_landmarks", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)) or "plain",
)
def test_run_killed_and_started_again_ends_bit_for_bit_as_if_undisturbed(start, tmp_path, verb, settings):
    start(verb, "straight", **settings)
    for step in (1, 2, 5):  # before the first checkpoint, at one, between an evaluation and the next
        with pytest.raises(KilledError):
            start(verb, "killed", dying_after(step), **settings)
        newest = newest_checkpoint(tmp_path / "killed")
        assert int(newest.stem if newest else 0) == step - step % 2
    assert start(verb, "killed", **settings).resumed_at == 4
    assert written(tmp_path / "killed") == written(tmp_path / "straight")
    assert logged(tmp_path / "killed") == logged(tmp_path / "straight")


@pytest.mark.parametrize("nth", [1, 2])
def test_run_killed_at_a_commit_point_ends_bit_for_bit_as_if_undisturbed(start, tmp_path, monkeypatch, nth):
    start("train", "straight")
    seen: list[str] = []

    def observe(name: str) -> None:
        seen.append(name)
        if seen.count("train.checkpoint") == nth:
            raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(durable, "_observers", [observe])
        with pytest.raises(KilledError):
            start("train", "killed")
    assert start("train", "killed").resumed_at == 2 * nth
    assert written(tmp_path / "killed") == written(tmp_path / "straight")


@pytest.mark.parametrize("verb", ["train", "train_landmarks"])
def test_run_out_of_time_stops_at_a_checkpoint_and_goes_on(start, verb):
    with pytest.raises(TryAgainError, match="got to 1 in the time it was given; run the same command"):
        start(verb, how={"deadline": 0.0})
    again = start(verb)
    assert again.resumed_at == 1
    assert start(verb).first_loss is None


def test_run_passes_over_a_damaged_checkpoint_and_keeps_the_two_newest(start, tmp_path, caplog):
    start("train")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.stem for path in checkpoints.glob("*.safetensors")) == ["00000006", "00000008"]
    newest = checkpoints / "00000008.safetensors"
    content = newest.read_bytes()
    for name, damaged in ((newest, content[:-7]), (newest.with_suffix(".json"), b"{")):
        whole = name.read_bytes()
        name.write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            assert newest_checkpoint(tmp_path / "run") == checkpoints / "00000006.safetensors"
        assert "checkpoint 00000008 is damaged" in caplog.text
        name.write_bytes(whole)
    newest.write_bytes(content[:-7])
    assert start("train").resumed_at == 6


def test_run_goes_on_only_with_what_it_was_started_with(start, tmp_path, pairs_file):
    start("train", steps=2)
    for settings, said in (({"peak_lr": 1e-4}, r"peak_lr 0\.001"), ({"precision": "bf16"}, "precision fp32")):
        with pytest.raises(FingerprintMismatchError, match=rf"got a folder of a run with {said}; give the"):
            start("train", steps=2, **settings)
    pairs_file.write_text(pairs_file.read_text() + json.dumps({"query": "one", "document": "more"}) + "\n")
    with pytest.raises(FingerprintMismatchError, match="another pairs"):
        start("train", steps=2)
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(IntegrityError, match=r"run\.json of the run must be JSON"):
        start("train", steps=2)


def test_run_keeps_a_second_training_out_and_clears_what_a_killed_one_left(tmp_path):
    folder, config = tmp_path / "run", TrainConfig(steps=1)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / ".00000004.safetensors.17.tmp").touch()
    (folder / ".best.17.tmp").mkdir()
    with claimed_folder(folder, config, {}, {}):
        assert sorted(path.name for path in folder.rglob("*")) == [".lock", "checkpoints", "run.json"]
        with (
            pytest.raises(TryAgainError, match=r"one training at a time, got another at work \(process"),
            claimed_folder(folder, config, {}, {}),
        ):
            pass
    with claimed_folder(folder, config, {}, {}):
        pass


# Disks


def test_run_on_a_full_disk_leaves_the_checkpoint_before(start, tmp_path, monkeypatch):
    calls: list[int] = []
    real = trainer.save_file

    def full(*arguments: Any, **named: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "save_file", full)
        with pytest.raises(DiskFullError, match="no space left while writing checkpoints/00000004"):
            start("train")
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "00000002.safetensors"
    assert start("train").resumed_at == 2


# NaN


@pytest.fixture
def overflowing(tmp_path):
    """Return a model whose weights are finite, and whose states are not."""
    folder = make_tiny_model(tmp_path / "overflowing")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if ".layer." in name and name.endswith("weight"):
            tensor.mul_(3e37)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


OBJECTIVES = {"train": PairObjective, "pretrain": MaskedText, "distill": FollowedTexts}


@pytest.mark.parametrize("verb", OBJECTIVES)
@pytest.mark.parametrize(("method", "when"), [("score", "after step 3"), ("batch", "in step 4")])
def test_run_that_comes_upon_nan_keeps_what_was_good(start, tmp_path, monkeypatch, verb, method, when):
    objective: Any = OBJECTIVES[verb]
    real, calls = getattr(objective, method), list[int]()

    def spoiled(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            with torch.no_grad():
                self.model.token_table.fill_(float("nan"))
        return real(self, *arguments)

    monkeypatch.setattr(objective, method, spoiled)
    with pytest.raises(
        ModelError, match=rf"must be finite, got .* {when}; .*00000002\S* is the last good checkpoint"
    ):
        start(verb, evaluate_every=1, checkpoint_every=2)
    assert [path.stem for path in (tmp_path / "run" / "checkpoints").glob("*.json")] == ["00000002"]
    best = load_file(tmp_path / "run" / "best" / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in best.values())


@pytest.mark.parametrize(
    ("verb", "whose", "sentence"),
    [
        ("train", "base", "vectors of the surrogate must be finite"),
        ("pretrain", "base", "before anything was trained"),
        ("distill", "base", "before anything was trained"),
        ("distill", "teacher", "heldout_cosine must be finite, got nan after step 0, before"),
    ],
)
def test_model_whose_states_are_not_finite_is_refused_before_training(
    start, overflowing, tmp_path, verb, whose, sentence
):
    with pytest.raises(ModelError, match=sentence):
        start(verb, **{whose: overflowing})
    assert not (tmp_path / "run" / "best").exists()


# Scores on dev sets


class Judge:
    """Gives the scores it was told to, one a call, and keeps the weights it was shown."""

    def __init__(self, scores: Sequence[float], fingerprint: str = "sets") -> None:
        self.fingerprint = fingerprint
        self.scores = list(scores)
        self.seen: list[torch.Tensor] = []

    def score(self, model_folder: Path) -> ModelScores:
        self.seen.append(query_weight(model_folder))
        score = self.scores.pop(0)
        return ModelScores(mean=score, by_measure={"a/nDCG@10": score, "b/nDCG@10": 1.0 - score})


def query_weight(folder: Path) -> torch.Tensor:
    return read_checkpoint(folder).tensors["encoder.layer.0.attention.self.query.weight"]


DEV: dict[str, Any] = {"steps": 6, "evaluate_every": 3, "dev_every": 2, "checkpoint_every": 1}


def test_trainer_keeps_the_model_of_the_best_dev_score(start, tmp_path):
    judge = Judge([0.1, 0.4, 0.2, 0.4])  # of equals the first
    report = start("train", how={"scorer": judge}, **DEV)
    assert (report.details["judged_by"], report.best_score, report.best_step) == ("dev sets", 0.4, 2)
    assert torch.equal(query_weight(tmp_path / "run" / "best"), judge.seen[1])
    assert not torch.equal(judge.seen[1], judge.seen[2])
    assert not (tmp_path / "run" / "candidate").exists()
    records = read_log(tmp_path / "run" / "log.jsonl")
    dev = [
        (each["step"], each["dev_score"], each["dev/a/nDCG@10"]) for each in records if "dev_score" in each
    ]
    assert dev == [(0, 0.1, 0.1), (2, 0.4, 0.4), (4, 0.2, 0.2), (6, 0.4, 0.4)]
    assert [each["step"] for each in records if "heldout_ndcg_at_10" in each] == [0, 3, 6]
    with pytest.raises(FingerprintMismatchError, match="another dev sets"):
        start("train", how={"scorer": Judge([], "other sets")}, **DEV)


@pytest.mark.parametrize(
    ("every", "dies_after", "before", "after", "end"),
    [
        (1, 3, [0.1, 0.4], [0.2, 0.3], (3, 0.4, 2)),
        (
            3,
            5,
            [0.1, 0.2, 0.5],
            [0.5, 0.3],
            (3, 0.5, 4),
        ),  # scored again: the best is newer than its checkpoint
    ],
)
def test_trainer_resumed_remembers_the_best_dev_score(start, tmp_path, every, dies_after, before, after, end):
    settings = {**DEV, "checkpoint_every": every}
    with pytest.raises(KilledError):
        start("train", progress=dying_after(dies_after), how={"scorer": Judge(before)}, **settings)
    kept = query_weight(tmp_path / "run" / "best")
    report = start("train", how={"scorer": Judge(after)}, **settings)
    assert (report.resumed_at, report.best_score, report.best_step) == end
    assert torch.equal(query_weight(tmp_path / "run" / "best"), kept)
    records = read_log(tmp_path / "run" / "log.jsonl")
    told = [each["dev_score"] for each in records if "dev_score" in each]
    assert told == [*before[:2], *after]


# Optimiser, rates, log


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_lr_factor_rises_to_one_and_falls_to_almost_nothing_as_the_schedule_says(schedule):
    config = TrainConfig(steps=110, warmup_share=10 / 110, schedule=schedule)
    for step in range(110):
        left = 1 - (step - 10) / 100
        falling = left if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * (1 - left)))
        assert config.lr_factor(step) == pytest.approx((step + 1) / 10 if step < 10 else falling)
    assert TrainConfig(steps=1, warmup_share=0.0).lr_factor(0) == 1.0


def test_places_of_steps_come_once_a_round_in_another_order_each():
    places = np.concatenate([places_of_step(step, 4, 10, 7, 1) for step in range(5)])
    first, second = np.split(places, 2)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(10))
    assert first.tolist() != second.tolist()


def test_make_optimizer_lets_only_matrices_decay():
    config = TrainConfig(steps=1, weight_decay=0.2)
    matrices, vectors = make_optimizer(nn.Linear(3, 2), config).param_groups
    assert [[each.ndim for each in group["params"]] for group in (matrices, vectors)] == [[2], [1]]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.2, 0.0)
