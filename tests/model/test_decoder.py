from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from pipeline.config import EncoderConfig
from pipeline.encode.documents import DocumentEncoder
from pipeline.errors import ConfigError, ModelError
from pipeline.model.backbone import load_backbone
from pipeline.model.checkpoint import read_checkpoint
from pipeline.model.latent_attention import read_latent_attention
from pipeline.model.model_defaults import encoder_config
from pipeline.model.packed import Packed

MODEL_TYPES = ("mistral", "qwen2", "qwen3", "llama")
LENGTHS = np.array([41, 40, 7, 1])

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def _load(folder, **settings):
    return load_backbone(EncoderConfig(model=str(folder), **({"precision": "fp32"} | settings)))


def _ids(backbone, lengths=LENGTHS):
    ids = np.random.default_rng(0).integers(5, len(backbone.token_embeddings), (len(lengths), int(lengths.max())))
    return np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, backbone.pad_id).astype(np.int64)


def _published(folder):
    """The folder as transformers reads it: eager, float32, every name used."""
    import transformers

    config = json.loads((folder / "config.json").read_text())
    name = config["model_type"].capitalize()
    settings = getattr(transformers, f"{name}Config")(**config, attn_implementation="eager")
    model = getattr(transformers, f"{name}Model")(settings).eval()
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({key.removeprefix("model."): tensor for key, tensor in tensors.items() if "lm_head" not in key}, strict=True)
    return model


@torch.inference_mode()
def _published_hidden(model, ids, lengths, *, is_causal):
    """All tokens of a row see each other, or those before them; the mask is given whole, so that nothing is added to it."""
    num_tokens = ids.shape[1]
    visible = (torch.arange(num_tokens) < torch.from_numpy(lengths)[:, None])[:, None, None].expand(-1, 1, num_tokens, -1)
    if is_causal:
        visible = visible & torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    return model(input_ids=torch.from_numpy(ids), attention_mask=bias, use_cache=False).last_hidden_state


