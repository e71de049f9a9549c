from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cairn.pipeline.errors import FingerprintMismatchError
from cairn.pipeline.lab.train.contrastive import TrainReport, train
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.lab.train.trainer import read_log
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.types import ModelScores

SETTINGS: dict[str, Any] = {
    "steps": 6,
    "batch_pairs": 12,
    "max_document_tokens": 32,
    "context_documents": 3,
    "max_context_tokens": 12,
    "evaluate_every": 3,
    "dev_every": 2,
    "checkpoint_every": 1,
    "peak_lr": 1e-3,
    "precision": "fp32",
}


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


@pytest.fixture
def run(tiny_model_folder: Path, pairs_file: Path, tmp_path: Path) -> Callable[..., TrainReport]:
    def start(judge: Judge, progress: Any = None, **settings: Any) -> TrainReport:
        listener = {} if progress is None else {"progress": progress}
        config = TrainConfig(**{**SETTINGS, **settings})
        return train(
            [pairs_file], tmp_path / "run", config, base=str(tiny_model_folder), scorer=judge, **listener
        )

    return start


def test_trainer_keeps_the_model_of_the_best_dev_score(run: Any, tmp_path: Path):
    judge = Judge([0.1, 0.4, 0.2, 0.3])
    report = run(judge)
    assert (report.judged_by, report.best_score, report.best_step) == ("dev sets", 0.4, 2)
    assert torch.equal(query_weight(tmp_path / "run" / "best"), judge.seen[1])
    assert not torch.equal(judge.seen[1], judge.seen[2])
    assert not (tmp_path / "run" / "candidate").exists()


def test_trainer_logs_dev_scores_beside_the_held_out_ones(run: Any, tmp_path: Path):
    run(Judge([0.1, 0.4, 0.2, 0.3]))
    records = read_log(tmp_path / "run" / "log.jsonl")
    assert [
        (each["step"], each["dev_score"], each["dev/a/nDCG@10"]) for each in records if "dev_score" in each
    ] == [
        (0, 0.1, 0.1),
        (2, 0.4, 0.4),
        (4, 0.2, 0.2),
        (6, 0.3, 0.3),
    ]
    assert [each["step"] for each in records if "heldout_ndcg_at_10" in each] == [0, 3, 6]
    assert {"loss", "lr", "dev/b/nDCG@10"} <= {name for each in records for name in each}


def test_trainer_resumed_remembers_the_best_dev_score(run: Any, tmp_path: Path):
    def dying(stage: str, done: int, total: int | None, unit: str) -> None:
        if stage == "train" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Judge([0.1, 0.4]), dying)
    kept = query_weight(tmp_path / "run" / "best")
    report = run(Judge([0.2, 0.3]))
    assert (report.resumed_at, report.best_score, report.best_step) == (3, 0.4, 2)
    assert torch.equal(query_weight(tmp_path / "run" / "best"), kept)
    assert [
        each["dev_score"] for each in read_log(tmp_path / "run" / "log.jsonl") if "dev_score" in each
    ] == [0.1, 0.4, 0.2, 0.3]


def test_trainer_whose_best_was_replaced_before_its_checkpoint_scores_the_step_again(
    run: Any, tmp_path: Path
):
    def dying(stage: str, done: int, total: int | None, unit: str) -> None:
        if stage == "train" and done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Judge([0.1, 0.2, 0.5]), dying, checkpoint_every=3)
    report = run(Judge([0.5, 0.3]), checkpoint_every=3)
    assert (report.resumed_at, report.best_score, report.best_step) == (3, 0.5, 4)


def test_trainer_goes_on_only_with_the_dev_sets_it_began_with(run: Any, tmp_path: Path):
    run(Judge([0.1, 0.2]), steps=1)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["dev sets"] == "sets"
    with pytest.raises(FingerprintMismatchError, match="another dev sets"):
        run(Judge([0.1, 0.2], "other sets"), steps=1)
