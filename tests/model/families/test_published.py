"""What every family computes against transformers' own model of the same folder, in all published layouts."""

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
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.packed import Packed
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config
from safetensors.torch import load_file, save_file

from tests.model.published import (
    LENGTHS,
    LLAMA3,
    load,
    native,
    published,
    published_behind_context,
    published_hidden,
    random_ids,
    states_in_all_patterns,
    worst,
)

TODAYS_NAMES = {
    "global_attn_every_n_layers": None,
    "global_rope_theta": None,
    "local_rope_theta": None,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
    },
}
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {})
    for name in (
        "bert",
        "roberta",
        "distilbert",
        "mpnet",
        "modernbert",
        "nomic_bert",
        "new",
        "mistral",
        "qwen2",
        "qwen3",
        "llama",
        "bidirectional_pplx_qwen3",
        "m3bert",
    )
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mpnet prefix": ("mpnet", {"prefix": "mpnet."}),
    "mpnet beyond the buckets": ("mpnet", {"max_position_embeddings": 402}),
    "modernbert prefix": ("modernbert", {"prefix": "model."}),
    "modernbert norm bias": ("modernbert", {"norm_bias": True}),
    "modernbert wide window": ("modernbert", {"local_attention": 41}),
    "modernbert narrow window": ("modernbert", {"local_attention": 2}),
    "modernbert todays names": ("modernbert", TODAYS_NAMES),
    "nomic prefix": ("nomic_bert", {"prefix": "bert."}),
    "nomic base": ("nomic_bert", {"rotary_emb_base": 20}),
    "nomic no types": ("nomic_bert", {"type_vocab_size": 0}),
    "gte plain": ("new", {"rope_scaling": None}),
    "gte factor one": ("new", {"rope_scaling": {"type": "ntk", "factor": 1.0}}),
    "gte no types": ("new", {"type_vocab_size": 0}),
    "gte single projections": ("new", {"pack_qkv": False}),
    "gte prefix": ("new", {"prefix": "new."}),
    "one shared head": ("mistral", {"num_key_value_heads": 1}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama3 todays names": ("llama", {"rope_theta": 1.5, "rope_parameters": LLAMA3 | {"rope_theta": 500.0}}),
    "linear": ("qwen2", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
}
MASKS = [
    *((family, False) for family in PLAIN),
    *((family, True) for family in ("mistral", "qwen2", "qwen3", "llama")),
]
"""Families, and whether the mask is the causal one, which no encoder has."""
CONTEXT = np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)


