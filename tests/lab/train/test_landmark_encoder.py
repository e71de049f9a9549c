from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ModelError
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.folders.own_tensors import CONTEXT_GATES, LANDMARK_GATES
from cairn.pipeline.model.landmark_reader import LandmarkReader
from safetensors.torch import load_file, save_file

from tests.lab.train.families import FAMILIES, tiny_new

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
