"""Two-stage checkpoints against a reference written from the published facts.

One row at a time, around transformers' own backbones, with nothing of ours.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.cde import read_cde
from cairn.pipeline.model.engine.packed import Packed
from cairn.pipeline.model.engine.pattern import Rectangle
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from safetensors.torch import load_file, save_file

from tests.cde_checkpoints import BACKBONE_FILES, RandomWeights, cde_tensors
from tests.model.published import NOMIC_NAMES, nomic_config, transformers_model
from tests.tiny_models import Size

DIM, CONTEXT, SOFT = 32, 6, 8
IDS = [[2, 7, 9, 30, 31, 12, 3], [2, 8, 3], [2, *range(5, 42), 40, 3]]
VERSIONS = pytest.mark.parametrize("version", [1, 2])


class Reference:
    """The published forward pass over the tensors of the file."""

    def __init__(self, folder: Path, version: int, temperature: float = 1.0) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())
        self.version = version
        backbone = json.loads((folder / BACKBONE_FILES[version]).read_text())
        self.first, self.second = (
            self.transformer(prefix, backbone, temperature)
            for prefix in ("first_stage_model.embedder.", "second_stage_model.backbone.")
        )

    def transformer(self, prefix: str, config: dict[str, Any], temperature: float) -> Any:
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }
        for name in [name for name in tensors if name.endswith("attn.Wqkv.weight")]:
            tensors[name][:DIM] /= temperature  # the rows that make queries
            if self.version == 1:
                for part, rows in zip("qkv", tensors.pop(name).chunk(3), strict=True):
                    tensors[name.replace("attn.Wqkv", f"self_attn.{part}_proj")] = rows
        if self.version == 1:
            config = nomic_config({"layer_norm_epsilon": 1e-12, "type_vocab_size": 2} | config)
            for theirs, native in NOMIC_NAMES.items():
                tensors = {name.replace(theirs, native): tensor for name, tensor in tensors.items()}
        return transformers_model({"pad_token_id": 0} | config, tensors)

    @torch.inference_mode()
    def first_stage(self, ids: list[int]) -> torch.Tensor:
        states_TD = self.first(input_ids=torch.tensor([ids])).last_hidden_state[0]
        return self.head("first_stage_model.mlp", states_TD.mean(0), F.gelu)

    @torch.inference_mode()
    def second_stage(self, ids: list[int], context: list[torch.Tensor]) -> torch.Tensor:
        soft = self.head("second_stage_model.prompt_projection", torch.ones(DIM), F.relu).view(SOFT, DIM)
        lead = torch.cat([torch.stack(context), soft]) if context else soft
        # The text has passed the embedding layer when it joins the lead, and passes it a second time with it.
        text, embeddings = self.second.get_input_embeddings()(torch.tensor(ids)), self.second.embeddings
        if self.version == 1:
            text = text + embeddings.token_type_embeddings.weight[0]
        else:
            text = embeddings.norm(text)
        positions = self.positions(len(context), len(lead) + len(text))
        embeds = torch.cat([lead, text])[None]
        states = self.second(inputs_embeds=embeds, position_ids=torch.tensor([positions]))
        mean = states.last_hidden_state[0, len(lead) :].mean(0)
        return self.head("second_stage_model.output_projection", mean, F.relu)

    def positions(self, num_context: int, length: int) -> list[int]:
        """Return where the vectors of a row stand; at position 0 nothing is rotated."""
        if self.version == 1 and self.config["disable_transductive_rotary_embedding"]:
            start = self.config["transductive_corpus_size"]
            return [0] * num_context + list(range(start, start + length - num_context))
        return list(range(length))

    def head(
        self, name: str, x: torch.Tensor, activate: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        first, second = (self.tensors[f"{name}.{number}.weight"] for number in (0, 2))
        return second @ activate(first @ x + self.tensors[f"{name}.0.bias"]) + self.tensors[f"{name}.2.bias"]


def load(folder: Path, **settings: Any):
    config = EncoderConfig(model=str(folder), precision="fp32", **settings)
    return load_backbone(config, torch.device("cpu"))


def context_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


def embed(
    backbone: Any, rows: list[list[int]], context: np.ndarray | None, temperature: float = 1.0
) -> list[torch.Tensor]:
    """Embed rows of ids in one padded batch: mean over each row, then what the checkpoint has behind it.

    Not normalised.
    """
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    states = backbone.hidden_states(ids, np.array([len(row) for row in rows]), context, temperature)
    return [
        backbone.project(states[index, : len(row)].float().mean(0, keepdim=True))[0]
        for index, row in enumerate(rows)
    ]


def require_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-5, rtol=1e-5)


CASES: dict[str, tuple[dict[str, Any], int, float]] = {
    "whole context": ({}, CONTEXT, 1.0),
    "part of a context": ({}, 2, 1.0),
    "one document": ({}, 1, 1.0),
    "soft prompts alone": ({}, 0, 1.0),
    "temperature": ({}, CONTEXT, 0.7),
    "placed context": ({"disable_transductive_rotary_embedding": False}, CONTEXT, 1.0),
}


@VERSIONS
@pytest.mark.parametrize(("settings", "num_context", "temperature"), CASES.values(), ids=CASES)
def test_both_stages_equal_the_reference_in_padded_and_in_packed_rows(
    version, settings, num_context, temperature, make_cde
):
    folder, context = make_cde(version, **settings), context_of(num_context)
    backbone, reference = load(folder), Reference(folder, version, temperature)
    assert backbone.embedding_dim == backbone.first_stage.embedding_dim == DIM
    first = [reference.first_stage(ids) for ids in IDS]
    second = [reference.second_stage(ids, list(torch.from_numpy(context))) for ids in IDS]
    for pattern_type in (Rectangle, Packed):
        backbone._backbone.pattern_type = backbone.first_stage._backbone.pattern_type = pattern_type
        require_close(embed(backbone.first_stage, IDS, None, temperature), first)
        require_close(embed(backbone, IDS, context if num_context else None, temperature), second)


@VERSIONS
def test_num_layers_cuts_the_second_stage_alone(version, make_cde):
    folder, context = make_cde(version), context_of(CONTEXT)
    reference = Reference(folder, version)
    cut = load(folder, layers=1)
    require_close(embed(cut.first_stage, IDS, None), [reference.first_stage(ids) for ids in IDS])
    reference.second.layers = reference.second.layers[:1]
    reference.second.config.num_hidden_layers = 1
    require_close(
        embed(cut, IDS, context),
        [reference.second_stage(ids, list(torch.from_numpy(context))) for ids in IDS],
    )
    assert cut.first_stage.weights_fingerprint == load(folder).first_stage.weights_fingerprint
    assert cut.weights_fingerprint != load(folder).weights_fingerprint


@VERSIONS
def test_max_positions_is_the_published_length_of_a_text(version, make_cde):
    assert load(make_cde(version)).max_positions == 40
    assert load(make_cde(version, max_seq_length=4096)).max_positions == 96 - CONTEXT - SOFT


@VERSIONS
def test_row_or_context_that_is_longer_than_the_model_reads_is_refused(version, make_cde):
    backbone = load(make_cde(version))
    with pytest.raises(ModelError, match="at most 40 tokens, got 41"):
        backbone.hidden_states(np.full((1, 41), 7), np.array([41]), None)
    with pytest.raises(ConfigError, match=r"at most 6 rows of 32 numbers, got shape \(7, 32\)"):
        backbone.hidden_states(np.array([IDS[0]]), np.array([7]), context_of(7))


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


def changed(folder: Path, tmp_path: Path, tensors: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Copy a checkpoint with other tensors and settings, left out where they are None."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text()) | settings
    left_out = {name for name, value in settings.items() if value is None}
    (copy / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if name not in left_out})
    )
    if tensors:
        stored = load_file(copy / "model.safetensors") | tensors
        save_file(
            {name: each for name, each in stored.items() if each is not None}, copy / "model.safetensors"
        )
    return copy


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
    with pytest.raises(ModelError, match=sentence):
        load(changed(make_cde(version), tmp_path, {name: tensor}))


@VERSIONS
@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "first_stage_model.embedder.pooler.dense.weight",
        "first_stage_model.mlp.4.weight",
        "second_stage_model.backbone.pooler.dense.weight",
        "second_stage_model.sequence_dropout_null_embedding",
    ],
)
def test_surplus_tensor_is_refused_by_name(version, name, make_cde, tmp_path):
    folder = changed(make_cde(version), tmp_path, {name: torch.zeros(32)})
    with pytest.raises(
        ModelError, match=rf"and no others, got {name}; the file does not fit its config\.json$"
    ):
        load(folder)


@VERSIONS
@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("autoregressive_backbone", True, "must be False, got True"),
        ("limit_layers", 1, "must be None, got 1"),
        ("transductive_sequence_dropout_prob", 0.005, "must be 0.0, got 0.005"),
        ("transductive_tokens_per_document", 2, "must be 1, got 2"),
        ("pooling_strategy", "last_token", "must be 'mean', got 'last_token'"),
        ("pool_ignore_contextual_tokens", False, "must be True, got False"),
        ("embedder", None, "must name the model its backbone is made like, got None"),
        ("embedder", "gpt2", "one of nomic-bert-2048, ModernBERT-base, or .* beside the weights, got 'gpt2'"),
        ("transductive_corpus_size", None, "as a positive number, got None"),
        ("transductive_corpus_size", 90, "more positions than the 98 vectors before a text, got 96"),
    ],
)
def test_setting_that_is_not_read_is_refused(version, name, value, sentence, make_cde, tmp_path):
    with pytest.raises(ModelError, match=sentence) as caught:
        load(changed(make_cde(version), tmp_path, **{name: value}))
    assert name in str(caught.value) or value in ("gpt2", 90)


@pytest.mark.parametrize(("version", "num_parameters"), [(1, 281_140_992), (2, 305_706_240)])
def test_published_sizes_are_read_without_a_configuration_of_the_backbone(
    version, num_parameters, make_cde, monkeypatch
):
    """Both published files, tensor by tensor in shape, without memory.

    V2's number of parameters is the one its authors give.
    """
    folder = make_cde(version, transductive_corpus_size=512, max_seq_length=512)
    (folder / BACKBONE_FILES[version]).unlink()
    monkeypatch.setattr(RandomWeights, "_random", lambda _, *shape: torch.empty(shape, device="meta"))
    inner, num_layers, vocab_size = (3072, 12, 30528) if version == 1 else (1152, 22, 50368)
    size = Size(width=768, inner=inner)
    tensors = cde_tensors(version, size, num_layers, vocab_size, 0)
    assert sum(tensor.numel() for tensor in tensors.values()) == num_parameters
    backbone = read_cde(
        replace(read_checkpoint(folder), tensors=tensors), dtype=torch.float32, device=torch.device("meta")
    )
    assert {backbone.model_dim, backbone.context_dim, backbone.embedding_dim} == {768}
    assert backbone.max_positions == 512


@VERSIONS
def test_configuration_of_the_backbone_says_its_layers_and_must_be_one(version, make_cde, tmp_path):
    folder = changed(make_cde(version), tmp_path)
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
    folder = make_cde(version)
    theta = "rotary_emb_base" if version == 1 else "global_rope_theta"
    backbone_config = json.loads((folder / BACKBONE_FILES[version]).read_text()) | {theta: 500}
    loaded = [
        load(folder),
        load(changed(folder, tmp_path / "1", {"first_stage_model.mlp.0.bias": torch.ones(32)})),
        load(
            changed(folder, tmp_path / "2", {"second_stage_model.output_projection.0.bias": torch.ones(32)})
        ),
    ]
    (folder / BACKBONE_FILES[version]).write_text(json.dumps(backbone_config))
    loaded.append(load(folder))
    for stages in (loaded, [each.first_stage for each in loaded]):
        assert len({stage.weights_fingerprint for stage in stages}) == 4


def least_cosine(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return float(torch.cosine_similarity(torch.stack(found).cpu(), torch.stack(expected), dim=1).min())


@pytest.mark.gpu
@VERSIONS
@pytest.mark.parametrize("num_context", [0, CONTEXT])
def test_both_stages_on_a_gpu_agree_with_the_cpu(version, num_context, make_cde):
    folder, context = make_cde(version), context_of(num_context) if num_context else None
    for precision, least in (("bf16", 0.999), ("fp32", 0.99999)):
        rounded = load_backbone(EncoderConfig(model=str(folder), precision=precision), torch.device("cuda"))
        assert least_cosine(embed(rounded, IDS, context), embed(load(folder), IDS, context)) >= least
        assert (
            least_cosine(embed(rounded.first_stage, IDS, None), embed(load(folder).first_stage, IDS, None))
            >= least
        )
