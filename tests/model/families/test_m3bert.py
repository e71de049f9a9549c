from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from pipeline.config import EncoderConfig
from pipeline.errors import ConfigError, ModelError
from pipeline.model.backbone_loader import load_backbone
from pipeline.model.families import m3bert
from pipeline.model.families.m3bert import NO_LABEL, M3Bert, M3BertConfig, load_m3bert, save_m3bert

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "rope_theta": 700.0,
    "matryoshka_layers": (1, 3),
    "matryoshka_dims": (8, 32),
}
LENGTHS = torch.tensor([17, 9, 1])


def _tokenizer(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def config(tiny_model_folder):
    return M3BertConfig(vocab_size=_tokenizer(tiny_model_folder).get_vocab_size(), **SIZES)


@pytest.fixture
def model(config):
    model = M3Bert(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():  # far from its start, where every term counts
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


@pytest.fixture
def folder(model, tiny_model_folder, tmp_path):
    save_m3bert(model, tmp_path / "model", _tokenizer(tiny_model_folder))
    return tmp_path / "model"


def _ids(config, lengths=LENGTHS):
    return torch.randint(
        5, config.vocab_size, (len(lengths), int(lengths.max())), generator=torch.Generator().manual_seed(3)
    )


def _naive_states(model, ids):
    """One row, layer by layer, from the weights by name."""
    weights, config = dict(model.named_parameters()), model.config

    def norm(x, name):
        return (
            x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]
        )

    def turned(x):
        half = config.head_dim // 2
        turned = torch.empty_like(x)
        for position in range(len(x)):
            for i in range(half):
                angle = torch.tensor(position * config.rope_theta ** (-2 * i / config.head_dim))
                a, b = x[position, i], x[position, i + half]
                turned[position, i], turned[position, i + half] = (
                    a * angle.cos() - b * angle.sin(),
                    b * angle.cos() + a * angle.sin(),
                )
        return turned

    x = weights["embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}"
        normed = norm(x, f"{prefix}.input_layernorm")
        query, key, value = (normed @ weights[f"{prefix}.self_attn.{name}_proj.weight"].T for name in "qkv")
        heads = []
        for head in range(config.num_attention_heads):
            own = slice(head * config.head_dim, (head + 1) * config.head_dim)
            scores = turned(query[:, own]) @ turned(key[:, own]).T / config.head_dim**0.5
            heads.append(scores.softmax(-1) @ value[:, own])
        x = x + torch.cat(heads, -1) @ weights[f"{prefix}.self_attn.o_proj.weight"].T
        normed = norm(x, f"{prefix}.post_attention_layernorm")
        gate, up = (normed @ weights[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T
        yield norm(x, "norm")


def test_forward_equals_naive_layers(model):
    ids = _ids(model.config)
    states = model(ids, LENGTHS, layers=(1, 2, 3))
    for row, length in enumerate(LENGTHS.tolist()):
        for layer, expected in enumerate(_naive_states(model, ids[row, :length]), start=1):
            assert float((states[layer][row, :length] - expected).detach().abs().max()) <= 1e-5


def test_forward_returns_the_configured_exits(model):
    assert sorted(model(_ids(model.config), LENGTHS)) == [1, 3]


def test_forward_does_not_run_layers_beyond_the_last_asked_for(model, monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(model.layers[2], "forward", never)
    assert sorted(model(_ids(model.config), LENGTHS, layers=(2,))) == [2]


def test_forward_has_no_biases_and_no_dropout(model):
    assert [name for name, _ in model.named_parameters() if name.endswith("bias")] == ["mlm_head.bias"]
    ids = _ids(model.config)
    assert torch.equal(model.train()(ids, LENGTHS)[3], model.eval()(ids, LENGTHS)[3])


@pytest.mark.parametrize("dim", [1, 8, 32])
def test_mlm_head_uses_the_first_rows_of_one_matrix(model, dim):
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(4))
    expected = states[:, :dim] @ model.mlm_head.weight[:dim] + model.mlm_head.bias
    torch.testing.assert_close(model.mlm_head(states, dim), expected)


def test_mlm_losses_equal_naive_cross_entropy_of_each_layer_and_width(model):
    ids = _ids(model.config)
    labels = torch.full_like(ids, NO_LABEL)
    labels[0, 3], labels[0, 16], labels[1, 8] = 7, 11, 9
    losses = model.mlm_losses(ids, LENGTHS, labels)
    assert sorted(losses) == [(1, 8), (1, 32), (3, 8), (3, 32)]
    rows = {row: list(_naive_states(model, ids[row, : int(LENGTHS[row])])) for row in (0, 1)}
    for (layer, dim), loss in losses.items():
        terms = []
        for row, position in ((0, 3), (0, 16), (1, 8)):
            logits = rows[row][layer - 1][position, :dim] @ model.mlm_head.weight[:dim] + model.mlm_head.bias
            terms.append(logits.exp().sum().log() - logits[labels[row, position]])
        assert float(loss.detach()) == pytest.approx(float(torch.stack(terms).mean().detach()), abs=1e-5)


def test_mlm_losses_reach_every_weight_and_narrow_ones_their_rows_only(model):
    ids = _ids(model.config)
    labels = torch.where(torch.arange(17) % 4 == 0, ids, NO_LABEL)
    sum(model.mlm_losses(ids, LENGTHS, labels).values()).backward()
    assert [
        name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()
    ] == []
    model.zero_grad()
    model.mlm_losses(ids, LENGTHS, labels, layers=(1,), dims=(8,))[1, 8].backward()
    moved = model.mlm_head.weight.grad.any(dim=1)
    assert moved.tolist() == [True] * 8 + [False] * 24
    assert model.layers[1].mlp.up_proj.weight.grad is None


def test_mlm_losses_fall_when_trained(config):
    model = M3Bert(config)
    ids = _ids(config)
    labels = torch.where(torch.arange(17) % 4 == 0, ids, NO_LABEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    totals = []
    for _ in range(12):
        total = torch.stack(list(model.mlm_losses(ids, LENGTHS, labels).values())).sum()
        totals.append(float(total.detach()))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert totals[-1] < totals[0] / 2


def test_mlm_losses_without_a_scored_token_are_refused(model):
    ids = _ids(model.config)
    with pytest.raises(ModelError, match="must score at least one token"):
        model.mlm_losses(ids, LENGTHS, torch.full_like(ids, NO_LABEL))


def test_new_weights_come_from_the_seed_alone(config):
    first, same, other = (M3Bert(config, seed=seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["embed_tokens.weight"], other["embed_tokens.weight"])
    assert float(first["layers.0.mlp.down_proj.weight"].std()) == pytest.approx(0.02 / 6**0.5, rel=0.1)


def test_saved_model_loads_without_loss(model, folder):
    loaded = load_m3bert(folder)
    assert loaded.config == model.config
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 30}, "must divide into even parts for 4 heads, got 30"),
        ({"vocab_size": 0}, "vocab_size of an m3BERT must be positive, got 0"),
        ({"matryoshka_layers": (4,)}, r"matryoshka_layers of an m3BERT must lie between 1 and 3, got \[4\]"),
        ({"matryoshka_dims": ()}, r"matryoshka_dims of an m3BERT must lie between 1 and 32, got \[\]"),
    ],
)
def test_config_that_no_model_has_is_refused(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        M3BertConfig(**{"vocab_size": 10} | SIZES | changes)


@pytest.mark.parametrize(("setting", "value"), [("layers", (0,)), ("dims", (33,))])
def test_mlm_losses_of_an_exit_the_model_lacks_are_refused(model, setting, value):
    ids = _ids(model.config)
    with pytest.raises(ConfigError, match=f"{setting} of an m3BERT must lie between 1 and"):
        model.mlm_losses(ids, LENGTHS, ids, **{setting: value})


def test_forward_row_beyond_the_positions_is_refused(model):
    with pytest.raises(ModelError, match="at most 40 tokens, got 41"):
        model(torch.ones(1, 41, dtype=torch.long), torch.tensor([41]))


def test_load_of_another_model_is_refused(tiny_model_folder):
    with pytest.raises(ModelError, match="model_type must be m3bert, got 'bert'"):
        load_m3bert(tiny_model_folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 64}, "must have the shape"),
        ({"vocab_size": "many"}, "must give vocab_size as a positive number, got 'many'"),
        ({"matryoshka_layers": "all"}, "must give matryoshka_layers as a list of whole numbers, got 'all'"),
        ({"matryoshka_dims": [64]}, "must hold the sizes"),
    ],
)
def test_load_with_another_configuration_is_refused(folder, change, sentence):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=sentence) as refused:
        load_m3bert(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.mlp.up_proj.weight", "mlm_head.bias"])
def test_load_without_a_tensor_is_refused(folder, name):
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {other: tensor for other, tensor in tensors.items() if other != name}, folder / "model.safetensors"
    )
    with pytest.raises(ModelError, match=re.escape(f"{name} of an m3BERT must have the shape")):
        load_m3bert(folder)


