"""What a decoder computes against transformers' own.

With and without its causal mask, in batches, behind a context, packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.packed import Packed
from cairn.pipeline.model.folders.checkpoint import read_checkpoint

from tests.model.decoders import LENGTHS, LLAMA3, load, published, published_hidden, random_ids, worst

MODEL_TYPES = ("mistral", "qwen2", "qwen3", "llama")


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("lengths", [LENGTHS, np.array([17, 17])], ids=["padded", "equal"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hidden_states_equal_transformers(
    make_decoder: Callable[..., Path], model_type: str, lengths: np.ndarray, is_causal: bool
) -> None:
    folder = make_decoder(model_type)
    backbone = load(folder, causal=is_causal)
    ids = random_ids(backbone, lengths)
    theirs = published_hidden(published(folder), ids, lengths, is_causal=is_causal)
    assert worst(backbone.hidden_states(ids, lengths), theirs, lengths) <= 1e-5


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"head_dim": None, "num_key_value_heads": 4} | {"head_dim": 8}),
        ("mistral", {"num_key_value_heads": 1}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"rope_scaling": LLAMA3}),
        ("llama", {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 500.0}}),
        ("qwen2", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ],
    ids=["all heads", "one shared head", "biases", "qwen3 biases", "llama3", "todays names", "linear"],
)
def test_hidden_states_of_variants_equal_transformers(
    make_decoder: Callable[..., Path], model_type: str, changes: dict[str, Any]
) -> None:
    folder = make_decoder(model_type, **changes)
    backbone = load(folder)
    ids = random_ids(backbone)
    theirs = published_hidden(published(folder), ids, LENGTHS, is_causal=False)
    assert worst(backbone.hidden_states(ids, LENGTHS), theirs) <= 1e-5


def test_hidden_states_head_width_that_is_not_given_is_the_hidden_size_divided(
    make_decoder: Callable[..., Path],
) -> None:
    folder = make_decoder("mistral", head_dim=8)
    config = json.loads((folder / "config.json").read_text())
    given = load(folder)
    ids = random_ids(given)
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if name != "head_dim"})
    )
    assert torch.equal(load(folder).hidden_states(ids, LENGTHS), given.hidden_states(ids, LENGTHS))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hidden_states_causal_equals_the_published_forward_pass(
    make_decoder: Callable[..., Path], model_type: str
) -> None:
    """Without any mask of ours: one row through the model as its authors run it."""
    folder = make_decoder(model_type)
    backbone = load(folder, causal=True)
    ids = random_ids(backbone, np.array([30]))
    with torch.inference_mode():
        theirs = published(folder)(input_ids=torch.from_numpy(ids), use_cache=False).last_hidden_state
    assert worst(backbone.hidden_states(ids, np.array([30])), theirs, np.array([30])) <= 1e-5


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hidden_states_in_a_batch_equal_one_by_one(
    make_decoder: Callable[..., Path], model_type: str, is_causal: bool
) -> None:
    backbone = load(make_decoder(model_type), causal=is_causal)
    ids = random_ids(backbone)
    together = backbone.hidden_states(ids, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = backbone.hidden_states(ids[row : row + 1, :length], np.array([length]))
        assert float((together[row, :length] - alone[0]).abs().max()) <= 1e-5


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hidden_states_temperature_equals_logits_divided_by_it(
    make_decoder: Callable[..., Path], model_type: str, is_causal: bool
) -> None:
    folder = make_decoder(model_type)
    backbone, model = load(folder, causal=is_causal), published(folder)
    for layer in model.layers:
        layer.self_attn.scaling /= 0.5
    ids = random_ids(backbone)
    theirs = published_hidden(model, ids, LENGTHS, is_causal=is_causal)
    assert worst(backbone.hidden_states(ids, LENGTHS, temperature=0.5), theirs) <= 1e-5


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hidden_states_bf16_agree_in_direction(make_decoder: Callable[..., Path], model_type: str) -> None:
    folder = make_decoder(model_type)
    exact, rounded = (load(folder, precision=precision) for precision in ("fp32", "bf16"))
    ids = random_ids(exact)
    cosines = torch.cosine_similarity(
        exact.hidden_states(ids, LENGTHS), rounded.hidden_states(ids, LENGTHS).float(), dim=-1
    )
    assert min(float(cosines[row, :length].min()) for row, length in enumerate(LENGTHS.tolist())) >= 0.999


def test_hidden_states_causal_do_not_know_what_follows(make_decoder: Callable[..., Path]) -> None:
    folder = make_decoder("qwen3")
    causal, free = load(folder, causal=True), load(folder)
    ids = random_ids(causal, np.array([20]))
    other = ids.copy()
    other[0, 15:] = 9
    length = np.array([20])
    assert worst(causal.hidden_states(ids, length), causal.hidden_states(other, length), np.array([15])) == 0
    assert worst(free.hidden_states(ids, length), free.hidden_states(other, length), np.array([15])) > 1e-2


@pytest.fixture(scope="module")
def context() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hidden_states_context_equals_unrotated_input_embeddings(
    make_decoder: Callable[..., Path], context: np.ndarray, model_type: str, is_causal: bool
) -> None:
    folder = make_decoder(model_type)
    backbone, model = load(folder, causal=is_causal), published(folder)
    ids, num_context = random_ids(backbone), len(context)
    ours = backbone.hidden_states(ids, LENGTHS, context)
    for row, length in enumerate(LENGTHS.tolist()):
        positions = torch.cat([torch.zeros(num_context, dtype=torch.long), torch.arange(length)])
        embeds = torch.cat(
            [torch.from_numpy(context), model.embed_tokens(torch.from_numpy(ids[row, :length]))]
        )
        visible = torch.ones(len(embeds), len(embeds), dtype=torch.bool)
        if is_causal:
            visible = visible.tril() | (torch.arange(len(embeds)) < num_context)
        bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
        with torch.inference_mode():
            theirs = model(
                inputs_embeds=embeds[None], position_ids=positions[None], attention_mask=bias, use_cache=False
            )
        assert float((ours[row, :length] - theirs.last_hidden_state[0, num_context:]).abs().max()) <= 1e-5


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("with_context", [False, True], ids=["alone", "context"])
@pytest.mark.parametrize("model_type", ["qwen3", "mistral"])
def test_packed_rows_equal_the_rectangle(
    make_decoder: Callable[..., Path],
    context: np.ndarray,
    model_type: str,
    with_context: bool,
    is_causal: bool,
) -> None:
    backbone, given = load(make_decoder(model_type), causal=is_causal), context if with_context else None
    ids = random_ids(backbone)
    padded = backbone.hidden_states(ids, LENGTHS, given, 0.7)
    backbone.pattern_type = Packed
    assert worst(backbone.hidden_states(ids, LENGTHS, given, 0.7), padded) <= 1e-5


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("num_unplaced", [0, 5, 9])
def test_packed_lead_with_positions_equals_the_rectangle(
    make_decoder: Callable[..., Path], num_unplaced: int, is_causal: bool
) -> None:
    backbone = load(make_decoder("qwen2"), causal=is_causal)
    x = torch.randn(len(LENGTHS), 9 + 41, 32, generator=torch.Generator().manual_seed(0))
    padded = backbone.encode_embedded(x.clone(), LENGTHS, num_lead=9, num_unplaced=num_unplaced)
    backbone.pattern_type = Packed
    assert (
        worst(backbone.encode_embedded(x.clone(), LENGTHS, num_lead=9, num_unplaced=num_unplaced), padded)
        <= 1e-5
    )


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_hidden_states_context_in_another_order_is_the_same(
    make_decoder: Callable[..., Path], context: np.ndarray, is_causal: bool
) -> None:
    backbone = load(make_decoder("qwen3"), causal=is_causal)
    ids = random_ids(backbone)
    shuffled = np.ascontiguousarray(context[[3, 0, 5, 1, 4, 2]])
    assert (
        worst(backbone.hidden_states(ids, LENGTHS, context), backbone.hidden_states(ids, LENGTHS, shuffled))
        <= 1e-5
    )


def test_fingerprint_of_a_causal_decoder_is_its_own_and_of_a_free_one_the_checkpoints(
    make_decoder: Callable[..., Path],
) -> None:
    folder = make_decoder("qwen3")
    config = EncoderConfig(model=str(folder), precision="fp32")
    free, causal = load(folder), load(folder, causal=True)
    assert free.weights_fingerprint == read_checkpoint(folder).fingerprint != causal.weights_fingerprint
    encoders = [DocumentEncoder(replace(config, causal=is_causal)).fingerprint for is_causal in (False, True)]
    assert encoders[0] != encoders[1]


def test_first_layers_are_a_model_of_their_own_with_the_final_norm(make_decoder: Callable[..., Path]) -> None:
    folder = make_decoder("qwen2")
    backbone, model = load(folder, layers=1), published(folder)
    model.layers = model.layers[:1]
    model.config.num_hidden_layers = 1
    ids = random_ids(backbone)
    assert (
        worst(backbone.hidden_states(ids, LENGTHS), published_hidden(model, ids, LENGTHS, is_causal=False))
        <= 1e-5
    )


@pytest.mark.parametrize(
    ("model_type", "changes", "bidirectional", "causal"),
    [
        ("mistral", {"sliding_window": 40}, 96, 40),
        ("mistral", {"sliding_window": None}, 96, 96),
        ("qwen2", {"sliding_window": 40, "use_sliding_window": False}, 96, 96),
        ("qwen3", {"sliding_window": 40, "use_sliding_window": True}, 96, 40),
    ],
)
def test_positions_of_a_causal_decoder_end_with_its_window(
    make_decoder: Callable[..., Path],
    model_type: str,
    changes: dict[str, Any],
    bidirectional: int,
    causal: int,
) -> None:
    folder = make_decoder(model_type, **changes)
    assert (load(folder).max_positions, load(folder, causal=True).max_positions) == (bidirectional, causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_hidden_states_of_a_sliding_window_equal_transformers(
    make_decoder: Callable[..., Path], is_causal: bool
) -> None:
    folder = make_decoder("mistral", sliding_window=41)
    backbone = load(folder, causal=is_causal)
    ids = random_ids(backbone, np.array([41]))
    model = published(folder)
    if is_causal:
        with torch.inference_mode():
            theirs = model(input_ids=torch.from_numpy(ids), use_cache=False).last_hidden_state
    else:
        theirs = published_hidden(model, ids, np.array([41]), is_causal=False)
    assert worst(backbone.hidden_states(ids, np.array([41])), theirs, np.array([41])) <= 1e-5


def test_causal_encoder_is_refused(tiny_model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="causal must go with a decoder"):
        load(tiny_model_folder, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("with_context", [False, True], ids=["alone", "context"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_packed_kernels_on_a_gpu_agree_with_the_cpu(
    make_decoder: Callable[..., Path],
    context: np.ndarray,
    model_type: str,
    with_context: bool,
    is_causal: bool,
) -> None:
    folder, given = make_decoder(model_type, head_dim=8), context if with_context else None
    exact = load(folder, causal=is_causal)
    rounded: Any = load_backbone(
        EncoderConfig(model=str(folder), precision="bf16", causal=is_causal), torch.device("cuda")
    )
    assert rounded.pattern_type is Packed
    ids = random_ids(exact)
    cosines = torch.cosine_similarity(
        rounded.hidden_states(ids, LENGTHS, given).float().cpu(),
        exact.hidden_states(ids, LENGTHS, given),
        dim=-1,
    )
    assert min(float(cosines[row, :length].min()) for row, length in enumerate(LENGTHS.tolist())) >= 0.999