def with_settings(folder: Path, **changes: Any) -> Path:
    """Change what config.json says and leave the weights as they are."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("lengths", [LENGTHS, np.array([13, 9, 13]), np.array([3, 3])], ids=len)
@pytest.mark.parametrize(("family", "changes"), (PLAIN | VARIANTS).values(), ids=(PLAIN | VARIANTS).keys())
def test_hidden_states_equal_transformers(make, family, changes, lengths) -> None:
    folder = make(family, **changes)
    backbone = load(folder)
    if backbone.max_positions == 400:
        lengths = np.array([400, 150, 9])
    ids = random_ids(backbone, lengths)
    theirs = published_hidden(published(folder), ids, lengths)
    for ours in states_in_all_patterns(backbone, ids, lengths):
        assert worst(ours, theirs, lengths) <= 1e-5
        assert bool(ours.isfinite().all())


@pytest.mark.parametrize(("family", "is_causal"), MASKS)
def test_hidden_states_temperature_and_mask_equal_transformers(make, monkeypatch, family, is_causal) -> None:
    folder = make(family)
    backbone, model = load(folder, causal=is_causal), published(folder)
    if family == "modernbert":
        from transformers.models.modernbert import modeling_modernbert as modernbert

        eager = modernbert.eager_attention_forward
        monkeypatch.setattr(
            modernbert,
            "eager_attention_forward",
            lambda *given, scaling, **others: eager(*given, scaling=scaling / 0.5, **others),
        )
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling /= 0.5
    if family == "mpnet":
        # Its logits are products with queries, and a bias.
        queries = [layer.attention.attn.q for layer in model.encoder.layer]
        for parameters in (model.encoder.relative_attention_bias, *queries):
            for parameter in parameters.parameters():
                parameter.data /= 0.5
    ids = random_ids(backbone)
    theirs, plain = (
        published_hidden(model, ids, LENGTHS, is_causal=is_causal),
        backbone.hidden_states(ids, LENGTHS),
    )
    for ours in states_in_all_patterns(backbone, ids, LENGTHS, temperature=0.5):
        assert worst(ours, theirs) <= 3e-5
        assert worst(ours, plain) > 1e-2


@pytest.mark.parametrize(
    ("family", "changes", "is_causal"),
    [
        *((family, {}, is_causal) for family, is_causal in MASKS),
        ("modernbert", TODAYS_NAMES, False),
    ],
)
def test_hidden_states_behind_context_equal_unplaced_input_embeddings(
    make, family, changes, is_causal
) -> None:
    folder = make(family, **changes)
    backbone, model = load(folder, causal=is_causal), published(folder)
    ids = random_ids(backbone)
    found = states_in_all_patterns(backbone, ids, LENGTHS, CONTEXT)
    for row, length in enumerate(LENGTHS.tolist()):
        theirs = published_behind_context(model, ids[row, :length], CONTEXT, is_causal=is_causal)
        for ours in found:
            assert float((ours[row, :length] - theirs).abs().max()) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("context", [None, CONTEXT], ids=["alone", "context"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "nomic_bert"])
def test_packed_kernels_on_a_gpu_agree_with_the_cpu(make, family, context):
    exact = load(make(family))
    config = EncoderConfig(model=str(make(family)), precision="bf16")
    rounded = load_backbone(config, torch.device("cuda"))
    assert rounded.pattern_type is Packed
    ids = random_ids(exact)
    ours = rounded.hidden_states(ids, LENGTHS, context).float().cpu()
    cosines = torch.cosine_similarity(ours, exact.hidden_states(ids, LENGTHS, context), dim=-1)
    assert min(float(cosines[row, :length].min()) for row, length in enumerate(LENGTHS.tolist())) >= 0.999


@pytest.mark.parametrize("family", ["nomic_bert", "new"])
def test_load_names_of_transformers_give_the_same(make, family) -> None:
    folder = make(family)
    plain = load(folder)
    ids = random_ids(plain)
    before = plain.hidden_states(ids, LENGTHS)
    config, tensors = native(folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    assert worst(load(folder).hidden_states(ids, LENGTHS), before) <= 1e-5


@pytest.mark.parametrize(
    ("family", "changes"),
    [(name, {}) for name in ("bert", "distilbert", "mpnet", "qwen2", "m3bert", "new", "nomic_bert")]
    + [("modernbert", TODAYS_NAMES)],
)
def test_first_layers_are_a_model_of_their_own_with_the_final_norm(make, family, changes) -> None:
    folder = make(family, **changes)
    backbone, model = load(folder, layers=1), published(folder)
    if family in ("bert", "distilbert", "mpnet"):
        stack = model.transformer if family == "distilbert" else model.encoder
        stack.layer = stack.layer[:1]
    else:
        model.layers = model.layers[:1]
    model.config.num_hidden_layers = 1
    ids = random_ids(backbone)
    assert worst(backbone.hidden_states(ids, LENGTHS), published_hidden(model, ids, LENGTHS)) <= 1e-5


CHUNKED = ["the cat sat on the mat. " * 12, "a", "", "walking mountains, rivers; " * 40 + "end"]


def pplx_folder(make: Callable[..., Path], auto_model: str) -> Path:
    """Write a pplx-embed as it is published: nothing frames a text, and a separator is named beside it."""
    folder = make("bidirectional_pplx_qwen3", prefix="", auto_map={"AutoModel": f"modeling.{auto_model}"})
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "special_tokens_map.json").write_text(json.dumps({"sep_token": "[MASK]", "cls_token": "[CLS]"}))
    return folder


@torch.inference_mode()
def pplx_vectors(folder: Path, chunks: list[list[int]], separator: int) -> np.ndarray:
    """Return one document's vectors: chunks joined by separators, the mean of each, tanh, whole numbers."""
    row = [token for chunk in chunks for token in (*chunk, separator)][:-1] or [separator]
    states = published_hidden(published(folder), np.array([row]), np.array([len(row)]))[0]
    ends = np.cumsum([len(chunk) + 1 for chunk in chunks]) - 1
    means = [states[end - len(chunk) : max(end, 1)].mean(0) for end, chunk in zip(ends, chunks, strict=True)]
    codes = (torch.tanh(torch.stack(means)) * 127).round().clamp(-128, 127)
    return torch.nn.functional.normalize(codes, dim=1).numpy()


