from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.cde import read_cde
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from safetensors.torch import load_file, save_file

from tests.cde_checkpoints import BACKBONE_FILES, RandomWeights, cde_tensors
from tests.model.cde_reference import VERSIONS
from tests.tiny_models import Size

ONE_OF_EACH_PART = {
    1: (
        "first_stage_model.embedder.encoder.layers.1.mlp.fc12.weight",
        "first_stage_model.mlp.2.bias",
        "second_stage_model.backbone.emb_ln.bias",
        "second_stage_model.prompt_projection.0.weight",
        "second_stage_model.output_projection.2.weight",
    ),
    2: (
        "first_stage_model.embedder.layers.3.attn.Wo.weight",
        "first_stage_model.mlp.0.weight",
        "second_stage_model.backbone.final_norm.weight",
        "second_stage_model.prompt_projection.2.bias",
        "second_stage_model.output_projection.0.weight",
    ),
}


def load(folder: Path, **settings: Any):
    return load_backbone(EncoderConfig(model=str(folder), precision="fp32", **settings))


def copied(folder: Path, tmp_path: Path) -> Path:
    """Copy a checkpoint, to be damaged."""
    return shutil.copytree(folder, tmp_path / "copy")


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | {
        name: value for name, value in changes.items() if value is not None
    }
    save_file(
        {name: value for name, value in tensors.items() if changes.get(name, value) is not None},
        folder / "model.safetensors",
    )


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value != "absent"})
    )


@pytest.mark.parametrize(
    ("version", "name"), [(version, name) for version, names in ONE_OF_EACH_PART.items() for name in names]
)
@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (None, r"must hold (one )?\S+, got (none|0); the file does not fit its config\.json$"),
        (torch.zeros(7, 5), r"have the shape \(.*\), got \(7, 5\); the file does not fit its config\.json$"),
    ],
    ids=["missing", "of another shape"],
)
def test_tensor_that_does_not_fit_is_refused_in_one_sentence(
    version, name, tensor, sentence, make_cde, tmp_path
):
    folder = copied(make_cde(version), tmp_path)
    change_tensors(folder, **{name: tensor})
    with pytest.raises(ModelError, match=sentence):
        load(folder)


@VERSIONS
@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "first_stage_model.embedder.pooler.dense.weight",
        "first_stage_model.mlp.4.weight",
        "second_stage_model.sequence_dropout_null_embedding",
    ],
)
def test_surplus_tensor_is_refused_by_name(version, name, make_cde, tmp_path):
    folder = copied(make_cde(version), tmp_path)
    change_tensors(folder, **{name: torch.zeros(32)})
    with pytest.raises(
        ModelError, match=rf"and no others, got {name}; the file does not fit its config\.json$"
    ):
        load(folder)


@VERSIONS
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"autoregressive_backbone": True}, "autoregressive_backbone of a CDE model must be False, got True"),
        ({"limit_layers": 1}, "limit_layers of a CDE model must be None, got 1"),
        (
            {"transductive_sequence_dropout_prob": 0.005},
            "transductive_sequence_dropout_prob of a CDE model must be 0.0, got 0.005",
        ),
        (
            {"transductive_tokens_per_document": 2},
            "transductive_tokens_per_document of a CDE model must be 1, got 2",
        ),
        (
            {"pooling_strategy": "last_token"},
            "pooling_strategy of a CDE model must be 'mean', got 'last_token'",
        ),
        (
            {"embedder": "absent"},
            "embedder of a CDE model must name the model its backbone is made like, got None",
        ),
        (
            {"embedder": "gpt2"},
            (
                "must be one of nomic-bert-2048, ModernBERT-base, or have its configuration beside the "
                "weights, got 'gpt2'"
            ),
        ),
        (
            {"transductive_corpus_size": "absent"},
            "must give transductive_corpus_size as a positive number, got None",
        ),
        (
            {"transductive_corpus_size": 90},
            "must have more positions than the 98 vectors before a text, got 96",
        ),
        (
            {"pool_ignore_contextual_tokens": False},
            "pool_ignore_contextual_tokens of a CDE model must be True",
        ),
    ],
)
def test_setting_that_is_not_read_is_refused(version, changes, sentence, make_cde, tmp_path):
    folder = copied(make_cde(version), tmp_path)
    change_config(folder, **changes)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("version", "num_parameters"), [(1, 281_140_992), (2, 305_706_240)])
def test_published_sizes_are_read_without_a_configuration_of_the_backbone(
    version, num_parameters, make_cde, tmp_path, monkeypatch
):
    """Both published files, tensor by tensor in shape, without memory.

    V2's number of parameters is the one its authors give.
    """
    folder = copied(make_cde(version, transductive_corpus_size=512, max_seq_length=512), tmp_path)
    (folder / BACKBONE_FILES[version]).unlink()
    monkeypatch.setattr(RandomWeights, "_random", lambda _, *shape: torch.empty(shape, device="meta"))
    inner, num_layers, vocab_size = (3072, 12, 30528) if version == 1 else (1152, 22, 50368)
    size = Size(width=768, inner=inner)
    tensors = cde_tensors(version, size, num_layers, vocab_size, 0)
    assert sum(tensor.numel() for tensor in tensors.values()) == num_parameters
    backbone = read_cde(
        replace(read_checkpoint(folder), tensors=tensors), dtype=torch.float32, device=torch.device("meta")
    )
    assert (backbone.model_dim, backbone.context_dim, backbone.embedding_dim, backbone.max_positions) == (
        768,
        768,
        768,
        512,
    )


@VERSIONS
def test_configuration_of_the_backbone_says_its_layers_and_must_be_one(version, make_cde, tmp_path):
    folder = copied(make_cde(version), tmp_path)
    path, setting = folder / BACKBONE_FILES[version], "n_layer" if version == 1 else "num_hidden_layers"
    for content, sentence in (
        (json.dumps(json.loads(path.read_text()) | {setting: 1}), "and no others, got "),
        (json.dumps({"model_type": "t5"}), "must be one of modernbert, nomic_bert, got 't5' for "),
        ("not json", rf"{path.stem}\.json of the model must "),
        ("[1]", rf"{path.stem}\.json of the model must "),
    ):
        path.write_text(content)
        with pytest.raises(ModelError, match=sentence):
            load(folder)


@VERSIONS
def test_fingerprints_of_both_stages_cover_all_weights_and_the_configuration(version, make_cde, tmp_path):
    folder = copied(make_cde(version), tmp_path)
    fingerprints = [load(folder)]
    for stage in ("first_stage_model.mlp.0.bias", "second_stage_model.output_projection.0.bias"):
        change_tensors(folder, **{stage: torch.ones(32)})
        fingerprints.append(load(folder))
    path = folder / BACKBONE_FILES[version]
    theta = "rotary_emb_base" if version == 1 else "global_rope_theta"
    path.write_text(json.dumps(json.loads(path.read_text()) | {theta: 500}))
    fingerprints.append(load(folder))
    assert len({each.weights_fingerprint for each in fingerprints}) == 4
    assert len({each.first_stage.weights_fingerprint for each in fingerprints}) == 4
