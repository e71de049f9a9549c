from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.backbone_loader import load_backbone

LENGTHS = np.array([9, 4, 9, 1])


def _ids(backbone, lengths=LENGTHS):
    generator = np.random.default_rng(0)
    ids = generator.integers(5, backbone.token_embeddings.shape[0], (len(lengths), int(lengths.max())))
    return np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, backbone.pad_id).astype(np.int64)


def _published(folder):
    """Load the same folder with transformers, the oracle."""
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

    config = json.loads((folder / "config.json").read_text())
    config_class, model_class = (
        (BertConfig, BertModel) if config["model_type"] == "bert" else (RobertaConfig, RobertaModel)
    )
    model = model_class(config_class(**config), add_pooling_layer=False).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return model


@torch.inference_mode()
def _published_hidden(model, ids, lengths):
    mask = torch.arange(ids.shape[1])[None] < torch.from_numpy(lengths)[:, None]
    return model(input_ids=torch.from_numpy(ids), attention_mask=mask.long()).last_hidden_state


def _worst(ours, theirs, lengths):
    return max(
        float((ours[row, :length] - theirs[row, :length]).abs().max())
        for row, length in enumerate(lengths.tolist())
    )


@pytest.mark.parametrize("lengths", [LENGTHS, np.array([7, 7])], ids=["padded", "equal"])
def test_hidden_states_bert_equals_transformers(tiny_model_folder, lengths):
    backbone = load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"))
    ids = _ids(backbone, lengths)
    theirs = _published_hidden(_published(tiny_model_folder), ids, lengths)
    assert _worst(backbone.hidden_states(ids, lengths), theirs, lengths) <= 1e-5


def test_hidden_states_roberta_equals_transformers(tiny_roberta_folder):
    backbone = load_backbone(EncoderConfig(model=str(tiny_roberta_folder), precision="fp32"))
    ids = _ids(backbone)
    theirs = _published_hidden(_published(tiny_roberta_folder), ids, LENGTHS)
    assert _worst(backbone.hidden_states(ids, LENGTHS), theirs, LENGTHS) <= 1e-5


def test_hidden_states_temperature_equals_logits_divided_by_it(tiny_model_folder):
    backbone = load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"))
    model = _published(tiny_model_folder)
    for layer in model.encoder.layer:
        layer.attention.self.scaling /= 0.5
    ids = _ids(backbone)
    sharp = backbone.hidden_states(ids, LENGTHS, temperature=0.5)
    assert _worst(sharp, _published_hidden(model, ids, LENGTHS), LENGTHS) <= 1e-5
    assert _worst(sharp, backbone.hidden_states(ids, LENGTHS), LENGTHS) > 1e-2


@torch.inference_mode()
def _naive_context_hidden(model, ids, length, context):
    """Encode one text with its context as input embeddings.

    The model adds position embeddings to the context too, so they are subtracted first. Text positions start
    at 0.
    """
    table = model.embeddings
    num_context = len(context)
    positions = torch.cat([torch.zeros(num_context, dtype=torch.long), torch.arange(length)])
    embeds = torch.cat(
        [
            torch.from_numpy(context) - table.position_embeddings.weight[0],
            table.word_embeddings(torch.from_numpy(ids[:length])),
        ]
    )
    return model(inputs_embeds=embeds[None], position_ids=positions[None]).last_hidden_state[0, num_context:]


@pytest.fixture(scope="module")
def context():
    return np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)


def test_hidden_states_context_equals_naive_input_embeddings(tiny_model_folder, context):
    backbone = load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"))
    model, ids = _published(tiny_model_folder), _ids(backbone)
    ours = backbone.hidden_states(ids, LENGTHS, context)
    for row, length in enumerate(LENGTHS.tolist()):
        theirs = _naive_context_hidden(model, ids[row], length, context)
        assert float((ours[row, :length] - theirs).abs().max()) <= 1e-5


def test_hidden_states_context_in_another_order_is_the_same(tiny_model_folder, context):
    backbone = load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"))
    ids = _ids(backbone)
    shuffled = np.ascontiguousarray(context[[3, 0, 5, 1, 4, 2]])
    assert (
        _worst(
            backbone.hidden_states(ids, LENGTHS, context),
            backbone.hidden_states(ids, LENGTHS, shuffled),
            LENGTHS,
        )
        <= 1e-5
    )


def test_hidden_states_context_moves_them(tiny_model_folder, context):
    backbone = load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"))
    ids = _ids(backbone)
    assert (
        _worst(backbone.hidden_states(ids, LENGTHS, context), backbone.hidden_states(ids, LENGTHS), LENGTHS)
        > 1e-2
    )


@pytest.mark.parametrize("with_context", [False, True])
def test_hidden_states_bf16_agree_in_direction(tiny_model_folder, context, with_context):
    exact, rounded = (
        load_backbone(EncoderConfig(model=str(tiny_model_folder), precision=precision))
        for precision in ("fp32", "bf16")
    )
    ids, given = _ids(exact), context if with_context else None
    ours, theirs = (
        exact.hidden_states(ids, LENGTHS, given),
        rounded.hidden_states(ids, LENGTHS, given).float(),
    )
    cosines = torch.cosine_similarity(ours, theirs, dim=-1)
    assert min(float(cosines[row, :length].min()) for row, length in enumerate(LENGTHS.tolist())) >= 0.999


def test_hidden_states_row_beyond_the_positions_is_refused(tiny_model_folder):
    backbone = load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"))
    with pytest.raises(ModelError, match="at most 96 tokens, got 97"):
        backbone.hidden_states(np.full((1, 97), 7), np.array([97]))
