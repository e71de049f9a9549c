"""A first stage of its own starts as the base, is trained apart, and is saved and served with the model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.train import landmark_encoder
from cairn.pipeline.lab.train.adapters import (
    LowRankUpdate,
    add_latent_block,
    add_low_rank,
    dropped_inputs,
    new_block,
)
from cairn.pipeline.lab.train.contrastive import train
from cairn.pipeline.lab.train.landmark_encoder import OWN_NAMES, LandmarkEncoder, remember
from cairn.pipeline.lab.train.mixer_data import unit
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.lab.train.pairs import TrainingPairs, read_pairs
from cairn.pipeline.lab.train.sequences import SequenceMaker
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.engine.landmark_attention import Memory
from cairn.pipeline.model.folders.checkpoint import EXTRA_NAME, Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.first_layers import first_layers
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.folders.own_tensors import (
    CONTEXT_GATES,
    FIRST_STAGE,
    GATE_NAMES,
    LANDMARK_GATES,
    NULL_CONTEXT,
)
from cairn.pipeline.model.folders.own_tensors import LATENT_ATTENTION as PREFIX
from cairn.pipeline.model.landmark_reader import LandmarkReader
from safetensors.torch import load_file, save_file

from tests.lab.train.conftest import LOOP_SETTINGS
from tests.lab.train.families import FAMILIES, tiny_new


def low_rank_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the two matrices of every update, by name; empty for a model without."""
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if isinstance(module, LowRankUpdate)
        for name, parameter in module.named_parameters()
    }


CPU = torch.device("cpu")


