from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import (
    ConfigError,
    FingerprintMismatchError,
    ModelError,
    SourceError,
)
from cairn.pipeline.lab.train.pretrain import pretrain
from cairn.pipeline.lab.train.settings import PretrainConfig
from cairn.pipeline.lab.train.trainer import read_log
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.model_defaults import encoder_config
from safetensors.torch import load_file

from tests.lab.train.families import FAMILIES, SIZES


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def terms(folder: Path, name: str = "terms") -> list[dict[str, float]]:
    return [record[name] for record in read_log(folder / "log.jsonl") if name in record]


def new_config(tmp_path: Path, family: str) -> Path:
    path = tmp_path / f"{family}.json"
    path.write_text(json.dumps({"model_type": family, **SIZES, **FAMILIES[family]}))
    return path


@pytest.mark.parametrize("objective", ["mlm", "retromae"])
def test_pretrain_loss_falls_and_the_saved_folder_is_served_as_its_rows_were_read(
    run: Any, tmp_path: Path, objective: str
):
    report = run(objective=objective, steps=25, evaluate_every=25, checkpoint_every=25)
    held = [
        record["heldout_loss"]
        for record in read_log(tmp_path / "run" / "log.jsonl")
        if "heldout_loss" in record
    ]
    assert held[-1] < 0.8 * held[0]
    assert (report.best_step, report.best_loss) == (25, pytest.approx(held[-1]))
    config = encoder_config({"model": str(tmp_path / "run" / "model"), "precision": "fp32"})
    assert (config.pooling, config.attention) == ("lmk", "full")
    assert load_backbone(config).model_dim == 32
    assert not (tmp_path / "run" / "changes.safetensors").exists()


def test_pretrain_decoder_and_bias_stay_out_of_the_saved_model(
    run: Any, tmp_path: Path, tiny_model_folder: Path
):
    run(objective="retromae", steps=2)
    assert set(weights(tmp_path / "run")) == set(load_file(tiny_model_folder / "model.safetensors"))
    assert not (tmp_path / "run" / "model" / "cairn_extra.safetensors").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_pretrain_new_weights_of_any_family_are_read_by_the_engine(run: Any, tmp_path: Path, family: str):
    report = run(
        steps=2, from_config=new_config(tmp_path, family), matryoshka_layers=(1, 2), matryoshka_dims=(8, 32)
    )
    assert report.last_loss < report.first_loss + 1.0
    folder = tmp_path / "run" / "model"
    whole, first = (
        load_backbone(EncoderConfig(model=str(folder), precision="fp32", layers=layers))
        for layers in (None, 1)
    )
    ids, lengths = np.array([[2, 7, 8, 9, 3]]), np.array([5])
    vectors = [backbone.hidden_states(ids, lengths) for backbone in (whole, first)]
    assert all(bool(torch.isfinite(x).all()) for x in vectors)
    assert not torch.allclose(*vectors)
    assert json.loads((folder / "config.json").read_text())["matryoshka_dims"] == [8, 32]


@pytest.mark.parametrize("objective", ["mlm", "retromae"])
def test_pretrain_micro_batches_change_nothing_but_rounding(run: Any, tmp_path: Path, objective: str):
    for name, tokens in (("whole", 10_000), ("parts", 60)):
        run(name, objective=objective, steps=1, micro_batch_tokens=tokens, matryoshka_dims=(8, 32))
    whole, parts = terms(tmp_path / "whole")[0], terms(tmp_path / "parts")[0]
    assert parts == pytest.approx(whole, rel=1e-5)


def test_pretrain_several_processes_make_the_step_of_one(
    in_threads: Any, texts_file: Path, tiny_model_folder: Path, tmp_path: Path
):
    config = PretrainConfig(
        steps=2, batch_rows=4, max_tokens=48, precision="fp32", objective="retromae", heldout_rows=0
    )

    def start(processes: Any) -> Any:
        return pretrain(
            [texts_file],
            tmp_path / f"of {processes.size}",
            config,
            base=str(tiny_model_folder),
            processes=processes,
        )

    in_threads(2, start)
    in_threads(1, start)
    one, two = (terms(tmp_path / f"of {size}") for size in (1, 2))
    assert all(a == pytest.approx(b, rel=1e-4) for a, b in zip(one, two, strict=True))


def test_pretrain_folder_of_another_run_is_refused(run: Any, texts_file: Path):
    run(steps=1)
    with pytest.raises(FingerprintMismatchError, match="objective mlm"):
        run(steps=1, objective="retromae")
    texts_file.write_text(texts_file.read_text() + '{"text": "one more"}\n')
    with pytest.raises(FingerprintMismatchError, match="another texts"):
        run(steps=1)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_tokens": 97}, "max_tokens must be at most the model's 96 positions, got 97"),
        ({"matryoshka_layers": (1,)}, "must end with the model's last layer 2"),
        ({"matryoshka_dims": (8, 33)}, "between 1 and the base model's 32"),
    ],
)
def test_pretrain_settings_that_the_model_lacks_are_refused(
    run: Any, settings: dict[str, Any], sentence: str
):
    with pytest.raises(ConfigError, match=sentence):
        run(**settings)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "t5", "num_hidden_layers": 2}, "model_type must be one of bert"),
        ({"model_type": "bert"}, "num_hidden_layers of a new model must be a whole number"),
        ({"model_type": "bert", **SIZES, "vocab_size": 10}, "vocab_size of a new model must be at least"),
        ({"model_type": "bert", **SIZES, "hidden_size": -1}, "hidden_size as a positive number"),
    ],
)
def test_pretrain_configuration_that_no_model_has_is_refused(
    run: Any, tmp_path: Path, config: dict[str, Any], sentence: str
):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises((ModelError, ConfigError), match=sentence):
        run(from_config=path)


def test_pretrain_of_a_model_with_a_latent_attention_is_refused(run: Any, tiny_latent_folder: Path):
    with pytest.raises(ModelError, match="must start from a transformer without"):
        run(base=str(tiny_latent_folder))


def test_pretrain_without_texts_is_refused(tiny_model_folder: Path, tmp_path: Path):
    with pytest.raises(SourceError, match="must have texts, got none"):
        pretrain([], tmp_path / "run", PretrainConfig(steps=1), base=str(tiny_model_folder))
