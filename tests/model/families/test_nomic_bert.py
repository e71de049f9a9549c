from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.backbone_loader import load_backbone
from safetensors.torch import load_file, save_file

LENGTHS = np.array([61, 40, 7, 1])


def _load(folder, **settings):
    return load_backbone(EncoderConfig(model=str(folder), **({"precision": "fp32"} | settings)))


def _ids(backbone, lengths=LENGTHS):
    ids = np.random.default_rng(0).integers(
        5, len(backbone.token_embeddings), (len(lengths), int(lengths.max()))
    )
    return np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, backbone.pad_id).astype(np.int64)


@torch.inference_mode()
def _published_hidden(model, ids, lengths):
    mask = torch.arange(ids.shape[1])[None] < torch.from_numpy(lengths)[:, None]
    return model(input_ids=torch.from_numpy(ids), attention_mask=mask.long()).last_hidden_state


def _worst(ours, theirs, lengths=LENGTHS):
    return max(
        float((ours[row, :length] - theirs[row, :length]).abs().max())
        for row, length in enumerate(lengths.tolist())
    )


@pytest.fixture(scope="module")
def context():
    return np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)


@pytest.mark.parametrize("lengths", [LENGTHS, np.array([7, 7])], ids=["padded", "equal"])
def test_hidden_states_equal_transformers(nomic_bert_folder, published_model, lengths):
    backbone = _load(nomic_bert_folder)
    ids = _ids(backbone, lengths)
    theirs = _published_hidden(published_model(nomic_bert_folder), ids, lengths)
    assert _worst(backbone.hidden_states(ids, lengths), theirs, lengths) <= 1e-5