def moved(model: LandmarkEncoder, seed: int = 0) -> LandmarkEncoder:
    """Move every parameter a little, as training would, and the gates apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def rows_of(lengths: list[int], windows: list[int], seed: int = 0) -> PackedRows:
    generator = np.random.default_rng(seed)
    return PackedRows(
        ids_N=generator.integers(5, 50, sum(lengths)).astype(np.int32),
        lengths_B=np.array(lengths),
        windows_B=np.array(windows),
        pooled_start_B=np.zeros(len(lengths), np.int64),
        pooled_end_B=np.array(lengths),
    )


def rectangle(rows: PackedRows) -> np.ndarray:
    ids = np.zeros((len(rows), int(rows.lengths_B.max())), np.int64)
    for row, part in enumerate(np.split(rows.ids_N, np.cumsum(rows.lengths_B)[:-1])):
        ids[row, : len(part)] = part
    return ids


def engine_embeddings(folder: Path, rows: PackedRows, context: np.ndarray | None) -> np.ndarray:
    backbone = load_backbone(EncoderConfig(model=str(folder), precision="fp32"), CPU)
    hidden = LandmarkReader(backbone, context).hidden_states(rectangle(rows), rows.lengths_B, rows.windows_B)
    spans = zip(rows.pooled_start_B.tolist(), rows.pooled_end_B.tolist(), strict=True)
    return np.stack([hidden[row, start:end].mean(0).numpy() for row, (start, end) in enumerate(spans)])


def saved(model: LandmarkEncoder, base: Path, folder: Path, **encoder: object) -> Path:
    checkpoint = read_checkpoint(base)
    trained = replace(checkpoint, tensors={**checkpoint.tensors, **model.published_tensors()})
    save_encoder_folder(folder, trained, EncoderConfig(**encoder))
    return folder


@pytest.mark.parametrize("base", ["tiny_model_folder", "tiny_roberta_folder"])
@pytest.mark.parametrize("num_context", [0, 5])
def test_landmark_encoder_saved_and_read_by_the_engine_gives_equal_vectors(
    base: str, num_context: int, request: pytest.FixtureRequest, tmp_path: Path
):
    folder: Path = request.getfixturevalue(base)
    model = moved(LandmarkEncoder(read_checkpoint(folder)))
    rows = rows_of([9, 4, 12, 7, 3, 30], [0, 0, 0, 1, 2, 2])
    context = (
        torch.randn(num_context, model.model_dim, generator=torch.Generator().manual_seed(3))
        if num_context
        else None
    )
    with torch.no_grad():
        found = model(rows, context).numpy()
    expected = engine_embeddings(
        saved(model, folder, tmp_path / "model"), rows, None if context is None else context.numpy()
    )
    assert np.abs(found - expected).max() <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_context", [0, 5])
def test_landmark_encoder_of_any_family_saved_and_read_by_the_engine_gives_equal_vectors(
    family: str, num_context: int, tiny_model_folder: Path, tmp_path: Path
):
    checkpoint = tiny_new(family, tiny_model_folder)
    model = moved(LandmarkEncoder(checkpoint))
    trained = replace(checkpoint, tensors={**checkpoint.tensors, **model.published_tensors()})
    save_encoder_folder(tmp_path / "model", trained, EncoderConfig())
    rows = rows_of([9, 4, 22, 7, 3, 30], [0, 0, 0, 1, 2, 2])
    context = (
        torch.randn(num_context, 32, generator=torch.Generator().manual_seed(3)) if num_context else None
    )
    with torch.no_grad():
        found = model(rows, context).numpy()
    expected = engine_embeddings(tmp_path / "model", rows, None if context is None else context.numpy())
    assert np.abs(found - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_landmark_encoder_of_any_family_counts_matrices_and_input_tables(
    family: str, tiny_model_folder: Path
):
    model = LandmarkEncoder(tiny_new(family, tiny_model_folder))
    model.freeze_embeddings()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert any(len(model.get_parameter(name)) >= 50 for name in frozen)
    assert not any(re.search(r"\.\d+\.", name) for name in frozen)
    sizes = [module.get_parameter("weight").numel() for module in model.layer_matrices()]
    of_attention = [
        module.get_parameter("weight").numel() for module in model.layer_matrices(attention_only=True)
    ]
    inner = 48 * 32 * (2 if family == "bert" else 3)
    assert sum(sizes) - sum(of_attention) == 2 * inner
    assert sum(of_attention) == 2 * (3 if family == "qwen3" else 4) * 32 * 32


def test_landmark_encoder_texts_encoded_by_ingest_settings_of_the_folder_are_the_trained_vectors(
    tiny_model_folder: Path, tmp_path: Path
):
    model = moved(LandmarkEncoder(read_checkpoint(tiny_model_folder)))
    context_texts = ["the old stone", "a river", "walking on the mountain path"]
    folder = saved(
        model,
        tiny_model_folder,
        tmp_path / "model",
        pooling="lmk",
        attention="landmark",
        landmark_interval=8,
        use_context=True,
    )
    config = encoder_config({"model": str(folder), "precision": "fp32"})
    assert (config.pooling, config.attention, config.landmark_interval, config.use_context) == (
        "lmk",
        "landmark",
        8,
        True,
    )
    backbone = load_backbone(config, CPU)
    context_CD = ContextEncoder(backbone, 32).embed(context_texts)
    tokenizer, checkpoint = backbone.tokenizer, read_checkpoint(folder)
    documents = [
        [checkpoint.cls_id, *tokenizer.encode(text, add_special_tokens=False).ids, checkpoint.landmark_id]
        for text in context_texts
    ]
    lengths = [len(ids) for ids in documents]
    packed = rows_of(lengths, [0, 1, 2])
    packed = PackedRows(
        ids_N=np.concatenate(documents).astype(np.int32),
        lengths_B=packed.lengths_B,
        windows_B=packed.windows_B,
        pooled_start_B=packed.pooled_end_B - 1,
        pooled_end_B=packed.pooled_end_B,
    )
    with torch.no_grad():
        first = model.embed_documents(packed).numpy()
    assert np.abs(first - context_CD).max() <= 1e-5
    context = ContextSet(
        doc_ids=("a", "b", "c"),
        content_sha256s=("a", "b", "c"),
        cluster_ids_C=np.zeros(3, np.int32),
        embeddings_CD=context_CD,
        first_stage_fingerprint="test",
    )
    vectors = DocumentEncoder(config, context, backbone).encode(context_texts).chunk_vectors_MV
    with torch.no_grad():
        found = torch.nn.functional.normalize(model(packed, torch.from_numpy(context_CD)), dim=1).numpy()
    assert np.abs(found - vectors).max() <= 1e-5


def test_landmark_encoder_first_layers_are_the_model_of_so_many_layers(
    tiny_model_folder: Path, tmp_path: Path
):
    model = moved(LandmarkEncoder(read_checkpoint(tiny_model_folder)))
    rows = rows_of([9, 4, 12], [0, 0, 1])
    with torch.no_grad():
        both = model(rows, layers=(1, 2))
        assert torch.equal(both[:, model.model_dim :], model(rows))
        assert torch.equal(both[:, : model.model_dim], model(rows, layers=(1,)))
    folder = saved(model, tiny_model_folder, tmp_path / "model")
    backbone = load_backbone(EncoderConfig(model=str(folder), precision="fp32", layers=1), CPU)
    alone = rows_of([9], [0])
    hidden = backbone.hidden_states(rectangle(alone), alone.lengths_B)[0].mean(0)
    with torch.no_grad():
        assert float((model(alone, layers=(1,))[0] - hidden).abs().max()) <= 1e-5


def test_landmark_encoder_gradients_reach_every_parameter_that_is_used(tiny_model_folder: Path):
    model = moved(LandmarkEncoder(read_checkpoint(tiny_model_folder), context_size=4, null_token=True))
    rows = rows_of([9, 4, 12, 7], [0, 0, 0, 1])
    context = torch.stack(
        [model.null_token, *torch.randn(3, model.model_dim, generator=torch.Generator().manual_seed(1))]
    )
    (
        model(rows, context) * torch.randn(4, model.model_dim, generator=torch.Generator().manual_seed(2))
    ).sum().backward()
    without = {
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.abs().max() > 0
    }
    assert without == set()


def test_landmark_encoder_gradient_equals_finite_differences(tiny_model_folder: Path):
    model = moved(LandmarkEncoder(read_checkpoint(tiny_model_folder))).double()
    rows = rows_of([6, 4, 5], [0, 0, 1])
    context = torch.randn(2, model.model_dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = torch.randn(3, model.model_dim, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def value() -> torch.Tensor:
        return (model(rows, context).double() * weights).sum()

    value().backward()
    for name in (
        LANDMARK_GATES,
        CONTEXT_GATES,
        "encoder.layer.0.attention.self.key.weight",
        "embeddings.LayerNorm.bias",
    ):
        parameter = dict(model.named_parameters())[name]
        assert parameter.grad is not None
        place = int(parameter.grad.abs().argmax())
        with torch.no_grad():
            ends = []
            for step in (1e-3, -2e-3):
                parameter.view(-1)[place] += step
                ends.append(float(value()))
            parameter.view(-1)[place] += 1e-3
        expected = (ends[0] - ends[1]) / 2e-3
        assert float(parameter.grad.view(-1)[place]) == pytest.approx(expected, rel=2e-2), name


def test_landmark_encoder_does_not_depend_on_how_rows_are_batched(tiny_model_folder: Path):
    model = moved(LandmarkEncoder(read_checkpoint(tiny_model_folder)))
    rows = rows_of([9, 4, 12, 7], [0, 0, 1, 1])
    parts = []
    for first in (0, 2):
        starts = np.cumsum(rows.lengths_B) - rows.lengths_B
        start, end = int(starts[first]), int(starts[first] + rows.lengths_B[first : first + 2].sum())
        two = slice(first, first + 2)
        parts.append(
            PackedRows(
                ids_N=rows.ids_N[start:end],
                lengths_B=rows.lengths_B[two],
                windows_B=rows.windows_B[two],
                pooled_start_B=rows.pooled_start_B[two],
                pooled_end_B=rows.pooled_end_B[two],
            )
        )
    with torch.no_grad():
        assert float((model(rows) - torch.cat([model(part) for part in parts])).abs().max()) <= 1e-5


def test_landmark_encoder_reads_a_prefixed_base_and_keeps_what_it_does_not_train(
    tiny_model_folder: Path, tmp_path: Path
):
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


def test_landmark_encoder_gates_are_read_back(tiny_model_folder: Path, tmp_path: Path):
    checkpoint = read_checkpoint(tiny_model_folder)
    model = moved(LandmarkEncoder(checkpoint, initial_gate=-0.5, context_size=4, null_token=True))
    folder = saved(model, tiny_model_folder, tmp_path / "model")
    again = LandmarkEncoder(read_checkpoint(folder))
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert (
        float(
            LandmarkEncoder(read_checkpoint(tiny_model_folder), initial_gate=-0.5)
            .get_parameter(LANDMARK_GATES)
            .detach()
            .mean()
        )
        == -0.5
    )


@pytest.mark.parametrize(
    "change",
    [{"model_type": "t5"}, {"position_embedding_type": "relative_key"}, {"hidden_act": "tanh"}],
)
def test_landmark_encoder_refuses_a_base_it_cannot_train(
    tiny_model_folder: Path, tmp_path: Path, change: dict[str, str]
):
    base = shutil.copytree(tiny_model_folder, tmp_path / "base")
    (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | change))
    with pytest.raises(ModelError, match="choose another base"):
        LandmarkEncoder(read_checkpoint(base))


def test_landmark_encoder_row_longer_than_its_positions_is_refused(tiny_model_folder: Path):
    with pytest.raises(ModelError, match="at most 96 tokens, got 97"):
        LandmarkEncoder(read_checkpoint(tiny_model_folder))(rows_of([97], [0]))


TEXTS = ["the cat sat on the old stone path by a river", "walking on a mat", "a mountain way"]


CONTEXT = ContextConfig(max_document_tokens=48)


def context_rows(model_folder: Path) -> PackedRows:
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


def saved_apart(model: LandmarkEncoder, base: Path, folder: Path) -> Path:
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
    rows = context_rows(folder)
    assert torch.equal(model.embed_documents(rows), model.read_alone(rows)[0])
    apart(model)
    own, second = model.embed_documents(rows).numpy(), model.read_alone(rows)[0].numpy()
    assert np.abs(own - second).max() > 0.1
    served = saved_apart(model, folder, tmp_path / "saved")
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
    served = saved_apart(model, tiny_model_folder, tmp_path / "saved")
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
    one = saved_apart(model, tiny_model_folder, tmp_path / "one")
    other = saved_apart(apart(model), tiny_model_folder, tmp_path / "other")
    assert first_stage(one).fingerprint != first_stage(other).fingerprint
    second = [load_backbone(EncoderConfig(model=str(folder))).weights_fingerprint for folder in (one, other)]
    assert second[0] != second[1]


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
    checkpoint = read_checkpoint(saved_apart(model, tiny_model_folder, tmp_path / "saved"))
    assert LandmarkEncoder(checkpoint, first_stage_layers=1).published_tensors().keys() == (
        model.published_tensors().keys()
    )
    with pytest.raises(ConfigError, match="must be the 1 of the base's own first stage, got 2"):
        LandmarkEncoder(checkpoint, first_stage_layers=2)


@pytest.mark.parametrize("lost", ["layer", "tensor"])
def test_first_stage_that_is_not_whole_is_refused(tiny_model_folder: Path, tmp_path: Path, lost: str):
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder), first_stage_layers=1)
    folder = saved_apart(model, tiny_model_folder, tmp_path / "saved")
    tensors = load_file(folder / EXTRA_NAME)
    part = ".layer.0." if lost == "layer" else ".layer.0.attention.self.key.weight"
    save_file({name: each for name, each in tensors.items() if part not in name}, folder / EXTRA_NAME)
    with pytest.raises(ModelError, match="at least one layer" if lost == "layer" else "key"):
        load_backbone(EncoderConfig(model=str(folder)))


C = 5


@pytest.fixture
def made(tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs]) -> Any:
    generator = torch.Generator().manual_seed(1)
    model = LandmarkEncoder(
        read_checkpoint(tiny_model_folder), initial_gate=0.5, context_size=C, null_token=True
    )
    with torch.no_grad():
        model.null_token.copy_(torch.randn(model.model_dim, generator=generator))
    maker = SequenceMaker(
        read_checkpoint(tiny_model_folder),
        make_pairs(4),
        pooling="lmk",
        max_query_tokens=16,
        max_document_tokens=64,
    )
    rows, _ = maker.documents(range(4), 9)
    return model, rows, torch.randn(C, model.model_dim, generator=generator)


def replaced(model: LandmarkEncoder, dropped_C: torch.Tensor) -> Any:
    """Return what memories become where dropped vectors' keys and values are those of the null token."""

    def memories(engine: Any, context_CD: torch.Tensor, num_layers: int) -> tuple[Memory, ...]:
        own = remember(engine, context_CD, num_layers)
        null = remember(engine, model.null_token[None], num_layers)
        return tuple(
            Memory(
                key_GCd=torch.where(dropped_C[None, :, None], other.key_GCd, one.key_GCd),
                value_GCd=torch.where(dropped_C[None, :, None], other.value_GCd, one.value_GCd),
            )
            for one, other in zip(own, null, strict=True)
        )

    return memories


