"""A first stage of its own starts as the base, is trained apart, and is saved and served with the model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.errors import ConfigError, FingerprintMismatchError, ModelError
from cairn.pipeline.lab.train.adapters import add_low_rank, low_rank_parameters
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.mixer_data import unit
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.folders.checkpoint import EXTRA_NAME, read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.first_layers import first_layers
from cairn.pipeline.model.folders.own_tensors import FIRST_STAGE
from safetensors.torch import load_file, save_file

from tests.lab.train.test_loop_resumed import KilledError, dying_after

TEXTS = ["the cat sat on the old stone path by a river", "walking on a mat", "a mountain way"]
CONTEXT = ContextConfig(max_document_tokens=48)


def rows_of(model_folder: Path) -> PackedRows:
    """Lay the texts out as context documents are, a row each."""
    checkpoint = read_checkpoint(model_folder)
    encoded = [checkpoint.tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    ids = [[checkpoint.cls_id, *row, checkpoint.landmark_id] for row in encoded]
    lengths = np.array([len(row) for row in ids])
    return PackedRows(
        ids_N=np.concatenate([np.array(row, np.int32) for row in ids]),
        lengths_B=lengths,
        windows_B=np.arange(len(ids)),
        pooled_start_B=np.zeros(len(ids), np.int64),
        pooled_end_B=lengths,
    )


def first_stage(folder: Path, **settings: Any) -> ContextEncoder:
    """Return the first stage as an ingest runs it."""
    config = EncoderConfig(model=str(folder), precision="fp32", **settings)
    return ContextEncoder.of(load_backbone(config), config, CONTEXT)


def embedded(folder: Path, **settings: Any) -> np.ndarray:
    return first_stage(folder, **settings).embed(TEXTS)


def apart(model: LandmarkEncoder) -> LandmarkEncoder:
    """Move the first stage's parameters, as training would."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(FIRST_STAGE):
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def saved(model: LandmarkEncoder, base: Path, folder: Path) -> Path:
    checkpoint = read_checkpoint(base)
    tensors = {**checkpoint.tensors, **model.published_tensors()}
    save_encoder_folder(folder, replace(checkpoint, tensors=tensors), EncoderConfig(attention="landmark"))
    return folder


@pytest.mark.parametrize("base", ["tiny_model_folder", "tiny_roberta_folder"])
@pytest.mark.parametrize("shares_embeddings", [False, True])
def test_first_stage_starts_as_the_base_and_is_served_as_it_was_trained(
    base: str, shares_embeddings: bool, request: pytest.FixtureRequest, tmp_path: Path
):
    folder: Path = request.getfixturevalue(base)
    model = LandmarkEncoder(
        read_checkpoint(folder), first_stage_layers=2, shares_embeddings=shares_embeddings
    ).requires_grad_(False)
    rows = rows_of(folder)
    assert torch.equal(model.embed_documents(rows), model.read_alone(rows)[0])
    apart(model)
    own, second = model.embed_documents(rows).numpy(), model.read_alone(rows)[0].numpy()
    assert np.abs(own - second).max() > 0.1
    served = saved(model, folder, tmp_path / "saved")
    names = [name for name in load_file(served / EXTRA_NAME) if name.startswith(FIRST_STAGE)]
    assert any("word_embeddings" in name for name in names) != shares_embeddings
    np.testing.assert_allclose(embedded(served), own, atol=1e-4)
    np.testing.assert_allclose(embedded(folder), second, atol=1e-4)
    again = LandmarkEncoder(read_checkpoint(served)).requires_grad_(False)
    assert torch.equal(again.embed_documents(rows), model.embed_documents(rows))


def test_first_stage_of_fewer_layers_is_the_base_s_first_ones_and_layers_cut_the_second_alone(
    tiny_model_folder: Path, tmp_path: Path
):
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder), first_stage_layers=1)
    served = saved(model, tiny_model_folder, tmp_path / "saved")
    np.testing.assert_allclose(embedded(served), embedded(tiny_model_folder, layers=1), atol=1e-5)
    np.testing.assert_array_equal(embedded(served, layers=1), embedded(served))


def test_first_layers_keep_the_kinds_of_a_first_stage_with_more_layers(tiny_model_folder: Path):
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder), first_stage_layers=2)
    base = read_checkpoint(tiny_model_folder)
    checkpoint = replace(
        base,
        config={**base.config, "layer_types": ["full_attention", "sliding_attention"]},
        tensors={**base.tensors, **model.published_tensors()},
    )
    kinds = first_layers(checkpoint, 1).config["layer_types"]
    assert kinds == ["full_attention", "sliding_attention"]
    assert first_layers(replace(checkpoint, tensors=base.tensors), 1).config["layer_types"] == kinds[:1]


def test_first_stage_is_part_of_fingerprints(tiny_model_folder: Path, tmp_path: Path):
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder), first_stage_layers=2)
    one = saved(model, tiny_model_folder, tmp_path / "one")
    other = saved(apart(model), tiny_model_folder, tmp_path / "other")
    assert first_stage(one).fingerprint != first_stage(other).fingerprint
    second = [load_backbone(EncoderConfig(model=str(folder))).weights_fingerprint for folder in (one, other)]
    assert second[0] != second[1]