def test_hidden_states_in_a_batch_equal_one_by_one(nomic_bert_folder):
    backbone = _load(nomic_bert_folder)
    ids = _ids(backbone)
    together = backbone.hidden_states(ids, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = backbone.hidden_states(ids[row : row + 1, :length], np.array([length]))
        assert float((together[row, :length] - alone[0]).abs().max()) <= 1e-5


def test_hidden_states_temperature_equals_logits_divided_by_it(nomic_bert_folder, published_model):
    backbone, model = _load(nomic_bert_folder), published_model(nomic_bert_folder)
    for layer in model.layers:
        layer.self_attn.scaling /= 0.5
    ids = _ids(backbone)
    sharp = backbone.hidden_states(ids, LENGTHS, temperature=0.5)
    assert _worst(sharp, _published_hidden(model, ids, LENGTHS)) <= 1e-5
    assert _worst(sharp, backbone.hidden_states(ids, LENGTHS)) > 1e-2


@pytest.mark.parametrize("changes", [{"rotary_emb_base": 20}, {"rotary_emb_fraction": 0.5}])
def test_hidden_states_settings_move_them(make_nomic_bert, nomic_bert_folder, changes):
    plain, other = _load(nomic_bert_folder), _load(make_nomic_bert(**changes))
    ids = _ids(plain)
    assert _worst(plain.hidden_states(ids, LENGTHS), other.hidden_states(ids, LENGTHS)) > 1e-2


def test_hidden_states_bf16_agree_in_direction(nomic_bert_folder):
    exact, rounded = (_load(nomic_bert_folder, precision=precision) for precision in ("fp32", "bf16"))
    ids = _ids(exact)
    cosines = torch.cosine_similarity(
        exact.hidden_states(ids, LENGTHS), rounded.hidden_states(ids, LENGTHS).float(), dim=-1
    )
    assert min(float(cosines[row, :length].min()) for row, length in enumerate(LENGTHS.tolist())) >= 0.999


@torch.inference_mode()
def _naive_context_hidden(model, ids, length, context):
    """One text: context as input embeddings at angle 0, the text's positions from 0."""
    positions = torch.cat([torch.zeros(len(context), dtype=torch.long), torch.arange(length)])
    embeds = torch.cat(
        [torch.from_numpy(context), model.embeddings.word_embeddings(torch.from_numpy(ids[:length]))]
    )
    return model(inputs_embeds=embeds[None], position_ids=positions[None]).last_hidden_state[
        0, len(context) :
    ]


def test_hidden_states_context_equals_naive_input_embeddings(nomic_bert_folder, published_model, context):
    backbone, model = _load(nomic_bert_folder), published_model(nomic_bert_folder)
    ids = _ids(backbone)
    ours = backbone.hidden_states(ids, LENGTHS, context)
    for row, length in enumerate(LENGTHS.tolist()):
        assert (
            float((ours[row, :length] - _naive_context_hidden(model, ids[row], length, context)).abs().max())
            <= 1e-5
        )


def test_hidden_states_context_in_another_order_is_the_same(nomic_bert_folder, context):
    backbone = _load(nomic_bert_folder)
    ids = _ids(backbone)
    shuffled = np.ascontiguousarray(context[[3, 0, 5, 1, 4, 2]])
    assert (
        _worst(backbone.hidden_states(ids, LENGTHS, context), backbone.hidden_states(ids, LENGTHS, shuffled))
        <= 1e-5
    )


def test_hidden_states_context_moves_them(nomic_bert_folder, context):
    backbone = _load(nomic_bert_folder)
    ids = _ids(backbone)
    assert _worst(backbone.hidden_states(ids, LENGTHS, context), backbone.hidden_states(ids, LENGTHS)) > 1e-2


def test_hidden_states_row_beyond_the_positions_is_refused(nomic_bert_folder):
    with pytest.raises(ModelError, match="at most 96 tokens, got 97"):
        _load(nomic_bert_folder).hidden_states(np.full((1, 97), 7), np.array([97]))


def test_load_positions_come_from_the_configuration(make_nomic_bert):
    assert _load(make_nomic_bert(n_positions=200)).max_positions == 200


def test_load_stretched_positions_end_where_training_did(make_nomic_bert):
    assert (
        _load(
            make_nomic_bert(n_positions=200, rotary_scaling_factor=2.0, max_trained_positions=100)
        ).max_positions
        == 100
    )


def test_load_weights_below_a_prefix_are_found(make_nomic_bert, nomic_bert_folder):
    prefixed, plain = _load(make_nomic_bert(prefix="bert.")), _load(nomic_bert_folder)
    ids = _ids(plain)
    assert torch.equal(prefixed.hidden_states(ids, LENGTHS), plain.hidden_states(ids, LENGTHS))


def test_load_todays_names_give_the_same(make_nomic_bert, nomic_bert_folder, native_nomic_names):
    folder = make_nomic_bert()
    config = json.loads((folder / "config.json").read_text())
    native = {
        "model_type": "nomic_bert",
        "hidden_size": config["n_embd"],
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"],
        "intermediate_size": config["n_inner"],
        "max_position_embeddings": config["n_positions"],
        "hidden_act": "silu",
        "layer_norm_eps": 1e-12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "vocab_size": config["vocab_size"],
    }
    (folder / "config.json").write_text(json.dumps(native))
    save_file(native_nomic_names(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    renamed, plain = _load(folder), _load(nomic_bert_folder)
    ids = _ids(plain)
    assert torch.equal(renamed.hidden_states(ids, LENGTHS), plain.hidden_states(ids, LENGTHS))


def test_load_without_token_types_adds_none(make_nomic_bert, nomic_bert_folder):
    folder = make_nomic_bert(type_vocab_size=0)
    zeroed = make_nomic_bert()
    tensors = load_file(zeroed / "model.safetensors")
    tensors["embeddings.token_type_embeddings.weight"].zero_()
    save_file(tensors, zeroed / "model.safetensors")
    without, zero = _load(folder), _load(zeroed)
    ids = _ids(zero)
    assert torch.equal(without.hidden_states(ids, LENGTHS), zero.hidden_states(ids, LENGTHS))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prenorm": True}, "prenorm of a NomicBERT must be off"),
        ({"num_experts": 8}, "num_experts of a NomicBERT must be off, got 8"),
        ({"activation_function": "gelu"}, "must be swiglu or silu, got 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rotary positions must be the plain ones"),
        ({"n_inner": 50}, r"fc12.weight must have the shape \(50, 32\), got \(48, 32\)"),
        ({"n_layer": 3}, r"must hold encoder\.layers\.2\.attn\.Wqkv"),
        ({"n_embd": None}, "must give n_embd or hidden_size as a positive number, got None"),
        ({"n_head": 5}, "heads divide into even parts, got 32 for 5 heads"),
    ],
)
def test_load_model_that_does_not_fit_is_refused(make_nomic_bert, changes, sentence):
    with pytest.raises(ModelError, match=sentence):
        _load(make_nomic_bert(**changes))