def test_rows_see_the_null_token_in_the_place_of_their_own_dropped_vectors(
    made: Any, monkeypatch: pytest.MonkeyPatch
):
    model, rows, context_CD = made
    dropped_WC = torch.rand(4, C, generator=torch.Generator().manual_seed(3)) < 0.5
    dropped_WC[0], dropped_WC[1] = False, True
    windows = torch.from_numpy(rows.windows_B)
    with torch.no_grad():
        found = model.read(rows, context_CD, dropped_BC=dropped_WC[windows])[0]
        assert torch.allclose(found[windows == 0], model(rows, context_CD)[windows == 0], atol=1e-5)
        for window in range(4):
            with monkeypatch.context() as patch:
                patch.setattr(landmark_encoder, "remember", replaced(model, dropped_WC[window]))
                expected = model(rows, context_CD)
            assert torch.allclose(found[windows == window], expected[windows == window], atol=1e-5)
    assert len(np.unique(rows.windows_B)) == 4


def test_gradient_reaches_the_null_token_of_one_example_alone(made: Any):
    model, rows, context_CD = made
    dropped_BC = torch.zeros(len(rows), C, dtype=torch.bool)
    dropped_BC[torch.from_numpy(rows.windows_B) == 2, 1] = True
    embedded_BD = model.read(rows, context_CD, dropped_BC=dropped_BC)[0]
    for window, is_reached in ((1, False), (2, True)):
        own = embedded_BD[torch.from_numpy(rows.windows_B) == window].sum()
        (gradient,) = torch.autograd.grad(own, [model.null_token], retain_graph=True)
        assert bool(gradient.abs().max() > 0) == is_reached


