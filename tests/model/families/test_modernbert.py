from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.backbone_loader import load_backbone

LENGTHS = np.array([61, 40, 7, 1])
"""The longest is several blocks long, the others end inside one."""

SHORT = np.array([13, 9, 13])
"""Longer than the window, shorter than the keys of one block."""

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


def _load(folder, **settings):
    return load_backbone(EncoderConfig(model=str(folder), **({"precision": "fp32"} | settings)))


def _ids(backbone, lengths):
    ids = np.random.default_rng(0).integers(
        5, len(backbone.token_embeddings), (len(lengths), int(lengths.max()))
    )
    return np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, backbone.pad_id).astype(np.int64)


@torch.inference_mode()
def _published_hidden(model, ids, lengths):
    mask = torch.arange(ids.shape[1])[None] < torch.from_numpy(lengths)[:, None]
    return model(input_ids=torch.from_numpy(ids), attention_mask=mask.long()).last_hidden_state


def _worst(ours, theirs, lengths):
    return max(
        float((ours[row, :length] - theirs[row, :length]).abs().max())
        for row, length in enumerate(lengths.tolist())
    )


@pytest.mark.parametrize(
    "lengths",
    [LENGTHS, np.array([61, 61]), SHORT, np.array([3, 3])],
    ids=["padded", "equal", "short", "tiny"],
)
@pytest.mark.parametrize(
    "changes",
    [{}, {"prefix": "model."}, {"bias": True}, {"local_attention": 41}, {"local_attention": 2}, TODAYS_NAMES],
    ids=["older names", "prefix", "norm bias", "wide window", "narrow window", "todays names"],
)
def test_hidden_states_equal_transformers(make_modernbert, published_model, changes, lengths):
    folder = make_modernbert(**changes)
    backbone, model = _load(folder), published_model(folder)
    ids = _ids(backbone, lengths)
    assert (
        _worst(backbone.hidden_states(ids, lengths), _published_hidden(model, ids, lengths), lengths) <= 1e-5
    )


@pytest.mark.parametrize("lengths", [LENGTHS, SHORT], ids=["blocks", "short"])
def test_hidden_states_in_a_batch_equal_one_by_one(modernbert_folder, lengths):
    backbone = _load(modernbert_folder)
    ids = _ids(backbone, lengths)
    together = backbone.hidden_states(ids, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = backbone.hidden_states(ids[row : row + 1, :length], np.array([length]))
        assert float((together[row, :length] - alone[0]).abs().max()) <= 1e-5


@pytest.mark.parametrize("lengths", [LENGTHS, SHORT], ids=["blocks", "short"])
def test_hidden_states_of_padding_are_finite(modernbert_folder, lengths):
    backbone = _load(modernbert_folder)
    assert bool(backbone.hidden_states(_ids(backbone, lengths), lengths).isfinite().all())


def test_hidden_states_temperature_equals_logits_divided_by_it(
    modernbert_folder, published_model, monkeypatch
):
    from transformers.models.modernbert import modeling_modernbert

    eager = modeling_modernbert.eager_attention_forward

    def divided(*arguments, scaling, **others):
        return eager(*arguments, scaling=scaling / 0.5, **others)

    monkeypatch.setattr(modeling_modernbert, "eager_attention_forward", divided)
    backbone = _load(modernbert_folder)
    ids = _ids(backbone, LENGTHS)
    theirs = _published_hidden(published_model(modernbert_folder), ids, LENGTHS)
    sharp = backbone.hidden_states(ids, LENGTHS, temperature=0.5)
    assert _worst(sharp, theirs, LENGTHS) <= 1e-5
    assert _worst(sharp, backbone.hidden_states(ids, LENGTHS), LENGTHS) > 1e-2


@pytest.mark.parametrize(
    "changes", [{"local_attention": 16}, {"local_rope_theta": 50.0}, {"global_rope_theta": 50.0}]
)
def test_hidden_states_settings_move_them(make_modernbert, modernbert_folder, changes):
    plain, other = _load(modernbert_folder), _load(make_modernbert(**changes))
    ids = _ids(plain, LENGTHS)
    assert _worst(plain.hidden_states(ids, LENGTHS), other.hidden_states(ids, LENGTHS), LENGTHS) > 1e-2


def test_hidden_states_bf16_agree_in_direction(modernbert_folder):
    exact, rounded = (_load(modernbert_folder, precision=precision) for precision in ("fp32", "bf16"))
    ids = _ids(exact, LENGTHS)
    ours, theirs = exact.hidden_states(ids, LENGTHS), rounded.hidden_states(ids, LENGTHS).float()
    cosines = torch.cosine_similarity(ours, theirs, dim=-1)
    assert min(float(cosines[row, :length].min()) for row, length in enumerate(LENGTHS.tolist())) >= 0.999


@pytest.fixture(scope="module")
def context():
    return np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)