@pytest.mark.parametrize(
    ("auto_model", "attention"), [("PPLXQwen3ContextualModel", "full"), ("PPLXQwen3Model", "chunk")]
)
def test_pplx_vectors_equal_chunks_read_between_separators(make, auto_model, attention, tmp_path) -> None:
    folder = pplx_folder(make, auto_model)
    chosen = {"model": str(folder), "precision": "fp32", "landmark_interval": 12, "token_bytes": 0}
    encoder = DocumentEncoder(encoder_config(chosen))
    assert (encoder.config.attention, encoder.config.pooling) == (attention, "own")
    tokenizer, separator = encoder.tokenizer, encoder.backbone.landmark_id
    assert (encoder.backbone.cls_id, separator) == (None, tokenizer.token_to_id("[MASK]"))
    encoded = encoder.encode(CHUNKED[:3])
    spans = list(zip(encoded.start_char.tolist(), encoded.end_char.tolist(), strict=True))
    for index, text in enumerate(CHUNKED[:3]):
        own = slice(*encoded.chunk_offsets[index : index + 2].tolist())
        chunks = [tokenizer.encode(text[start:end]).ids for start, end in spans[own]]
        groups = [chunks] if attention == "full" else [[chunk] for chunk in chunks]
        theirs = np.concatenate([pplx_vectors(folder, group, separator) for group in groups])
        np.testing.assert_allclose(encoded.chunk_vectors_MV[own], theirs, atol=1e-5)
    query = "old stone path"
    theirs = pplx_vectors(folder, [tokenizer.encode(query).ids], separator)
    np.testing.assert_allclose(encoder.encode_queries([query]), theirs, atol=1e-5)
    # Longer than the row that its positions allow: windows, and a saved folder that gives the same.
    saved = tmp_path / "saved"
    load_encoder(**{**chosen, "model": str(folder)}).save(saved)
    again = DocumentEncoder(encoder_config({**chosen, "model": str(saved)}))
    vectors, same = (each.encode(CHUNKED).chunk_vectors_MV for each in (encoder, again))
    np.testing.assert_array_equal(vectors, same)


def test_settings_that_are_not_given_are_the_published_ones_and_half_rotated_heads_move_states(make) -> None:
    plain, half = load(make("nomic_bert")), load(make("nomic_bert", rotary_emb_fraction=0.5))
    ids = random_ids(plain)
    assert worst(plain.hidden_states(ids, LENGTHS), half.hidden_states(ids, LENGTHS)) > 1e-2
    bases = {"global_rope_theta": 500.0, "local_rope_theta": 500.0}
    for family, settings, left_out in (
        ("mistral", {"head_dim": 8}, "head_dim"),  # the hidden size divided
        ("modernbert", bases, "local_rope_theta"),  # the global one
        ("new", {"rope_theta": 10_000.0}, "rope_theta"),
        ("new", {"rope_theta": 160_000.0, "model_type": "gte"}, "rope_theta"),
    ):
        folder = make(family, **settings)
        before = load(folder).hidden_states(ids, LENGTHS)
        assert torch.equal(
            load(with_settings(folder, **{left_out: None})).hidden_states(ids, LENGTHS), before
        )


