"""NV-Embed: its latent attention against naive loops over tokens and heads, and the Mistral inside it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.latent_attention import read_latent_attention
from safetensors.torch import load_file

from tests.model.published import LENGTHS, load, published, published_hidden, random_ids
from tests.tiny_models import make_latent_block

DIM, LATENTS, HEADS, HEAD_DIM, INNER = 16, 5, 4, 6, 20
CPU = torch.device("cpu")
NAMES = list(make_latent_block(DIM, HEADS, HEAD_DIM))
CONFIG = {"latent_attention_config": {"model_type": "latent_attention", "num_cross_heads": HEADS}}


@pytest.fixture
def tensors(latent_block):
    return latent_block(DIM, HEADS, HEAD_DIM, latents=LATENTS, inner=INNER)


def naive(tensors, hidden, heads=HEADS, prefix="latent_attention_model."):
    """One token and one head at a time, in float64."""
    t = {name.removeprefix(prefix): tensor.double() for name, tensor in tensors.items()}
    a, m = "cross_attend_blocks.0", "cross_attend_blocks.1"
    head_dim, inner = len(t[f"{a}.fn.to_q.weight"]) // heads, t[f"{m}.fn.net.2.weight"].shape[1]

    def norm(x, name):
        return (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt() * t[f"{name}.weight"] + t[
            f"{name}.bias"
        ]

    def gelu(x):
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    latents = [norm(latent, f"{a}.norm_context") for latent in t["latents"]]
    both = [(t[f"{a}.fn.to_kv.weight"] @ latent).view(2, heads, head_dim) for latent in latents]
    keys, values = zip(*both, strict=True)
    rows = []
    for x in hidden.double().reshape(-1, hidden.shape[-1]):
        query = (t[f"{a}.fn.to_q.weight"] @ norm(x, f"{a}.norm")).view(heads, head_dim)
        heads_out = []
        for head in range(heads):
            weights = torch.softmax(
                torch.stack([query[head] @ key[head] / math.sqrt(head_dim) for key in keys]), 0
            )
            heads_out.append(sum(weight * value[head] for weight, value in zip(weights, values, strict=True)))
        x = x + t[f"{a}.fn.to_out.weight"] @ torch.cat(heads_out)
        up = t[f"{m}.fn.net.0.weight"] @ norm(x, f"{m}.norm") + t[f"{m}.fn.net.0.bias"]
        rows.append(x + t[f"{m}.fn.net.2.weight"] @ (up[:inner] * gelu(up[inner:])) + t[f"{m}.fn.net.2.bias"])
    return torch.stack(rows).view(hidden.shape).float()


def _read(tensors, config=CONFIG, dtype=torch.float32):
    return read_latent_attention(tensors, config, model_dim=DIM, dtype=dtype, device=CPU)


@pytest.fixture
def hidden():
    return torch.randn(3, 7, DIM, generator=torch.Generator().manual_seed(9)) * 2


def test_latent_attention_below_any_prefix_equals_the_naive_reading(tensors, hidden):
    expected = naive(tensors, hidden)
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    for held in (tensors, prefixed):
        torch.testing.assert_close(_read(held)(hidden), expected, atol=1e-5, rtol=1e-5)
    assert _read({"encoder.layer.0.weight": torch.zeros(2, 2)}) is None


def test_latent_attention_without_a_number_of_heads_has_the_published_eight(latent_block, hidden):
    tensors = latent_block(DIM, 8, HEAD_DIM, inner=INNER)
    found = _read(tensors, {"latent_attention_config": {"model_type": "latent_attention"}})
    torch.testing.assert_close(found(hidden), naive(tensors, hidden, heads=8), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_latent_attention_with_a_tensor_of_another_shape_or_none_is_refused(tensors, name):
    misfit = tensors[name].repeat(*[2] * tensors[name].ndim)
    with pytest.raises(ModelError, match=r"must have the shape|must give num_cross_heads|as a matrix"):
        _read(tensors | {name: misfit})
    if name != NAMES[0]:  # without latents there is no block
        del tensors[name]
        with pytest.raises(ModelError, match=f"must hold {name}"):
            _read(tensors)


@pytest.mark.parametrize("heads", [0, 5, True, "4", None])
def test_latent_attention_of_heads_that_do_not_divide_is_refused(tensors, heads):
    with pytest.raises(ModelError, match="num_cross_heads as a divisor of the 24 rows"):
        _read(tensors, {"latent_attention_config": {"num_cross_heads": heads}})


@pytest.mark.parametrize("num_layers", [None, 1])
def test_nv_embed_is_the_mistral_it_holds(make_nv_embed, make, num_layers):
    outer, inner = (load(folder, layers=num_layers) for folder in (make_nv_embed(), make("mistral")))
    ids = random_ids(outer)
    assert torch.equal(outer.hidden_states(ids, LENGTHS), inner.hidden_states(ids, LENGTHS))


@pytest.mark.parametrize("prefix", ["", "old stone:"])
def test_encode_with_nv_embed_is_the_mean_of_latent_attention_without_the_instruction(
    make_nv_embed, make, prefix
):
    folder = make_nv_embed(2)
    config = encoder_config({"model": str(folder), "precision": "fp32", "query_prefix": prefix})
    assert config.pooling == "latent"
    encoder = DocumentEncoder(config)
    texts = ["the cat sat on the mat", "a river", "old path " * 9]
    tokenizer, model = encoder.backbone.tokenizer, published(make("mistral"))
    tensors = load_file(folder / "model.safetensors")
    for vector, text in zip(encoder.encode_queries(texts), texts, strict=True):
        before, own = (tokenizer.encode(part, add_special_tokens=False).ids for part in (prefix, text))
        ids = np.array([[2, *before, *own, 3]])
        states = naive(tensors, published_hidden(model, ids, np.array([ids.shape[1]]))[0], heads=2)
        mean = states[1 + len(before) if prefix else 0 :].mean(0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)


@pytest.mark.parametrize("inner", [None, [], {"model_type": "gemma"}])
def test_nv_embed_without_its_language_model_is_refused(make_nv_embed, inner):
    folder = make_nv_embed()
    (folder / "config.json").write_text(json.dumps({"model_type": "nvembed", "text_config": inner}))
    with pytest.raises(
        ModelError, match="text_config of an NV-Embed must describe a model of type bidir_mistral"
    ):
        load(folder)