def without_context(folder: Path, rows: PackedRows) -> np.ndarray:
    backbone = load_backbone(EncoderConfig(model=str(folder), precision="fp32"))
    hidden = LandmarkReader(backbone).hidden_states(rectangle(rows), rows.lengths_B, rows.windows_B)
    spans = zip(rows.pooled_start_B.tolist(), rows.pooled_end_B.tolist(), strict=True)
    return np.stack([hidden[row, start:end].mean(0).numpy() for row, (start, end) in enumerate(spans)])


def test_served_without_a_context_as_trained_with_every_vector_dropped(
    tiny_model_folder: Path, tmp_path: Path
):
    checkpoint = read_checkpoint(tiny_model_folder)
    model = moved(LandmarkEncoder(checkpoint, context_size=C, null_token=True))
    rows = rows_of([9, 4, 12, 7], [0, 0, 0, 1])
    served = without_context(saved(model, tiny_model_folder, tmp_path / "with"), rows)
    with torch.no_grad():
        dropped = model.read(rows, torch.randn(C, model.model_dim), dropped_BC=torch.ones(4, C).bool())[0]
        np.testing.assert_allclose(served, dropped.numpy(), atol=1e-5)
        np.testing.assert_allclose(served, model(rows).numpy(), atol=1e-5)
        model.reads_null = False
        assert np.abs(served - model(rows).numpy()).max() > 0.01
    without = saved(model, tiny_model_folder, tmp_path / "without")
    np.testing.assert_allclose(without_context(without, rows), model(rows).detach().numpy(), atol=1e-5)
    assert NULL_CONTEXT in load_file(tmp_path / "with" / EXTRA_NAME)
    assert NULL_CONTEXT not in load_file(tmp_path / "without" / EXTRA_NAME)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_folder_holds_the_null_token_where_it_was_trained(
    dropout: float, tiny_model_folder: Path, pairs_file: Path, tmp_path: Path
):
    config = TrainConfig(**{**LOOP_SETTINGS, "steps": 2, "context_dropout": dropout, "heldout_pairs": 0})
    train([pairs_file], tmp_path / "run", config, base=str(tiny_model_folder))
    found = load_file(tmp_path / "run" / "model" / EXTRA_NAME).get(NULL_CONTEXT)
    first = LandmarkEncoder(read_checkpoint(tiny_model_folder)).null_token
    assert (found is not None) == (dropout > 0)
    assert found is None or not torch.equal(found, first.detach())