@torch.inference_mode()
def _naive_context_hidden(model, ids, length, context, radius):
    """One text: context as input embeddings at angle 0, unseen and unseeing in local layers.

    The text's positions from 0.
    """
    num_context = len(context)
    positions = torch.cat([torch.zeros(num_context, dtype=torch.long), torch.arange(length)])
    place = torch.arange(num_context + length)
    near = (
        ((place[:, None] - place).abs() <= radius) & (place[:, None] >= num_context) & (place >= num_context)
    )
    local = torch.where(near | torch.eye(len(place), dtype=torch.bool), 0.0, -torch.inf)[None, None]
    embeds = torch.cat(
        [torch.from_numpy(context), model.embeddings.tok_embeddings(torch.from_numpy(ids[:length]))]
    )
    masks = {"full_attention": torch.zeros_like(local), "sliding_attention": local}
    return model(
        inputs_embeds=embeds[None], position_ids=positions[None], attention_mask=masks
    ).last_hidden_state[0, num_context:]


@pytest.mark.parametrize("changes", [{}, TODAYS_NAMES], ids=["global last", "local last"])
@pytest.mark.parametrize("lengths", [LENGTHS, SHORT], ids=["blocks", "short"])
def test_hidden_states_context_equals_naive_masks(
    make_modernbert, published_model, context, lengths, changes
):
    folder = make_modernbert(**changes)
    backbone, model = _load(folder), published_model(folder)
    ids = _ids(backbone, lengths)
    ours = backbone.hidden_states(ids, lengths, context)
    for row, length in enumerate(lengths.tolist()):
        theirs = _naive_context_hidden(model, ids[row], length, context, radius=4)
        assert float((ours[row, :length] - theirs).abs().max()) <= 1e-5


def test_hidden_states_context_in_another_order_is_the_same(modernbert_folder, context):
    backbone = _load(modernbert_folder)
    ids = _ids(backbone, LENGTHS)
    shuffled = np.ascontiguousarray(context[[3, 0, 5, 1, 4, 2]])
    assert (
        _worst(
            backbone.hidden_states(ids, LENGTHS, context),
            backbone.hidden_states(ids, LENGTHS, shuffled),
            LENGTHS,
        )
        <= 1e-5
    )


def test_hidden_states_context_moves_them(modernbert_folder, context):
    backbone = _load(modernbert_folder)
    ids = _ids(backbone, LENGTHS)
    assert (
        _worst(backbone.hidden_states(ids, LENGTHS, context), backbone.hidden_states(ids, LENGTHS), LENGTHS)
        > 1e-2
    )


def test_hidden_states_context_without_a_global_layer_is_refused(make_modernbert, context):
    backbone = _load(make_modernbert(**TODAYS_NAMES | {"layer_types": ["sliding_attention"] * 4}))
    with pytest.raises(ModelError, match="must have a global layer"):
        backbone.hidden_states(_ids(backbone, SHORT), SHORT, context)


def test_hidden_states_row_beyond_the_positions_is_refused(modernbert_folder):
    with pytest.raises(ModelError, match="at most 96 tokens, got 97"):
        _load(modernbert_folder).hidden_states(np.full((1, 97), 7), np.array([97]))


def test_load_positions_come_from_the_configuration(make_modernbert):
    assert _load(make_modernbert(max_position_embeddings=200)).max_positions == 200


def test_load_prefixed_weights_are_found(make_modernbert, modernbert_folder):
    prefixed, plain = _load(make_modernbert(prefix="model.")), _load(modernbert_folder)
    ids = _ids(plain, SHORT)
    assert torch.equal(prefixed.hidden_states(ids, SHORT), plain.hidden_states(ids, SHORT))


def test_load_local_base_that_is_null_means_the_global_one(make_modernbert):
    folder = make_modernbert(global_rope_theta=500.0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"local_rope_theta": None}))
    same = _load(make_modernbert(global_rope_theta=500.0, local_rope_theta=500.0))
    ids = _ids(same, LENGTHS)
    assert torch.equal(_load(folder).hidden_states(ids, LENGTHS), same.hidden_states(ids, LENGTHS))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_activation": "swish"}, "hidden_activation must be one of"),
        ({"layer_types": ["full_attention"]}, "layer_types must name 4 layers"),
        ({"layer_types": ["causal"] * 4}, "layer_types must name 4 layers"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rotary positions must be the plain ones",
        ),
        ({"rope_scaling": {"type": "dynamic"}}, "rotary positions must be the plain ones"),
        ({"intermediate_size": 50}, r"mlp.Wi.weight must have the shape \(100, 32\), got \(96, 32\)"),
        ({"norm_bias": True}, r"must hold embeddings\.norm\.bias"),
        ({"num_hidden_layers": 5}, r"must hold layers\.4\.attn"),
        ({"hidden_size": None}, "must give hidden_size as a positive number, got None"),
        ({"num_attention_heads": "four"}, "must give num_attention_heads as a positive number, got 'four'"),
        ({"num_attention_heads": 5}, "heads divide into even parts, got 32 for 5 heads"),
    ],
)
def test_load_model_that_does_not_fit_is_refused(make_modernbert, changes, sentence):
    with pytest.raises(ModelError, match=sentence):
        _load(make_modernbert(**changes))