def test_train_first_stage_learns_apart_and_a_resumed_run_ends_bit_for_bit(run: Any, tmp_path: Path):
    settings = {"first_stage_layers": 1, "heldout_pairs": 0, "steps": 4}
    run("straight", **settings)
    with pytest.raises(KilledError):
        run("killed", dying_after(3), **settings)
    assert run("killed", **settings).resumed_at == 2
    straight, killed = (load_file(tmp_path / name / "model" / EXTRA_NAME) for name in ("straight", "killed"))
    assert all(torch.equal(tensor, killed[name]) for name, tensor in straight.items())
    second = load_file(tmp_path / "straight" / "model" / "model.safetensors")
    own = [name for name in straight if name.startswith(FIRST_STAGE) and name.endswith("query.weight")]
    assert len(own) == 1
    assert not torch.equal(straight[own[0]], second[own[0].removeprefix(FIRST_STAGE)])
    with pytest.raises(FingerprintMismatchError, match="first_stage_layers 1"):
        run("straight", **{**settings, "first_stage_layers": 2})


def test_train_changes_with_frozen_embeddings_hold_the_first_stage_and_make_the_trained_model(
    run: Any, tmp_path: Path, tiny_model_folder: Path
):
    run(first_stage_layers=2, freeze_embeddings=True, steps=2, heldout_pairs=0)
    overlaid = shutil.copytree(tiny_model_folder, tmp_path / "overlaid")
    shutil.copy(tmp_path / "run" / "changes.safetensors", overlaid / EXTRA_NAME)
    assert not any("embeddings" in name for name in load_file(overlaid / EXTRA_NAME))
    trained, changed, base = (
        unit(embedded(folder)) for folder in (tmp_path / "run" / "model", overlaid, tiny_model_folder)
    )
    moved, rounded = (1 - (trained * other).sum(1).min() for other in (base, changed))
    assert rounded < 0.1 * moved  # apart by the rounding to bf16


def test_train_low_rank_gives_the_first_stage_updates_of_its_own(
    run: Any, tmp_path: Path, tiny_model_folder: Path
):
    run(first_stage_layers=1, lora_rank=2, lora_matrices="attention", steps=2, heldout_pairs=0)
    stored = load_file(tmp_path / "run" / "model" / EXTRA_NAME)
    base = load_file(tiny_model_folder / "model.safetensors")
    own = {name.removeprefix(FIRST_STAGE): stored[name] for name in stored if name.startswith(FIRST_STAGE)}
    changed = {name for name, tensor in own.items() if not torch.equal(tensor, base[name])}
    assert changed == {name for name in own if ".attention." in name and base[name].ndim == 2}
    assert len(changed) == 4
    for name in changed:
        assert torch.linalg.matrix_rank(own[name] - base[name], atol=1e-5) <= 2


def test_low_rank_updates_stand_in_both_stages(tiny_model_folder: Path):
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder), first_stage_layers=1, shares_embeddings=True)
    add_low_rank(model, TrainConfig(steps=1, lora_rank=2))
    updates = low_rank_parameters(model)
    assert len({name for name in updates if name.startswith(FIRST_STAGE)}) == len(updates) / 3
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    assert any(name.startswith(FIRST_STAGE) for name in frozen)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"first_stage_layers": 3}, "must be at most the base model's 2, got 3"),
        ({"first_stage_layers": 1, "context_documents": 0}, "must go with a context that is read"),
        ({"first_stage_layers": 1, "attention": "chunk"}, "must go with a context that is read"),
    ],
    ids=["layers", "context", "attention"],
)
def test_train_first_stage_that_cannot_be_is_refused(run: Any, settings: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        run(**settings)


def test_first_stage_of_a_base_goes_on_and_cannot_change_its_size(tiny_model_folder: Path, tmp_path: Path):
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder), first_stage_layers=1)
    checkpoint = read_checkpoint(saved(model, tiny_model_folder, tmp_path / "saved"))
    assert LandmarkEncoder(checkpoint, first_stage_layers=1).published_tensors().keys() == (
        model.published_tensors().keys()
    )
    with pytest.raises(ConfigError, match="must be the 1 of the base's own first stage, got 2"):
        LandmarkEncoder(checkpoint, first_stage_layers=2)


@pytest.mark.parametrize("lost", ["layer", "tensor"])
def test_first_stage_that_is_not_whole_is_refused(tiny_model_folder: Path, tmp_path: Path, lost: str):
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder), first_stage_layers=1)
    folder = saved(model, tiny_model_folder, tmp_path / "saved")
    tensors = load_file(folder / EXTRA_NAME)
    part = ".layer.0." if lost == "layer" else ".layer.0.attention.self.key.weight"
    save_file({name: each for name, each in tensors.items() if part not in name}, folder / EXTRA_NAME)
    with pytest.raises(ModelError, match="at least one layer" if lost == "layer" else "key"):
        load_backbone(EncoderConfig(model=str(folder)))