def test_hidden_states_context_without_a_global_layer_is_refused(make) -> None:
    backbone = load(make("modernbert", **TODAYS_NAMES | {"layer_types": ["sliding_attention"] * 4}))
    with pytest.raises(ModelError, match="must have a global layer"):
        backbone.hidden_states(random_ids(backbone), LENGTHS, CONTEXT)


@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert", "nomic_bert"])
def test_hidden_states_row_beyond_the_positions_is_refused(make, family) -> None:
    with pytest.raises(ModelError, match="at most 96 tokens, got 97"):
        load(make(family)).hidden_states(np.full((1, 97), 7), np.array([97]))


@pytest.mark.parametrize(
    ("family", "changes", "bidirectional", "causal"),
    [
        ("modernbert", {"max_position_embeddings": 200}, 200, None),
        ("nomic_bert", {"n_positions": 200}, 200, None),
        (
            "nomic_bert",
            {"n_positions": 200, "rotary_scaling_factor": 2.0, "max_trained_positions": 100},
            100,
            None,
        ),
        ("mistral", {"sliding_window": 40}, 96, 40),
        ("mistral", {"sliding_window": None}, 96, 96),
        ("qwen2", {"sliding_window": 40, "use_sliding_window": False}, 96, 96),
        ("qwen3", {"sliding_window": 40, "use_sliding_window": True}, 96, 40),
    ],
)
def test_positions_come_from_the_configuration_and_end_with_a_causal_window(
    make, family, changes, bidirectional, causal
) -> None:
    folder = make(family, **changes)
    assert load(folder).max_positions == bidirectional
    assert causal is None or load(folder, causal=True).max_positions == causal


def test_fingerprint_of_a_causal_decoder_is_its_own_and_of_a_free_one_the_checkpoints(make) -> None:
    folder = make("qwen3")
    config = EncoderConfig(model=str(folder), precision="fp32")
    free, causal = load(folder), load(folder, causal=True)
    assert free.weights_fingerprint == read_checkpoint(folder).fingerprint != causal.weights_fingerprint
    encoders = [DocumentEncoder(replace(config, causal=is_causal)).fingerprint for is_causal in (False, True)]
    assert encoders[0] != encoders[1]


@pytest.mark.parametrize("family", ["bert", "new"])
def test_causal_encoder_is_refused(make, family) -> None:
    with pytest.raises(ConfigError, match="causal must go with a decoder"):
        load(make(family), causal=True)


