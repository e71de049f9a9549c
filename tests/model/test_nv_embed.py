"""A Mistral inside an NV-Embed: its states, its latent attention, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.latent_attention import read_latent_attention
from safetensors.torch import load_file

from tests.model.published import LENGTHS, load, published, published_hidden, random_ids


@pytest.mark.parametrize("num_layers", [None, 1])
def test_nv_embed_is_the_mistral_it_holds(
    make_nv_embed: Callable[..., Path], make: Callable[..., Path], num_layers: int | None
) -> None:
    outer, inner = (load(folder, layers=num_layers) for folder in (make_nv_embed(), make("mistral")))
    ids = random_ids(outer)
    assert torch.equal(outer.hidden_states(ids, LENGTHS), inner.hidden_states(ids, LENGTHS))


@pytest.mark.parametrize("prefix", ["", "old stone:"])
def test_encode_with_nv_embed_is_the_mean_of_latent_attention_without_the_instruction(
    make_nv_embed: Callable[..., Path], make: Callable[..., Path], prefix: str
) -> None:
    folder = make_nv_embed(2)
    config = encoder_config({"model": str(folder), "precision": "fp32", "query_prefix": prefix})
    assert config.pooling == "latent"
    encoder = DocumentEncoder(config)
    texts = ["the cat sat on the mat", "a river", "old path " * 9]
    tokenizer, model = encoder.backbone.tokenizer, published(make("mistral"))
    block = read_latent_attention(
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
        model_dim=32,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert block is not None
    for vector, text in zip(encoder.encode_queries(texts), texts, strict=True):
        before, own = (tokenizer.encode(part, add_special_tokens=False).ids for part in (prefix, text))
        ids = np.array([[2, *before, *own, 3]])
        states = block(published_hidden(model, ids, np.array([ids.shape[1]]), is_causal=False))[0]
        mean = states[1 + len(before) if prefix else 0 :].mean(0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)


@pytest.mark.parametrize("inner", [None, [], {"model_type": "gemma"}])
def test_nv_embed_without_its_language_model_is_refused(
    make_nv_embed: Callable[..., Path], inner: Any
) -> None:
    folder = make_nv_embed()
    (folder / "config.json").write_text(json.dumps({"model_type": "nvembed", "text_config": inner}))
    with pytest.raises(
        ModelError, match="text_config of an NV-Embed must describe a model of type bidir_mistral"
    ):
        load(folder)
