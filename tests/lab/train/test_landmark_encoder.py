"""A first stage of its own starts as the base, is trained apart, and is saved and served with the model."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.encoder_fit import null_context
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder, add_latent_block, new_block
from cairn.pipeline.lab.train.packed_rows import alone, apart
from cairn.pipeline.lab.train.pairs import read_pairs
from cairn.pipeline.lab.train.sequences import SequenceMaker
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.folders.checkpoint import EXTRA_NAME, Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.first_layers import first_layers
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.folders.own_tensors import (
    FIRST_STAGE,
    NULL_CONTEXT,
)
from cairn.pipeline.model.folders.own_tensors import LATENT_ATTENTION as PREFIX
from cairn.pipeline.model.landmarks import Rows
from cairn.pipeline.token_vectors.projection import unit
from safetensors.torch import load_file, save_file

from tests.lab.train.conftest import FAMILIES, tiny_new
from tests.model.published import load
from tests.model.test_latent_attention import naive


def moved(model: LandmarkEncoder, prefix: str = "") -> LandmarkEncoder:
    """Move the parameters of a prefix a little, as training would."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(prefix):
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def rows_of(lengths: list[int], seed: int = 0) -> Rows:
    ids = np.random.default_rng(seed).integers(5, 50, sum(lengths)).astype(np.int32)
    return apart(ids, np.array(lengths))


def engine_embeddings(
    folder: Path, rows: Rows, context: np.ndarray | None = None, layers: int | None = None
) -> np.ndarray:
    backbone = load(folder, layers=layers)
    context = null_context(backbone) if context is None else context
    lengths = rows.lengths
    ids = np.zeros((len(rows), int(lengths.max())), np.int64)
    ids[np.arange(ids.shape[1]) < lengths[:, None]] = rows.ids
    hidden = backbone.hidden_states(ids, lengths, context)
    return np.stack([hidden[row, :length].mean(0).numpy() for row, length in enumerate(lengths.tolist())])


def saved(model: LandmarkEncoder, base: Path, folder: Path, **encoder: object) -> Path:
    checkpoint = read_checkpoint(base)
    trained = replace(checkpoint, tensors={**checkpoint.tensors, **model.published_tensors()})
    save_encoder_folder(folder, trained, EncoderConfig(**encoder))
    return folder


@pytest.mark.parametrize("family", ["tiny_model_folder", "tiny_roberta_folder", *FAMILIES])
@pytest.mark.parametrize("num_context", [0, 5])
def test_landmark_encoder_saved_and_read_by_the_engine_gives_equal_vectors(
    family, num_context, request, tiny_model_folder, tmp_path
):
    if family in FAMILIES:
        checkpoint = tiny_new(family, tiny_model_folder)
    else:
        checkpoint = read_checkpoint(request.getfixturevalue(family))
    model = moved(LandmarkEncoder(checkpoint))
    trained = replace(checkpoint, tensors={**checkpoint.tensors, **model.published_tensors()})
    save_encoder_folder(tmp_path / "model", trained, EncoderConfig())
    rows = rows_of([9, 4, 22, 7, 3, 30])
    drawn = torch.randn(num_context, model.model_dim, generator=torch.Generator().manual_seed(3))
    context = drawn if num_context else None
    with torch.no_grad():
        found = model(rows, context, layers=(1, 2)).numpy()
        assert np.array_equal(found[:, model.model_dim :], model(rows, context).numpy())
    given = None if context is None else context.numpy()
    for layers, part in zip((1, None), np.split(found, 2, axis=1), strict=True):
        expected = engine_embeddings(tmp_path / "model", rows, given, layers)
        assert np.abs(part - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max()), layers
    model.freeze_embeddings()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert any(len(model.get_parameter(name)) >= 50 for name in frozen)
    assert not any(re.search(r"\.\d+\.", name) for name in frozen)
    with pytest.raises(ModelError, match=f"at most {model.max_positions} tokens, got"):
        model(rows_of([model.max_positions + 1]))


