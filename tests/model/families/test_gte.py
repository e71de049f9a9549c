from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.packed import Packed
from safetensors.torch import load_file, save_file

LENGTHS = np.array([41, 40, 7, 1])

VARIANTS = {
    "ntk": {},
    "mixed ntk": {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}},
    "plain": {"rope_scaling": None},
    "factor one": {"rope_scaling": {"type": "ntk", "factor": 1.0}},
    "no types": {"type_vocab_size": 0},
    "single projections": {"pack_qkv": False},
    "prefix": {"prefix": "new."},
}


def _load(folder, **settings):
    return load_backbone(EncoderConfig(model=str(folder), **({"precision": "fp32"} | settings)))


def _ids(backbone, lengths=LENGTHS):
    ids = np.random.default_rng(0).integers(
        5, len(backbone.token_embeddings), (len(lengths), int(lengths.max()))
    )
    return np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, backbone.pad_id).astype(np.int64)


def _worst(ours, theirs, lengths=LENGTHS):
    return max(
        float((ours[row, :length] - theirs[row, :length]).abs().max())
        for row, length in enumerate(lengths.tolist())
    )


class _Naive:
    """The published layout, one text at a time, with loops over heads, positions and pairs."""

    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.weights = {name.removeprefix("new."): tensor for name, tensor in tensors.items()}

    def linear(self, x, name):
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, x, name):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + self.config["layer_norm_eps"]).sqrt()
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def frequency(self, pair, dim):
        scaling, base = self.config.get("rope_scaling"), self.config["rope_theta"]
        if scaling is None or scaling["factor"] <= 1:
            return base ** (-2 * pair / dim)
        factor = scaling["factor"]
        if "mixed_b" in scaling:
            a = np.log(factor) / (dim / 2) ** scaling["mixed_b"]
            return base ** (-2 * pair / dim) / np.exp(a * (pair + 1) ** scaling["mixed_b"])
        return (base * factor) ** (-2 * pair / dim) / factor ** (2 / dim)

    def turned(self, x, positions):
        half = x.shape[-1] // 2
        out = x.clone()
        for row, position in enumerate(positions):
            for pair in range(half):
                angle = position * self.frequency(pair, 2 * half)
                a, b = x[row, pair], x[row, pair + half]
                out[row, pair] = a * np.cos(angle) - b * np.sin(angle)
                out[row, pair + half] = b * np.cos(angle) + a * np.sin(angle)
        return out

    def hidden(self, ids, context=None, temperature=1.0):
        x, positions = (
            self.weights["embeddings.word_embeddings.weight"][torch.from_numpy(ids)],
            list(range(len(ids))),
        )
        if context is not None:
            x, positions = torch.cat([torch.from_numpy(context), x]), [0] * len(context) + positions
        if self.config["type_vocab_size"]:
            x = x + self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self.norm(x, "embeddings.LayerNorm")
        heads, inner = self.config["num_attention_heads"], self.config["intermediate_size"]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"encoder.layer.{index}"
            if self.config["pack_qkv"]:
                query, key, value = self.linear(x, f"{layer}.attention.qkv_proj").chunk(3, dim=-1)
            else:
                query, key, value = (self.linear(x, f"{layer}.attention.{name}_proj") for name in "qkv")
            mixed = []
            for q, k, v in zip(
                query.chunk(heads, -1), key.chunk(heads, -1), value.chunk(heads, -1), strict=True
            ):
                scores = self.turned(q, positions) @ self.turned(k, positions).T / q.shape[-1] ** 0.5
                mixed.append((scores / temperature).softmax(-1) @ v)
            x = self.norm(
                x + self.linear(torch.cat(mixed, -1), f"{layer}.attention.o_proj"), f"{layer}.attn_ln"
            )
            up_gate = self.linear(x, f"{layer}.mlp.up_gate_proj")
            up, gate = up_gate[:, :inner], up_gate[:, inner:]
            gelu = gate * 0.5 * (1 + torch.erf(gate / 2**0.5))
            x = self.norm(x + self.linear(gelu * up, f"{layer}.mlp.down_proj"), f"{layer}.mlp_ln")
        return x if context is None else x[len(context) :]


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_hidden_states_equal_a_naive_reading_of_the_layout(make_gte, changes):
    folder = make_gte(**changes)
    backbone, naive = _load(folder), _Naive(folder)
    ids = _ids(backbone)
    ours = backbone.hidden_states(ids, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        assert float((ours[row, :length] - naive.hidden(ids[row, :length])).abs().max()) <= 1e-5


def _native(folder, to):
    """The same model in the names of transformers.

    Fixed NTK is a larger base with all frequencies divided.
    """
    config = json.loads((folder / "config.json").read_text())
    factor = config["rope_scaling"]["factor"]
    rope = {"rope_type": "linear", "rope_theta": config["rope_theta"] * factor, "factor": factor ** (2 / 8)}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old, new in (
            ("encoder.layer", "layers"),
            ("attention.o_proj", "self_attn.o_proj"),
            ("attn_ln", "post_attention_layernorm"),
            ("mlp_ln", "post_mlp_layernorm"),
        ):
            name = name.replace(old, new)
        parts, joint = {"qkv_proj": ("q", "k", "v"), "up_gate_proj": ("up", "gate")}, name.split(".")[-2]
        if joint in parts:
            for part, rows in zip(parts[joint], tensor.chunk(len(parts[joint])), strict=True):
                tensors[name.replace("attention", "self_attn").replace(joint, f"{part}_proj")] = rows.clone()
        else:
            tensors[name] = tensor
    to.mkdir()
    (to / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    kept = {
        name: value
        for name, value in config.items()
        if name not in ("rope_scaling", "rope_theta", "pack_qkv", "logn_attention_scale")
    }
    (to / "config.json").write_text(json.dumps(kept | {"model_type": "gte", "rope_parameters": rope}))
    save_file(tensors, to / "model.safetensors")
    return to


def test_hidden_states_of_both_layouts_equal_transformers(make_gte, tmp_path):
    from transformers import GteConfig, GteModel

    published = make_gte()
    native = _native(published, tmp_path / "native")
    config = json.loads((native / "config.json").read_text())
    model = GteModel(GteConfig(**config, attn_implementation="eager")).eval()
    model.load_state_dict(load_file(native / "model.safetensors"), strict=True)
    for folder in (published, native):
        backbone = _load(folder)
        ids = _ids(backbone)
        mask = torch.arange(ids.shape[1])[None] < torch.from_numpy(LENGTHS)[:, None]
        with torch.inference_mode():
            theirs = model(input_ids=torch.from_numpy(ids), attention_mask=mask.long()).last_hidden_state
        assert _worst(backbone.hidden_states(ids, LENGTHS), theirs) <= 1e-5


def test_hidden_states_in_a_batch_equal_one_by_one(make_gte):
    backbone = _load(make_gte())
    ids = _ids(backbone)
    together = backbone.hidden_states(ids, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = backbone.hidden_states(ids[row : row + 1, :length], np.array([length]))
        assert float((together[row, :length] - alone[0]).abs().max()) <= 1e-5


def test_packed_rows_equal_the_rectangle(make_gte):
    backbone = _load(make_gte())
    ids = _ids(backbone)
    padded = backbone.hidden_states(ids, LENGTHS)
    backbone.pattern_type = Packed
    assert _worst(backbone.hidden_states(ids, LENGTHS), padded) <= 1e-5


def test_hidden_states_temperature_equals_logits_divided_by_it(make_gte):
    folder = make_gte()
    backbone, naive = _load(folder), _Naive(folder)
    ids = _ids(backbone, np.array([20]))
    theirs = naive.hidden(ids[0], temperature=0.5)
    assert (
        float((backbone.hidden_states(ids, np.array([20]), temperature=0.5)[0] - theirs).abs().max()) <= 1e-5
    )


def test_hidden_states_context_equals_unrotated_input_embeddings(make_gte):
    context = np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)
    folder = make_gte()
    backbone, naive = _load(folder), _Naive(folder)
    ids = _ids(backbone)
    ours = backbone.hidden_states(ids, LENGTHS, context)
    for row, length in enumerate(LENGTHS.tolist()):
        theirs = naive.hidden(ids[row, :length], context)
        assert float((ours[row, :length] - theirs).abs().max()) <= 1e-5


def test_hidden_states_bf16_agree_in_direction(make_gte):
    folder = make_gte()
    exact, rounded = (_load(folder, precision=precision) for precision in ("fp32", "bf16"))
    ids = _ids(exact)
    cosines = torch.cosine_similarity(
        exact.hidden_states(ids, LENGTHS), rounded.hidden_states(ids, LENGTHS).float(), dim=-1
    )
    assert min(float(cosines[row, :length].min()) for row, length in enumerate(LENGTHS.tolist())) >= 0.999


def test_first_layers_are_a_model_of_their_own(make_gte):
    folder = make_gte()
    backbone, naive = _load(folder, layers=1), _Naive(folder)
    naive.config["num_hidden_layers"] = 1
    ids = _ids(backbone, np.array([20]))
    assert float((backbone.hidden_states(ids, np.array([20]))[0] - naive.hidden(ids[0])).abs().max()) <= 1e-5


def test_causal_is_refused(make_gte):
    with pytest.raises(ConfigError, match="got a model of type new"):
        _load(make_gte(), causal=True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"position_embedding_type": "absolute"},
            "position_embedding_type of a GTE must be 'rope', got 'absolute'",
        ),
        ({"logn_attention_scale": True}, "logn_attention_scale of a GTE must be False, got True"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type of a GTE must be 'layer_norm', got 'rms_norm'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "got 'dynamic' over 1"),
        (
            {"rope_scaling": {"type": "ntk"}},
            "factor of the model's rotary positions must be a positive number, got None",
        ),
        ({"rope_scaling": {"type": "ntk", "factor": "two"}}, "must be a positive number, got 'two'"),
        ({"intermediate_size": 50}, r"up_gate_proj.weight must have the shape \(100, 32\), got \(96, 32\)"),
        ({"num_hidden_layers": 3}, r"must hold encoder\.layer\.2\.attention"),
        ({"num_attention_heads": 5}, "heads divide into even parts, got 32 for 5 heads"),
        ({"type_vocab_size": "two"}, "must give type_vocab_size as a positive number, got 'two'"),
        ({"pack_qkv": False}, r"must hold encoder\.layer\.0\.attention\.q_proj"),
        ({"hidden_act": "swish"}, "hidden_act must be one of"),
    ],
)
def test_load_model_that_does_not_fit_is_refused_in_one_sentence(make_gte, changes, sentence):
    folder = make_gte()
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=sentence) as refused:
        _load(folder)
    assert "\n" not in str(refused.value)