_SHAPE = r"must have the shape \(50, 32\), got \(48, 32\)"
_DOUBLE = r"must have the shape \(100, 32\), got \(96, 32\)"
_HEADS = "heads divide into even parts, got 32 for 5 heads"
_PLAIN = "rotary positions must be the plain ones"


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("modernbert", {"hidden_activation": "swish"}, "hidden_activation must be one of"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types must name 4 layers"),
        ("modernbert", {"layer_types": ["causal"] * 4}, "layer_types must name 4 layers"),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, _PLAIN),
        ("modernbert", {"rope_scaling": {"type": "dynamic"}}, _PLAIN),
        ("modernbert", {"intermediate_size": 50}, "mlp.Wi.weight " + _DOUBLE),
        ("modernbert", {"norm_bias": True}, r"must hold embeddings\.norm\.bias"),
        ("modernbert", {"num_hidden_layers": 5}, r"must hold layers\.4\.attn"),
        ("modernbert", {"hidden_size": None}, "must give hidden_size as a positive number, got None"),
        (
            "modernbert",
            {"num_attention_heads": "four"},
            "as a positive number, got 'four'",
        ),
        ("modernbert", {"num_attention_heads": 5}, _HEADS),
        ("nomic_bert", {"prenorm": True}, "prenorm of a NomicBERT must be off"),
        ("nomic_bert", {"num_experts": 8}, "num_experts of a NomicBERT must be off, got 8"),
        ("nomic_bert", {"activation_function": "gelu"}, "must be swiglu or silu, got 'gelu'"),
        ("nomic_bert", {"rope_parameters": {"rope_type": "dynamic"}}, _PLAIN),
        ("nomic_bert", {"n_inner": 50}, "fc12.weight " + _SHAPE),
        ("nomic_bert", {"n_layer": 3}, r"must hold encoder\.layers\.2\.attn\.Wqkv"),
        ("nomic_bert", {"n_embd": None}, "must give n_embd or hidden_size as a positive number, got None"),
        ("new", {"position_embedding_type": "absolute"}, "of a GTE must be 'rope', got 'absolute'"),
        ("new", {"logn_attention_scale": True}, "logn_attention_scale of a GTE must be False, got True"),
        ("new", {"layer_norm_type": "rms_norm"}, "of a GTE must be 'layer_norm', got 'rms_norm'"),
        ("new", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "got 'dynamic' over 1"),
        ("new", {"intermediate_size": 50}, "up_gate_proj.weight " + _DOUBLE),
        ("new", {"type_vocab_size": "two"}, "must give type_vocab_size as a positive number, got 'two'"),
        ("new", {"pack_qkv": False}, r"must hold encoder\.layer\.0\.attention\.q_proj"),
        ("mistral", {"intermediate_size": 50}, "mlp.gate_proj.weight " + _SHAPE),
        ("mistral", {"num_hidden_layers": 3}, r"must hold layers\.2\."),
        ("qwen3", {"model_type": "qwen2"}, r"must hold layers\.0\.self_attn\.q_proj\.bias"),
        ("mistral", {"model_type": "qwen3"}, r"must hold layers\.0\.self_attn\.q_norm"),
        (
            "qwen3",
            {"model_type": "mistral"},
            r"got model\.layers\.0\.self_attn\.k_norm\.weight as well; give the model_type",
        ),
        ("qwen2", {"model_type": "llama"}, r"got model\.layers\.0\.self_attn\.k_proj\.bias as well"),
        ("llama", {"num_key_value_heads": 3}, "got 4 heads for 3 and 12 dimensions"),
        ("llama", {"head_dim": 11}, "even head_dim, got 4 heads for 2 and 11"),
        ("llama", {"vocab_size": 7}, "embed_tokens.weight must have the shape"),
        ("qwen2", {"rope_scaling": "linear"}, "rope_scaling .* must hold settings by name, got 'linear'"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "must be below high_freq_factor"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor .* got None"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters of the model must hold settings by name"),
        ("llama", {"rope_theta": -1}, "must give rope_theta as a positive number, got -1"),
        ("qwen2", {"rope_scaling": {"type": "linear", "factor": True}}, "positive number, got True"),
        ("llama", {"partial_rotary_factor": 0.5}, "over the whole head, got 'default' over 0.5"),
    ],
)
def test_load_model_that_does_not_fit_is_refused_in_one_sentence(make, family, changes, sentence) -> None:
    with pytest.raises(ModelError, match=sentence) as refused:
        load(with_settings(make(family), **changes))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("is_missing", [True, False])
def test_load_norm_that_is_missing_or_in_whole_numbers_is_refused(make, is_missing) -> None:
    folder = make("mistral")
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(
        tensors if is_missing else tensors | {"model.norm.weight": norm.int()}, folder / "model.safetensors"
    )
    with pytest.raises(ModelError, match=r"must hold norm\.weight, got none" if is_missing else "got int32"):
        load(folder)