def test_landmark_encoder_reads_a_prefixed_base_and_keeps_what_it_does_not_train(tiny_model_folder, tmp_path):
    base = shutil.copytree(tiny_model_folder, tmp_path / "base")
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(base / "model.safetensors").items()}
    tensors["bert.pooler.dense.weight"] = torch.ones(2, 2)
    save_file(tensors, base / "model.safetensors")
    model = LandmarkEncoder(read_checkpoint(base))
    plain = LandmarkEncoder(read_checkpoint(tiny_model_folder))
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True)
    )
    written = load_file(saved(model, base, tmp_path / "model") / "model.safetensors")
    assert set(written) == set(tensors)
    assert torch.equal(written["bert.pooler.dense.weight"], torch.ones(2, 2))


@pytest.mark.parametrize(
    "change", [{"model_type": "t5"}, {"position_embedding_type": "relative_key"}, {"hidden_act": "tanh"}]
)
def test_landmark_encoder_refuses_a_base_it_cannot_train(tiny_model_folder, tmp_path, change):
    base = shutil.copytree(tiny_model_folder, tmp_path / "base")
    (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | change))
    with pytest.raises(ModelError, match="choose another base"):
        LandmarkEncoder(read_checkpoint(base))


TEXTS = ["the cat sat on the old stone path by a river", "walking on a mat", "a mountain way"]


CONTEXT = ContextConfig(max_document_tokens=48)


def context_rows(model_folder: Path) -> Rows:
    """Lay the texts out as context documents are, a row each."""
    checkpoint = read_checkpoint(model_folder)
    encoded = [checkpoint.tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    ids = [[checkpoint.cls_id, *row, checkpoint.landmark_id] for row in encoded]
    return apart(np.concatenate(ids).astype(np.int32), np.array([len(row) for row in ids]))


def first_stage(folder: Path, **settings: Any) -> ContextEncoder:
    """Return the first stage as an ingest runs it."""
    config = EncoderConfig(model=str(folder), precision="fp32", **settings)
    return ContextEncoder.of(load_backbone(config), config, CONTEXT)


def embedded(folder: Path, **settings: Any) -> np.ndarray:
    return first_stage(folder, **settings).embed(TEXTS)


def second_stage(folder: Path) -> np.ndarray:
    return (
        DocumentEncoder(EncoderConfig(model=str(folder), precision="fp32")).encode(TEXTS).document_vectors_NV
    )


@pytest.mark.parametrize("base", ["tiny_model_folder", "tiny_roberta_folder"])
@pytest.mark.parametrize("shares_embeddings", [False, True])
def test_first_stage_starts_as_the_base_and_is_served_as_it_was_trained(
    base, shares_embeddings, request, tmp_path
):
    folder: Path = request.getfixturevalue(base)
    how = {"first_stage_layers": 2, "shares_embeddings": shares_embeddings}
    model = LandmarkEncoder(read_checkpoint(folder), **how).requires_grad_(False)
    rows = context_rows(folder)
    assert torch.equal(model.embed_documents(rows), model(alone(rows, has_cls=True)))
    moved(model, FIRST_STAGE)
    own, second = model.embed_documents(rows).numpy(), model(alone(rows, has_cls=True)).numpy()
    assert np.abs(own - second).max() > 0.1
    served = saved(model, folder, tmp_path / "saved")
    names = [name for name in load_file(served / EXTRA_NAME) if name.startswith(FIRST_STAGE)]
    assert any("word_embeddings" in name for name in names) != shares_embeddings
    np.testing.assert_allclose(embedded(served), own, atol=1e-4)
    np.testing.assert_allclose(embedded(folder), second, atol=1e-4)
    checkpoint = read_checkpoint(served)
    again = LandmarkEncoder(checkpoint).requires_grad_(False)
    assert torch.equal(again.embed_documents(rows), model.embed_documents(rows))
    again.requires_grad_(True).freeze_embeddings()
    trained = [name for name, parameter in again.named_parameters() if parameter.requires_grad]
    assert trained
    assert not any("embeddings" in name for name in trained)
    other = saved(moved(model, FIRST_STAGE), folder, tmp_path / "other")
    loaded = [load_backbone(EncoderConfig(model=str(each))) for each in (served, other)]
    assert first_stage(served).fingerprint != first_stage(other).fingerprint
    assert loaded[0].weights_fingerprint != loaded[1].weights_fingerprint
    kinds = ["full_attention", "sliding_attention"]
    checkpoint = replace(checkpoint, config={**checkpoint.config, "layer_types": kinds})
    assert first_layers(checkpoint, 1).config["layer_types"] == kinds, "its first stage has both"


def test_first_stage_of_fewer_layers_is_the_base_s_first_ones_and_layers_cut_the_second_alone(
    tiny_model_folder, tmp_path
):
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder), first_stage_layers=1)
    served = saved(model, tiny_model_folder, tmp_path / "saved")
    np.testing.assert_allclose(embedded(served), embedded(tiny_model_folder, layers=1), atol=1e-5)
    np.testing.assert_array_equal(embedded(served, layers=1), embedded(served))
    checkpoint = read_checkpoint(served)
    assert LandmarkEncoder(checkpoint, first_stage_layers=1).published_tensors().keys() == (
        model.published_tensors().keys()
    )
    with pytest.raises(ConfigError, match="must be the 1 of the base's own first stage, got 2"):
        LandmarkEncoder(checkpoint, first_stage_layers=2)
    tensors = load_file(served / EXTRA_NAME)
    for lost, sentence in (
        (".layer.0.", "at least one layer"),
        (".layer.0.attention.self.key.weight", "key"),
    ):
        save_file({name: each for name, each in tensors.items() if lost not in name}, served / EXTRA_NAME)
        with pytest.raises(ModelError, match=sentence):
            load_backbone(EncoderConfig(model=str(served)))


