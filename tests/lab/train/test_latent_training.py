"""Latent attention trained with the transformer (NV-Embed §3.2, eq. 1), saved and served."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.train.adapters import add_latent_block, new_block
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.pairs import read_pairs
from cairn.pipeline.lab.train.sequences import SequenceMaker
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.checkpoint import EXTRA_NAME, Checkpoint, read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.folders.own_tensors import LATENT_ATTENTION as PREFIX
from safetensors.torch import load_file

from tests.lab.train.test_landmark_encoder import moved, rows_of


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


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_run_with_a_block_goes_on_bit_for_bit(run: Any, tmp_path: Path, lora_rank: int):
    settings = {"steps": 4, "pooling": "latent", "latents": 6, "lora_rank": lora_rank, "heldout_pairs": 0}
    run(**settings)
    whole = load_file(tmp_path / "run" / "model" / EXTRA_NAME)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "00000004")
    assert run(**settings).resumed_at == 2
    again = load_file(tmp_path / "run" / "model" / EXTRA_NAME)
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert whole[f"{PREFIX}cross_attend_blocks.1.fn.net.2.weight"].any()


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
