from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.late import LateReport, train_late
from cairn.pipeline.lab.train.settings import LateConfig
from cairn.pipeline.model.backbone_loader import load_backbone, token_projection_of
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.token_vectors.projection import TokenProjection, read_token_projection

SETTINGS: dict[str, Any] = {
    "steps": 30,
    "dims": 8,
    "batch_queries": 6,
    "max_batches": 8,
    "hold_out": 0.2,
    "evaluate_every": 10,
    "peak_lr": 1e-2,
    "warmup_steps": 2,
}


@pytest.fixture
def run(pairs_file: Path, tiny_model_folder: Path, tmp_path: Path, one_thread: None):
    def start(name: str = "late", **settings: Any) -> LateReport:
        return train_late(
            [pairs_file],
            tmp_path / name,
            LateConfig(**{**SETTINGS, **settings}),
            base=str(tiny_model_folder),
            precision="fp32",
        )

    return start


def read(folder: Path, base: Path) -> TokenProjection:
    backbone = load_backbone(EncoderConfig(model=str(base)))
    found = read_token_projection(
        folder,
        model_dim=backbone.model_dim,
        vocabulary_size=backbone.tokenizer.get_vocab_size(),
        weights_sha256=read_checkpoint(base).weights_sha256,
    )
    assert found is not None
    return found


def test_train_late_lowers_the_loss_and_leaves_a_projection_for_the_base(
    run: Any, tmp_path: Path, tiny_model_folder: Path
):
    report = run()
    projection = read(tmp_path / "late", tiny_model_folder)
    log = [json.loads(line) for line in (tmp_path / "late.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in log if "loss" in record]

    assert projection.matrix_DV.shape == (32, 8)
    assert projection.pool_tokens == 1
    assert (report.first_loss, report.last_loss) == (losses[0], losses[-1])
    assert np.mean(losses[-6:]) < np.mean(losses[:6])
    assert report.best_score == max(record["heldout_hit"] for record in log if "heldout_hit" in record)


def test_train_late_with_one_seed_gives_the_same_bytes(run: Any, tmp_path: Path):
    run("first")
    run("second")

    first, second = (tmp_path / name / "cairn_late.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


def test_train_late_begins_at_principal_directions_and_idf(run: Any, tmp_path: Path, tiny_model_folder: Path):
    run(steps=1, peak_lr=1e-9, term_lr=1e-9, dims=32, hold_out=0.0)
    projection = read(tmp_path / "late", tiny_model_folder)
    states = torch.nn.functional.normalize(torch.randn(20, 32), dim=1)
    projected = torch.from_numpy(projection.project(states.numpy()))

    # All principal directions keep every cosine.
    torch.testing.assert_close(projected @ projected.T, states @ states.T, atol=2e-3, rtol=0)
    weights = projection.weights_of(np.arange(len(projection.weight_codes_X)))
    assert len(np.unique(weights.round(3))) > 3


def test_train_late_nothing_held_out_keeps_the_last_step(run: Any):
    report = run(steps=3, hold_out=0.0)

    assert (report.best_step, report.best_score, report.teacher_score) == (3, None, None)


def test_train_late_more_dims_than_the_model_has_are_refused(run: Any):
    with pytest.raises(ConfigError, match="dims must be at most the base model's 32, got 64"):
        run(dims=64)


@pytest.mark.parametrize(
    "settings", [{"steps": 0}, {"batch_queries": 1}, {"hold_out": 1.5}, {"peak_lr": 0.0}, {"seed": -1}]
)
def test_late_config_values_out_of_range_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        LateConfig(**settings)


def test_train_late_that_cannot_begin_leaves_no_log(run: Any, tmp_path: Path):
    with pytest.raises(ConfigError, match="dims must be at most"):
        run("below/late", dims=1_000)

    assert not (tmp_path / "below").exists()
    assert run("below/late", steps=1).folder == str(tmp_path / "below/late")


def test_train_late_leaves_a_folder_that_is_a_model(run: Any, tmp_path: Path, tiny_model_folder: Path):
    run(steps=1)
    encoder = load_encoder(tmp_path / "late", precision="fp32")
    base = load_encoder(tiny_model_folder, precision="fp32")

    np.testing.assert_array_equal(encoder.encode_documents(["the cat"]), base.encode_documents(["the cat"]))
    config = EncoderConfig(model=str(tmp_path / "late"))
    assert token_projection_of(config, load_backbone(config)) is not None
    encoder.save(tmp_path / "saved")
    saved = EncoderConfig(model=str(tmp_path / "saved"))
    assert token_projection_of(saved, load_backbone(saved)) is not None