def _worst(ours, theirs, lengths=LENGTHS):
    return max(float((ours[row, :length] - theirs[row, :length]).abs().max()) for row, length in enumerate(lengths.tolist()))


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("lengths", [LENGTHS, np.array([17, 17])], ids=["padded", "equal"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hidden_states_equal_transformers(make_decoder, model_type, lengths, is_causal):
    folder = make_decoder(model_type)
    backbone = _load(folder, causal=is_causal)
    ids = _ids(backbone, lengths)
    theirs = _published_hidden(_published(folder), ids, lengths, is_causal=is_causal)
    assert _worst(backbone.hidden_states(ids, lengths), theirs, lengths) <= 1e-5


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
def test_hidden_states_of_variants_equal_transformers(make_decoder, model_type, changes):
    folder = make_decoder(model_type, **changes)
    backbone = _load(folder)
    ids = _ids(backbone)
    theirs = _published_hidden(_published(folder), ids, LENGTHS, is_causal=False)
    assert _worst(backbone.hidden_states(ids, LENGTHS), theirs) <= 1e-5


def test_hidden_states_head_width_that_is_not_given_is_the_hidden_size_divided(make_decoder):
    folder = make_decoder("mistral", head_dim=8)
    config = json.loads((folder / "config.json").read_text())
    given = _load(folder)
    ids = _ids(given)
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if name != "head_dim"}))
    assert torch.equal(_load(folder).hidden_states(ids, LENGTHS), given.hidden_states(ids, LENGTHS))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hidden_states_causal_equals_the_published_forward_pass(make_decoder, model_type):
    """Without any mask of ours: one row through the model as its authors run it."""
    folder = make_decoder(model_type)
    backbone = _load(folder, causal=True)
    ids = _ids(backbone, np.array([30]))
    with torch.inference_mode():
        theirs = _published(folder)(input_ids=torch.from_numpy(ids), use_cache=False).last_hidden_state
    assert _worst(backbone.hidden_states(ids, np.array([30])), theirs, np.array([30])) <= 1e-5


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hidden_states_in_a_batch_equal_one_by_one(make_decoder, model_type, is_causal):
    backbone = _load(make_decoder(model_type), causal=is_causal)
    ids = _ids(backbone)
    together = backbone.hidden_states(ids, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = backbone.hidden_states(ids[row : row + 1, :length], np.array([length]))
        assert float((together[row, :length] - alone[0]).abs().max()) <= 1e-5


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hidden_states_temperature_equals_logits_divided_by_it(make_decoder, model_type, is_causal):
    folder = make_decoder(model_type)
    backbone, model = _load(folder, causal=is_causal), _published(folder)
    for layer in model.layers:
        layer.self_attn.scaling /= 0.5
    ids = _ids(backbone)
    theirs = _published_hidden(model, ids, LENGTHS, is_causal=is_causal)
    assert _worst(backbone.hidden_states(ids, LENGTHS, temperature=0.5), theirs) <= 1e-5


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hidden_states_bf16_agree_in_direction(make_decoder, model_type):
    folder = make_decoder(model_type)
    exact, rounded = (_load(folder, precision=precision) for precision in ("fp32", "bf16"))
    ids = _ids(exact)
    cosines = torch.cosine_similarity(exact.hidden_states(ids, LENGTHS), rounded.hidden_states(ids, LENGTHS).float(), dim=-1)
    assert min(float(cosines[row, :length].min()) for row, length in enumerate(LENGTHS.tolist())) >= 0.999


def test_hidden_states_causal_do_not_know_what_follows(make_decoder):
    folder = make_decoder("qwen3")
    causal, free = _load(folder, causal=True), _load(folder)
    ids = _ids(causal, np.array([20]))
    other = ids.copy()
    other[0, 15:] = 9
    length = np.array([20])
    assert _worst(causal.hidden_states(ids, length), causal.hidden_states(other, length), np.array([15])) == 0
    assert _worst(free.hidden_states(ids, length), free.hidden_states(other, length), np.array([15])) > 1e-2


@pytest.fixture(scope="module")
def context():
    return np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hidden_states_context_equals_unrotated_input_embeddings(make_decoder, context, model_type, is_causal):
    folder = make_decoder(model_type)
    backbone, model = _load(folder, causal=is_causal), _published(folder)
    ids, num_context = _ids(backbone), len(context)
    ours = backbone.hidden_states(ids, LENGTHS, context)
    for row, length in enumerate(LENGTHS.tolist()):
        positions = torch.cat([torch.zeros(num_context, dtype=torch.long), torch.arange(length)])
        embeds = torch.cat([torch.from_numpy(context), model.embed_tokens(torch.from_numpy(ids[row, :length]))])
        visible = torch.ones(len(embeds), len(embeds), dtype=torch.bool)
        if is_causal:
            visible = visible.tril() | (torch.arange(len(embeds)) < num_context)
        bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
        with torch.inference_mode():
            theirs = model(inputs_embeds=embeds[None], position_ids=positions[None], attention_mask=bias, use_cache=False)
        assert float((ours[row, :length] - theirs.last_hidden_state[0, num_context:]).abs().max()) <= 1e-5


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("with_context", [False, True], ids=["alone", "context"])
@pytest.mark.parametrize("model_type", ["qwen3", "mistral"])
def test_packed_rows_equal_the_rectangle(make_decoder, context, model_type, with_context, is_causal):
    backbone, given = _load(make_decoder(model_type), causal=is_causal), context if with_context else None
    ids = _ids(backbone)
    padded = backbone.hidden_states(ids, LENGTHS, given, 0.7)
    backbone.pattern_type = Packed
    assert _worst(backbone.hidden_states(ids, LENGTHS, given, 0.7), padded) <= 1e-5


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("num_unplaced", [0, 5, 9])
def test_packed_lead_with_positions_equals_the_rectangle(make_decoder, num_unplaced, is_causal):
    backbone = _load(make_decoder("qwen2"), causal=is_causal)
    x = torch.randn(len(LENGTHS), 9 + 41, 32, generator=torch.Generator().manual_seed(0))
    padded = backbone.encode_embedded(x.clone(), LENGTHS, num_lead=9, num_unplaced=num_unplaced)
    backbone.pattern_type = Packed
    assert _worst(backbone.encode_embedded(x.clone(), LENGTHS, num_lead=9, num_unplaced=num_unplaced), padded) <= 1e-5


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_hidden_states_context_in_another_order_is_the_same(make_decoder, context, is_causal):
    backbone = _load(make_decoder("qwen3"), causal=is_causal)
    ids = _ids(backbone)
    shuffled = np.ascontiguousarray(context[[3, 0, 5, 1, 4, 2]])
    assert _worst(backbone.hidden_states(ids, LENGTHS, context), backbone.hidden_states(ids, LENGTHS, shuffled)) <= 1e-5


def test_fingerprint_of_a_causal_decoder_is_its_own_and_of_a_free_one_the_checkpoints(make_decoder):
    folder = make_decoder("qwen3")
    config = EncoderConfig(model=str(folder), precision="fp32")
    free, causal = _load(folder), _load(folder, causal=True)
    assert free.weights_fingerprint == read_checkpoint(folder).fingerprint != causal.weights_fingerprint
    encoders = [DocumentEncoder(replace(config, causal=is_causal)).fingerprint for is_causal in (False, True)]
    assert encoders[0] != encoders[1]


def test_first_layers_are_a_model_of_their_own_with_the_final_norm(make_decoder):
    folder = make_decoder("qwen2")
    backbone, model = _load(folder, num_layers=1), _published(folder)
    model.layers = model.layers[:1]
    model.config.num_hidden_layers = 1
    ids = _ids(backbone)
    assert _worst(backbone.hidden_states(ids, LENGTHS), _published_hidden(model, ids, LENGTHS, is_causal=False)) <= 1e-5


@pytest.mark.parametrize(
    ("model_type", "changes", "bidirectional", "causal"),
    [
        ("mistral", {"sliding_window": 40}, 96, 40),
        ("mistral", {"sliding_window": None}, 96, 96),
        ("qwen2", {"sliding_window": 40, "use_sliding_window": False}, 96, 96),
        ("qwen3", {"sliding_window": 40, "use_sliding_window": True}, 96, 40),
    ],
)
def test_positions_of_a_causal_decoder_end_with_its_window(make_decoder, model_type, changes, bidirectional, causal):
    folder = make_decoder(model_type, **changes)
    assert (_load(folder).max_positions, _load(folder, causal=True).max_positions) == (bidirectional, causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_hidden_states_of_a_sliding_window_equal_transformers(make_decoder, is_causal):
    folder = make_decoder("mistral", sliding_window=41)
    backbone = _load(folder, causal=is_causal)
    ids = _ids(backbone, np.array([41]))
    model = _published(folder)
    if is_causal:
        with torch.inference_mode():
            theirs = model(input_ids=torch.from_numpy(ids), use_cache=False).last_hidden_state
    else:
        theirs = _published_hidden(model, ids, np.array([41]), is_causal=False)
    assert _worst(backbone.hidden_states(ids, np.array([41])), theirs, np.array([41])) <= 1e-5


def test_causal_encoder_is_refused(tiny_model_folder):
    with pytest.raises(ConfigError, match="causal must go with a decoder"):
        _load(tiny_model_folder, causal=True)


@pytest.mark.parametrize("prefix", ["", "embedding_model."])
def test_load_weights_are_found_below_any_prefix(make_decoder, prefix):
    bare, prefixed = _load(make_decoder("mistral", prefix=prefix)), _load(make_decoder("mistral"))
    ids = _ids(bare)
    assert torch.equal(bare.hidden_states(ids, LENGTHS), prefixed.hidden_states(ids, LENGTHS))


@pytest.fixture
def nv_embed_folder(make_decoder):
    """A Mistral as NV-Embed publishes it: below a prefix, its configuration inside another."""
    folder = make_decoder("mistral", prefix="embedding_model.")
    inner = json.loads((folder / "config.json").read_text()) | {"model_type": "bidir_mistral"}
    outer = {"model_type": "nvembed", "text_config": inner, "latent_attention_config": {"model_type": "latent_attention"}}
    (folder / "config.json").write_text(json.dumps(outer))
    return folder


@pytest.mark.parametrize("num_layers", [None, 1])
def test_nv_embed_is_the_mistral_it_holds(nv_embed_folder, make_decoder, num_layers):
    outer, inner = _load(nv_embed_folder, num_layers=num_layers), _load(make_decoder("mistral"), num_layers=num_layers)
    ids = _ids(outer)
    assert torch.equal(outer.hidden_states(ids, LENGTHS), inner.hidden_states(ids, LENGTHS))


@pytest.fixture
def nv_embed_with_latents(nv_embed_folder, latent_block):
    """The same with its latent attention of two heads."""
    tensors = load_file(nv_embed_folder / "model.safetensors") | latent_block(32, 2, 16)
    save_file(tensors, nv_embed_folder / "model.safetensors")
    config = json.loads((nv_embed_folder / "config.json").read_text())
    config["latent_attention_config"]["num_cross_heads"] = 2
    (nv_embed_folder / "config.json").write_text(json.dumps(config))
    return nv_embed_folder


@pytest.mark.parametrize("prefix", ["", "old stone:"])
def test_encode_with_nv_embed_is_the_mean_of_latent_attention_without_the_instruction(nv_embed_with_latents, make_decoder, prefix):
    config = encoder_config({"model": str(nv_embed_with_latents), "precision": "fp32", "query_prefix": prefix})
    assert config.pooling == "latent"
    encoder = DocumentEncoder(config)
    texts = ["the cat sat on the mat", "a river", "old path " * 9]
    tokenizer, model = encoder.backbone.tokenizer, _published(make_decoder("mistral"))
    block = read_latent_attention(
        load_file(nv_embed_with_latents / "model.safetensors"),
        json.loads((nv_embed_with_latents / "config.json").read_text()),
        model_dim=32,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for vector, text in zip(encoder.encode_queries(texts), texts, strict=True):
        before, own = (tokenizer.encode(part, add_special_tokens=False).ids for part in (prefix, text))
        ids = np.array([[2, *before, *own, 3]])
        states = block(_published_hidden(model, ids, np.array([ids.shape[1]]), is_causal=False))[0]
        mean = states[1 + len(before) if prefix else 0 :].mean(0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)


def test_nv_embed_causal_is_refused(nv_embed_folder):
    with pytest.raises(ConfigError, match="got a model of type nvembed"):
        _load(nv_embed_folder, causal=True)


@pytest.mark.parametrize("inner", [None, [], {"model_type": "gemma"}])
def test_nv_embed_without_its_language_model_is_refused(nv_embed_folder, inner):
    (nv_embed_folder / "config.json").write_text(json.dumps({"model_type": "nvembed", "text_config": inner}))
    with pytest.raises(ModelError, match="text_config of an NV-Embed must describe a model of type bidir_mistral"):
        _load(nv_embed_folder)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("with_context", [False, True], ids=["alone", "context"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_packed_kernels_on_a_gpu_agree_with_the_cpu(make_decoder, context, model_type, with_context, is_causal):
    folder, given = make_decoder(model_type, head_dim=8), context if with_context else None
    exact = _load(folder, causal=is_causal)
    rounded = load_backbone(EncoderConfig(model=str(folder), precision="bf16", causal=is_causal), torch.device("cuda"))
    assert rounded.pattern_type is Packed
    ids = _ids(exact)
    cosines = torch.cosine_similarity(
        rounded.hidden_states(ids, LENGTHS, given).float().cpu(), exact.hidden_states(ids, LENGTHS, given), dim=-1
    )
    assert min(float(cosines[row, :length].min()) for row, length in enumerate(LENGTHS.tolist())) >= 0.999


@pytest.mark.parametrize(
    ("model_type", "changes", "sentence"),
    [
        ("mistral", {"intermediate_size": 50}, r"mlp.gate_proj.weight must have the shape \(50, 32\), got \(48, 32\)"),
        ("mistral", {"num_hidden_layers": 3}, r"must hold layers\.2\."),
        ("qwen3", {"model_type": "qwen2"}, r"must hold layers\.0\.self_attn\.q_proj\.bias"),
        ("mistral", {"model_type": "qwen3"}, r"must hold layers\.0\.self_attn\.q_norm"),
        ("qwen3", {"model_type": "mistral"}, r"got model\.layers\.0\.self_attn\.k_norm\.weight as well; give the model_type"),
        ("qwen2", {"model_type": "llama"}, r"got model\.layers\.0\.self_attn\.k_proj\.bias as well"),
        ("llama", {"num_key_value_heads": 3}, "multiple of num_key_value_heads .* got 4 heads for 3 and 12 dimensions"),
        ("llama", {"head_dim": 11}, "even head_dim, got 4 heads for 2 and 11"),
        ("llama", {"hidden_size": None}, "must give hidden_size as a positive number, got None"),
        ("llama", {"vocab_size": 7}, "embed_tokens.weight must have the shape"),
        ("llama", {"hidden_act": "swish"}, "hidden_act must be one of"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "kind among default, linear, llama3, ntk .* got 'yarn'"),
        ("qwen2", {"rope_scaling": "linear"}, "rope_scaling of the model must hold settings by name, got 'linear'"),
        ("qwen2", {"rope_scaling": {"type": "linear"}}, "factor of the model's rotary positions must be a positive number, got None"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor must be below high_freq_factor, got 4 and 4"),
        ("llama", {"partial_rotary_factor": 0.5}, "over the whole head, got 'default' over 0.5"),
    ],
)
def test_load_model_that_does_not_fit_is_refused_in_one_sentence(make_decoder, model_type, changes, sentence):
    folder = make_decoder(model_type)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=sentence) as refused:
        _load(folder)
    assert "\n" not in str(refused.value)


def test_load_of_weights_in_whole_numbers_is_refused(make_decoder):
    folder = make_decoder("mistral")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"norm\.weight of the model must hold numbers of .*, got int32; fetch a model"):
        _load(folder)


def test_load_without_a_norm_is_refused(make_decoder):
    folder = make_decoder("mistral")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"must hold norm\.weight, got none"):
        _load(folder)


@pytest.fixture(scope="module")
def qwen_folder(make_decoder):
    """A decoder with a byte-level tokenizer as Qwen's embedding models have it: no BOS, an ending of its own, another eos_token."""
    from tokenizers import decoders, models, pre_tokenizers, processors

    folder = make_decoder("qwen3", vocab_size=None)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġt", "Ġth", "Ġthe", "th", "the"]
    merges = [("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"), ("t", "h"), ("th", "e")]
    vocab = {token: index for index, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    ending = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", ending)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    size = tokenizer.get_vocab_size()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.randn(size, 32, generator=torch.Generator().manual_seed(6))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    return folder


def test_encode_causal_with_last_pooling_equals_the_last_token_of_the_published_model(qwen_folder):
    texts = ["the way", "a mat, the 😀 stone", ""]
    config = EncoderConfig(model=str(qwen_folder), precision="fp32", causal=True, pooling="last")
    vectors = DocumentEncoder(config).encode(texts).document_vectors_NV
    model, tokenizer = _published(qwen_folder), Tokenizer.from_file(str(qwen_folder / "tokenizer.json"))
    for vector, text in zip(vectors, texts, strict=True):
        with torch.inference_mode():
            last = model(input_ids=torch.tensor([tokenizer.encode(text).ids]), use_cache=False).last_hidden_state[0, -1]
        np.testing.assert_allclose(vector, (last / last.norm()).numpy(), atol=1e-5)


def test_encode_with_a_byte_level_tokenizer_covers_every_text(qwen_folder):
    texts = ["the 😀👩‍🚀 stone, the mat " * 9, "é" * 50, "\n\t the"]
    encoded = DocumentEncoder(EncoderConfig(model=str(qwen_folder), precision="fp32", landmark_interval=16)).encode(texts)
    for index, text in enumerate(texts):
        own = slice(*encoded.chunk_offsets[index : index + 2])
        assert "".join(text[start:end] for start, end in zip(encoded.start_char[own], encoded.end_char[own], strict=True)) == text
