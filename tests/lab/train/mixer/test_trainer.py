from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.train import mixer as mixer_trainer
from cairn.pipeline.lab.train.mixer import MixerReport, train_mixer
from cairn.pipeline.lab.train.settings import MixerConfig
from cairn.pipeline.lab.train.trainer import read_log
from safetensors.torch import load_file, save_file

SETTINGS: dict[str, Any] = {
    "steps": 80,
    "num_heads": 2,
    "head_dim": 8,
    "batch_queries": 32,
    "context_documents": 40,
    "peak_lr": 2e-2,
    "warmup_steps": 10,
    "rotation_steps": 20,
    "rotation_lr": 1e-2,
    "evaluate_every": 40,
    "hold_out": 0.25,
    "min_pairs": 4,
}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(world: Any, name: str = "mixer", **changed: Any) -> MixerReport:
    places = {key: changed.pop(key) for key in ("judged", "base", "cache") if key in changed}
    options = {"base": world.model, "cache": world.cache, "precision": "fp32", **places}
    return train_mixer(
        [world.file], world.file.parent / name, MixerConfig(**{**SETTINGS, **changed}), **options
    )


@pytest.mark.parametrize(
    ("clue", "settings"),
    [("title", {}), ("opening", {"grouped_share": 0.0, "title_absence": 1.0})],
    ids=["title", "rest of the document"],
)
def test_train_mixer_learns_what_a_section_does_not_say_by_itself(
    make_paged_world: Callable[..., Any], clue: str, settings: dict[str, Any]
):
    world = make_paged_world(clue=clue)
    report = run(world, **settings)
    records = read_log(world.file.parent / "mixer.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 80
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    scored = {record["step"]: record for record in records if "heldout_hit" in record}
    assert list(scored) == [0, 40, 80]
    assert scored[report.best_step]["heldout_hit"] > scored[0]["heldout_hit"] + 0.2
    assert report.best_score == max(record["heldout_score"] for record in scored.values())
    assert report.base_score == scored[0]["heldout_score"]


def test_train_mixer_leaves_a_folder_that_gives_titles_to_landmarks(make_paged_world: Callable[..., Any]):
    world = make_paged_world()
    run(world, steps=10, rotation_steps=5)
    folder = world.file.parent / "mixer"
    assert {path.name for path in folder.iterdir()} == {"cairn_config.json", "cairn_extra.safetensors"}
    config = json.loads((folder / "cairn_config.json").read_text())
    assert config["base"]["model"] == world.model
    assert (config["encoder"]["use_context"], config["encoder"]["landmark_interval"]) == (True, 64)
    tensors = load_file(folder / "cairn_extra.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    rotation_DD = tensors["landmark_mixer.turn"]
    assert torch.allclose(rotation_DD @ rotation_DD.T, torch.eye(32), atol=1e-5)
    encoder = load_encoder(folder, use_context=False, precision="fp32")
    plain, titled = (
        encoder.encode_documents(["the old stone on the path"], titles=[title]) for title in (None, "river")
    )
    assert not np.allclose(plain, titled, atol=1e-3)


def test_train_mixer_again_embeds_nothing_and_gives_the_same_tensors(
    make_paged_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    world = make_paged_world()
    shutil.rmtree(world.cache)
    settings = {"steps": 3, "rotation_steps": 2}
    run(world, "first", **settings)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("embedded again")

    monkeypatch.setattr(DocumentEncoder, "encode", refuse)
    monkeypatch.setattr(DocumentEncoder, "encode_queries", refuse)
    run(world, "second", **settings)
    run(world, "other", **settings, seed=1)
    first, second, other = (
        load_file(tmp_path / name / "cairn_extra.safetensors") for name in ("first", "second", "other")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["landmark_mixer.title_gate"], other["landmark_mixer.title_gate"])


def test_train_mixer_keeps_judged_texts_out(make_paged_world: Callable[..., Any], tmp_path: Path):
    world = make_paged_world()
    judged = tmp_path / "judged"
    judged.mkdir()
    pq.write_table(pa.table({"text": ["d 0 1", "d 0 2"]}), judged / "corpus.parquet")
    pq.write_table(pa.table({"text": ["q 3 4"]}), judged / "queries.parquet")
    report = run(world, steps=1, rotation_steps=0, judged=(judged,))
    assert report.pairs == 93
    assert report.skipped == {"query of an evaluation set": 1, "document of an evaluation set": 2}


def test_train_mixer_with_nothing_held_out_keeps_the_last_step(make_paged_world: Callable[..., Any]):
    report = run(make_paged_world(), steps=3, rotation_steps=1, hold_out=0.0)
    assert (report.best_step, report.best_score, report.base_score, report.cut_scores) == (3, None, None, {})


def test_train_mixer_without_context_saves_settings_without_one(
    make_paged_world: Callable[..., Any], tmp_path: Path
):
    run(make_paged_world(), steps=2, rotation_steps=0, context_documents=0)
    assert (
        json.loads((tmp_path / "mixer" / "cairn_config.json").read_text())["encoder"]["use_context"] is False
    )


def test_train_mixer_loss_that_is_not_finite_stops_and_writes_no_model(
    make_paged_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    world = make_paged_world()
    real = mixer_trainer.mixing_loss

    def broken(*arguments: Any) -> Any:
        loss, terms = real(*arguments)
        return loss * float("nan"), terms

    monkeypatch.setattr(mixer_trainer, "mixing_loss", broken)
    with pytest.raises(
        ModelError,
        match="loss and gradient must be finite, got nan and nan in step 1, before anything",
    ):
        run(world)
    assert not (tmp_path / "mixer").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_train_mixer_output_that_is_taken_is_refused_before_anything_is_read(tmp_path: Path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ConfigError, match="must be new or empty"):
        train_mixer([tmp_path / "absent"], tmp_path / "taken", MixerConfig(), base="absent")


def test_train_mixer_sources_that_are_too_small_are_counted_and_none_left_is_refused(
    make_paged_world: Callable[..., Any],
):
    world = make_paged_world()
    with world.file.open("a") as stream:
        stream.write(json.dumps({"query": "q", "document": "d", "title": "", "source": "small"}) + "\n")
    report = run(world, steps=1, rotation_steps=0)
    assert (report.sources, report.skipped) == (1, {"pair of a source too small": 1})
    with pytest.raises(
        SourceError,
        match="at least min_pairs 97 pairs with two documents, got none: the largest, 's', has 96",
    ):
        run(world, "other", min_pairs=97)


def test_train_mixer_base_with_a_mixer_is_refused(make_paged_world: Callable[..., Any], tmp_path: Path):
    world = make_paged_world()
    run(world, steps=1, rotation_steps=0)
    with pytest.raises(ConfigError, match="one transformer that has no mixer yet"):
        run(world, "other", base=str(tmp_path / "mixer"))


def test_train_mixer_for_a_base_with_tensors_of_ours_keeps_them(
    make_paged_world: Callable[..., Any], tiny_latent_folder: Path, tmp_path: Path
):
    base = shutil.copytree(tiny_latent_folder, tmp_path / "base")
    (base / "cairn_config.json").write_text(json.dumps({"format": 1, "encoder": {"pooling": "latent"}}))
    run(make_paged_world(), steps=2, rotation_steps=0, base=str(base), cache=None)
    written = load_file(tmp_path / "mixer" / "cairn_extra.safetensors")
    own = load_file(base / "cairn_extra.safetensors")
    assert own
    assert all(torch.equal(written[name], tensor) for name, tensor in own.items())
    encoder = load_encoder(tmp_path / "mixer", use_context=False)
    assert encoder.config.pooling == "latent"
    assert encoder.encode_documents(["the cat sat on the mat"]).shape == (1, 32)


def test_train_mixer_folder_with_other_weights_under_its_base_is_refused(
    make_paged_world: Callable[..., Any], tiny_model_folder: Path, tmp_path: Path
):
    base = shutil.copytree(tiny_model_folder, tmp_path / "base")
    world = make_paged_world()
    run(world, steps=1, rotation_steps=0, base=str(base))
    assert load_encoder(tmp_path / "mixer", use_context=False).vector_dim == 32
    tensors = load_file(base / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, base / "model.safetensors")
    with pytest.raises(ModelError, match="restore those, or train it for these"):
        load_encoder(tmp_path / "mixer", use_context=False)


def test_train_mixer_rotation_dims_beyond_the_width_are_refused(make_paged_world: Callable[..., Any]):
    with pytest.raises(
        ConfigError, match="rotation_dims must be different numbers below the base model's 32, got \\[64\\]"
    ):
        run(make_paged_world(), rotation_dims=(64,))