def test_train_changes_with_frozen_embeddings_hold_the_first_stage_and_make_the_trained_model(
    run, tmp_path, tiny_model_folder
):
    run(first_stage_layers=2, freeze_embeddings=True, steps=2, heldout_pairs=0, context_absence=0.0)
    trained, first = (
        each.tensors.get(NULL_CONTEXT)
        for each in map(read_checkpoint, (tmp_path / "run" / "model", tiny_model_folder))
    )
    assert trained is not None
    assert first is None
    overlaid = shutil.copytree(tiny_model_folder, tmp_path / "overlaid")
    shutil.copy(tmp_path / "run" / "changes.safetensors", overlaid / EXTRA_NAME)
    assert not any("embeddings" in name for name in load_file(overlaid / EXTRA_NAME))
    for embed in (embedded, second_stage):
        trained, changed, base = (
            unit(embed(folder)) for folder in (tmp_path / "run" / "model", overlaid, tiny_model_folder)
        )
        moved, rounded = (1 - (trained * other).sum(1).min() for other in (base, changed))
        assert rounded < 0.1 * moved  # apart by the rounding to bf16


def test_rows_see_the_null_token_in_the_place_of_their_own_dropped_vectors(tiny_model_folder, make_pairs):
    generator, checkpoint = torch.Generator().manual_seed(1), read_checkpoint(tiny_model_folder)
    model = moved(LandmarkEncoder(checkpoint, null_token=True), NULL_CONTEXT)
    served = EncoderConfig(pooling="lmk", attention="full")
    maker = SequenceMaker(checkpoint, make_pairs(4), served, max_query_tokens=16, max_document_tokens=64)
    rows, _ = maker.documents(range(4), 9)
    context_CD = torch.randn(5, model.model_dim, generator=generator)
    dropped_BC = torch.rand(len(rows), 5, generator=generator) < 0.5
    dropped_BC[0], dropped_BC[1] = False, True
    rows_of_chunks = torch.from_numpy(rows.pooled_row)
    with torch.no_grad():
        found = model(rows, context_CD, dropped_BC=dropped_BC)
        for row in range(len(rows)):
            replaced = torch.where(dropped_BC[row][:, None], model.null_token, context_CD)
            own = rows_of_chunks == row
            assert torch.allclose(found[own], model(rows, replaced)[own], atol=1e-5)
    assert len(rows) == 4


def test_served_without_a_context_as_trained_behind_one_null_token(tiny_model_folder, tmp_path):
    checkpoint = read_checkpoint(tiny_model_folder)
    model = moved(LandmarkEncoder(checkpoint, null_token=True))
    rows = rows_of([9, 4, 12, 7])
    served = engine_embeddings(saved(model, tiny_model_folder, tmp_path / "with"), rows)
    with torch.no_grad():
        dropped = model(rows, torch.randn(1, model.model_dim), dropped_BC=torch.ones(4, 1).bool())
        np.testing.assert_allclose(served, dropped.numpy(), atol=1e-5)
        np.testing.assert_allclose(served, model(rows).numpy(), atol=1e-5)
        model.reads_null = False
        assert np.abs(served - model(rows).numpy()).max() > 0.01
    without = saved(model, tiny_model_folder, tmp_path / "without")
    np.testing.assert_allclose(engine_embeddings(without, rows), model(rows).detach().numpy(), atol=1e-5)
    assert NULL_CONTEXT in load_file(tmp_path / "with" / EXTRA_NAME)
    broken = replace(checkpoint, tensors={**checkpoint.tensors, NULL_CONTEXT: torch.zeros(3)})
    save_encoder_folder(tmp_path / "broken", broken, EncoderConfig())
    with pytest.raises(ModelError, match="null_token must be 32 finite numbers, got others of shape"):
        engine_embeddings(tmp_path / "broken", rows_of([9]))
    assert not (tmp_path / "without" / EXTRA_NAME).exists()