def test_null_token_of_another_width_is_refused(tiny_model_folder: Path, tmp_path: Path):
    checkpoint = read_checkpoint(tiny_model_folder)
    broken = replace(checkpoint, tensors={**checkpoint.tensors, NULL_CONTEXT: torch.zeros(3)})
    save_encoder_folder(tmp_path / "model", broken, EncoderConfig())
    with pytest.raises(ModelError, match="null_token must be 32 finite numbers, got others of shape"):
        without_context(tmp_path / "model", rows_of([9], [0]))


def with_block(checkpoint: Checkpoint) -> LandmarkEncoder:
    model = LandmarkEncoder(checkpoint)
    add_latent_block(model, checkpoint, num_latents=None if PREFIX + "latents" in checkpoint.tensors else 6)
    return model


def written_out(model: LandmarkEncoder, x_ND: torch.Tensor) -> torch.Tensor:
    """O = softmax(QKᵀ)V of torch's own multi-head attention and layers, in the published names."""
    t = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in model.named_parameters()
        if name.startswith(PREFIX)
    }
    a, m, width = "cross_attend_blocks.0", "cross_attend_blocks.1", (x_ND.shape[1],)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, width, t[f"{name}.weight"], t[f"{name}.bias"], 1e-5)

    latents = norm(t["latents"], f"{a}.norm_context")
    key, value = (latents @ t[f"{a}.fn.to_kv.weight"].T).chunk(2, dim=1)
    query = norm(x_ND, f"{a}.norm") @ t[f"{a}.fn.to_q.weight"].T
    query, key, value = (part.unflatten(1, (8, -1)).transpose(0, 1) for part in (query, key, value))
    heads = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).softmax(-1) @ value
    attended = x_ND + heads.transpose(0, 1).flatten(1) @ t[f"{a}.fn.to_out.weight"].T
    up, gate = F.linear(
        norm(attended, f"{m}.norm"), t[f"{m}.fn.net.0.weight"], t[f"{m}.fn.net.0.bias"]
    ).chunk(2, 1)
    return attended + F.linear(up * F.gelu(gate), t[f"{m}.fn.net.2.weight"], t[f"{m}.fn.net.2.bias"])