def _backbone(folder, **settings):
    return load_backbone(EncoderConfig(model=str(folder), precision="fp32", **settings))


def _require_same(ours, theirs):
    assert (
        max(
            float((ours[row, :length] - theirs[row, :length]).abs().max())
            for row, length in enumerate(LENGTHS.tolist())
        )
        <= 1e-5
    )


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@torch.inference_mode()
def test_backbone_equals_the_pretrained_model_at_every_exit(model, folder, config, num_layers):
    ids = _ids(config)
    ours = _backbone(folder, layers=num_layers).hidden_states(ids.numpy(), LENGTHS.numpy())
    _require_same(ours, model(ids, LENGTHS, layers=(num_layers,))[num_layers])


@torch.inference_mode()
def test_backbone_temperature_equals_logits_divided_by_it(model, folder, config, monkeypatch):
    ids = _ids(config)
    ours = _backbone(folder).hidden_states(ids.numpy(), LENGTHS.numpy(), temperature=0.5)
    fused = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        m3bert.F,
        "scaled_dot_product_attention",
        lambda query, *others, **named: fused(query / 0.5, *others, **named),
    )
    _require_same(ours, model(ids, LENGTHS, layers=(3,))[3])


def test_backbone_causal_is_refused(folder):
    with pytest.raises(ConfigError, match="got a model of type m3bert"):
        _backbone(folder, causal=True)