def with_block(checkpoint: Checkpoint) -> LandmarkEncoder:
    model = LandmarkEncoder(checkpoint)
    add_latent_block(model, checkpoint, num_latents=None if PREFIX + "latents" in checkpoint.tensors else 6)
    return model


def test_gradient_of_the_block_equals_that_of_the_equation_written_out(tiny_model_folder):
    model, rows = moved(with_block(read_checkpoint(tiny_model_folder))), rows_of([7, 4])
    names = [name for name, _ in model.named_parameters() if name.startswith(PREFIX)]
    tensors = [model.get_parameter(name) for name in names]
    weight = torch.randn(2, model.model_dim, generator=torch.Generator().manual_seed(2))
    pooled_BD, states_ND = model(rows), model.states(rows)[model.num_layers]
    written_ND = naive(dict(zip(names, tensors, strict=True)), states_ND, heads=8)
    expected_BD = torch.stack([written_ND[:7].mean(0), written_ND[7:].mean(0)])
    assert torch.allclose(pooled_BD, expected_BD, atol=1e-5)
    found = torch.autograd.grad((pooled_BD * weight).sum(), tensors, retain_graph=True)
    expected = torch.autograd.grad((expected_BD * weight).sum(), tensors)
    assert len(names) == 14
    new, plain = (make(read_checkpoint(tiny_model_folder)) for make in (with_block, LandmarkEncoder))
    assert torch.allclose(new(rows), plain(rows)), "a new block begins as the plain mean"
    for name, one, other in zip(names, found, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * max(1.0, float(other.abs().max())), name


def test_trained_block_is_saved_served_and_gone_on_from(run, pairs_file, tmp_path):
    run(steps=4, pooling="latent", latents=6, matryoshka_dims=(), context_dropout=0.0, heldout_pairs=0)
    folder = tmp_path / "run" / "model"
    settings = replace(encoder_config({"model": str(folder)}), precision="fp32", use_context=False)
    assert settings.pooling == "latent"
    pairs = read_pairs([pairs_file])
    sizes = {"max_query_tokens": 64, "max_document_tokens": 256}
    maker = SequenceMaker(read_checkpoint(folder), pairs, settings, **sizes)
    model = with_block(read_checkpoint(folder)).requires_grad_(False)
    assert model.get_parameter(f"{PREFIX}cross_attend_blocks.0.fn.to_out.weight").abs().max() > 0
    found = F.normalize(model(maker.queries(range(5), 64)[0]), dim=1).numpy()
    served = DocumentEncoder(settings, backbone=load_backbone(settings)).encode_queries(
        [row.query for row in pairs.rows[:5]]
    )
    np.testing.assert_allclose(found, served, atol=1e-5)


def test_latents_that_cannot_be_are_refused(tiny_model_folder, tmp_path):
    checkpoint = read_checkpoint(tiny_model_folder)
    with pytest.raises(ConfigError, match="whose width 8 heads divide, got 20"):
        new_block(6, 20, 0)
    block = new_block(6, 32, 0)
    of_six = replace(checkpoint, tensors={**checkpoint.tensors, **block})
    with pytest.raises(ConfigError, match="latents must be the base model's 6, got 7"):
        add_latent_block(LandmarkEncoder(of_six), of_six, num_latents=7)
    elsewhere = {f"module.{name}": tensor for name, tensor in block.items()}
    published = replace(checkpoint, tensors={**checkpoint.tensors, **elsewhere})
    with pytest.raises(ModelError, match="start from a latent attention named latent_attention_model"):
        add_latent_block(LandmarkEncoder(published), published)