def test_gradient_of_the_block_equals_that_of_the_equation_written_out(tiny_model_folder: Path):
    model, rows = moved(with_block(read_checkpoint(tiny_model_folder))), rows_of([7, 4], [0, 1])
    names = [name for name, _ in model.named_parameters() if name.startswith(PREFIX)]
    tensors = [model.get_parameter(name) for name in names]
    weight = torch.randn(2, model.model_dim, generator=torch.Generator().manual_seed(2))
    pooled_BD, states_ND = model.read(rows)
    written_ND = written_out(model, states_ND)
    expected_BD = torch.stack([written_ND[:7].mean(0), written_ND[7:].mean(0)])
    assert torch.allclose(pooled_BD, expected_BD, atol=1e-5)
    found = torch.autograd.grad((pooled_BD * weight).sum(), tensors, retain_graph=True)
    expected = torch.autograd.grad((expected_BD * weight).sum(), tensors)
    assert len(names) == 14
    for name, one, other in zip(names, found, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * max(1.0, float(other.abs().max())), name


def test_new_block_begins_as_the_plain_mean(tiny_model_folder: Path):
    checkpoint, rows = read_checkpoint(tiny_model_folder), rows_of([7, 4], [0, 1])
    with torch.no_grad():
        assert torch.allclose(with_block(checkpoint)(rows), LandmarkEncoder(checkpoint)(rows))


def test_trained_block_is_saved_served_and_gone_on_from(run: Any, pairs_file: Path, tmp_path: Path):
    run(steps=4, pooling="latent", latents=6, matryoshka_dims=(), context_dropout=0.0, heldout_pairs=0)
    folder = tmp_path / "run" / "model"
    settings = replace(encoder_config({"model": str(folder)}), precision="fp32", use_context=False)
    assert settings.pooling == "latent"
    pairs = read_pairs([pairs_file])
    maker = SequenceMaker(
        read_checkpoint(folder), pairs, pooling="latent", max_query_tokens=64, max_document_tokens=256
    )
    model = with_block(read_checkpoint(folder)).requires_grad_(False)
    assert model.get_parameter(f"{PREFIX}cross_attend_blocks.0.fn.to_out.weight").abs().max() > 0
    found = F.normalize(model(maker.queries(range(5), 64)[0]), dim=1).numpy()
    served = DocumentEncoder(settings, backbone=load_backbone(settings)).encode_queries(pairs.queries[:5])
    np.testing.assert_allclose(found, served, atol=1e-5)


def test_latents_that_cannot_be_are_refused(tiny_model_folder: Path, tmp_path: Path):
    checkpoint = read_checkpoint(tiny_model_folder)
    with pytest.raises(ConfigError, match="latents must go with pooling latent, got lmk"):
        TrainConfig(steps=1, latents=6)
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


ROWS = PackedRows(
    ids_N=(np.arange(21, dtype=np.int32) * 7) % 45 + 5,
    lengths_B=np.array([9, 5, 7]),
    windows_B=np.array([0, 0, 1]),
    pooled_start_B=np.zeros(3, np.int64),
    pooled_end_B=np.array([9, 5, 7]),
)


@pytest.fixture
def base(tiny_model_folder: Path) -> Checkpoint:
    return read_checkpoint(tiny_model_folder)


def adapted(base: Checkpoint, seed: int | None = 0, **settings: object) -> LandmarkEncoder:
    """Return a model with updates; with a ``seed`` they have moved away from nothing."""
    model = LandmarkEncoder(base)
    add_low_rank(model, TrainConfig(**{"steps": 1, "lora_rank": 3} | settings))
    generator = torch.Generator().manual_seed(seed or 0)
    with torch.no_grad():
        for name, parameter in low_rank_parameters(model).items():
            if seed is not None and name.endswith("up"):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def embeddings(model: LandmarkEncoder) -> torch.Tensor:
    context_CD = torch.randn(4, model.model_dim, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(ROWS, context_CD)


def test_low_rank_new_updates_leave_every_vector_as_it_was(base: Checkpoint):
    assert torch.equal(embeddings(adapted(base, seed=None)), embeddings(LandmarkEncoder(base)))


@pytest.mark.parametrize("matrices", ["all", "attention"])
def test_low_rank_merged_into_a_saved_folder_gives_the_same_vectors(
    base: Checkpoint, tmp_path: Path, matrices: str
):
    model = adapted(base, lora_matrices=matrices)
    save_encoder_folder(
        tmp_path / "merged",
        replace(base, tensors={**base.tensors, **model.published_tensors()}),
        EncoderConfig(),
    )
    merged = LandmarkEncoder(read_checkpoint(tmp_path / "merged"))
    assert set(read_checkpoint(tmp_path / "merged").tensors) == set(base.tensors) | set(GATE_NAMES)
    assert float((embeddings(merged) - embeddings(model)).abs().max()) <= 1e-5
    assert float((embeddings(model) - embeddings(LandmarkEncoder(base))).abs().max()) > 1e-2


@pytest.mark.parametrize(("matrices", "num_updates"), [("all", 12), ("attention", 8)])
def test_low_rank_updates_stand_beside_the_matrices_asked_for(
    base: Checkpoint, matrices: str, num_updates: int
):
    assert len(low_rank_parameters(adapted(base, lora_matrices=matrices))) == 2 * num_updates


def test_low_rank_difference_from_the_base_has_the_rank_asked_for(base: Checkpoint):
    for name, tensor in adapted(base).published_tensors().items():
        if name not in OWN_NAMES:
            difference = tensor - base.tensors[name]
            is_matrix = name.endswith("weight") and ".layer." in name and "LayerNorm" not in name
            assert (
                torch.linalg.matrix_rank(difference, atol=1e-4) == 3 if is_matrix else not difference.any()
            ), name


def test_low_rank_only_updates_gates_and_null_token_are_trained(base: Checkpoint):
    model = LandmarkEncoder(base, context_size=3, null_token=True)
    add_low_rank(model, TrainConfig(steps=1, lora_rank=3))
    model(ROWS, model.null_token[None].repeat(3, 1)).square().sum().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == set(low_rank_parameters(model)) | set(OWN_NAMES)


def test_low_rank_alpha_scales_the_update(base: Checkpoint):
    name = "encoder.layer.0.attention.self.query.weight"
    twice, sixfold = (
        adapted(base, lora_alpha=alpha).published_tensors()[name] - base.tensors[name]
        for alpha in (None, 18.0)
    )
    assert torch.allclose(3 * twice, sixfold, atol=1e-6)


def test_low_rank_in_bf16_products_are_with_the_matrix_that_is_saved(base: Checkpoint):
    model = adapted(base)
    merged = LandmarkEncoder(replace(base, tensors={**base.tensors, **model.published_tensors()}))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(embeddings(model), embeddings(merged))


def test_low_rank_dropout_leaves_inputs_out_for_a_step_and_scales_the_others(base: Checkpoint):
    model, name = adapted(base), "encoder.layer.0.attention.self.query"
    update = 2.0 * low_rank_parameters(model)[f"{name}.parametrizations.weight.0.up"].detach()
    down_RI = low_rank_parameters(model)[f"{name}.parametrizations.weight.0.down"].detach()
    whole = model.get_submodule(name).weight.detach()
    with dropped_inputs(model, 0.25, seed=5):
        found = model.get_submodule(name).weight.detach() - base.tensors[f"{name}.weight"]
    is_left_out_I = ~found.abs().sum(0).bool()
    assert 0 < is_left_out_I.sum() < 20
    expected = update @ (down_RI * ~is_left_out_I / 0.75)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(model.get_submodule(name).weight, whole)


def test_low_rank_dropout_is_that_of_its_seed_and_of_no_share_the_whole_update(base: Checkpoint):
    model, found = adapted(base), []
    for share, seed in ((0.3, 1), (0.3, 1), (0.3, 2), (0.0, 3)):
        with dropped_inputs(model, share, seed):
            found.append(embeddings(model))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(found[3], embeddings(model))


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_alpha": 4.0},
        {"lora_matrices": "attention"},
        {"lora_dropout": 0.1},
        {"lora_rank": 2, "lora_alpha": 0.0},
    ],
)
def test_low_rank_settings_that_do_not_go_together_are_refused(settings: dict[str, object]):
    with pytest.raises(ConfigError, match=r"lora_(rank|alpha) must be"):
        TrainConfig(**{"steps": 1, **settings})
