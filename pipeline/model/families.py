"""Readers of published models: what each layout calls its tensors, and what else its configuration says.

    BERT, RoBERTa, XLM-R, CamemBERT    post-norm, learned positions, a plain feed-forward, biases; DistilBERT
                                       and MPNet without token types, MPNet with a bias of distances besides
    NomicBERT, CDE v1's backbones      post-norm, RoPE, SwiGLU, no biases
    GTE                                post-norm, RoPE stretched by NTK, GeGLU, biases but in the gate
    ModernBERT, mmBERT, CDE v2's       pre-norm, RoPE, GeGLU, global layers among local ones
    Mistral, Qwen2, Qwen3, Llama       pre-norm, RMSNorm, RoPE, SwiGLU; m³BERT, pplx-embed, NV-Embed's inner
                                       model, too

Each reader checks a configuration and turns it with its tensors into layers of the engine, exact to 1e-5 in
fp32 to the published code. NomicBERT and GTE are read in their published layout and in the one transformers
gives them. Context stands before the text as input embeddings with token type 0 and the embedding norm,
without position and not rotated; the text's positions start at 0 (CDE eq. 5 and 6, §10.4). Local layers do
not show it. MPNet's bias of distances is 0 between context and anything.

Decoders see the whole row (NV-Embed §3.1), as NV-Embed, gte-Qwen2 and their kin were trained; ``is_causal``
keeps the mask for checkpoints trained with it and pooled at their last token (Qwen3-Embedding, e5-mistral).
A sliding window belongs to causal text: without the mask it is left out, with it rows must fit the window,
where it hides nothing. With the mask every token of the text sees all of the context.

Not read: other relative or interleaved positions, GTE's logarithmic attention scale, NomicBERT's mixture of
experts, quantised decoders. A NomicBERT that stretches RoPE is read up to the length it was trained on.

Sources: Nussbaum et al., "Nomic Embed"; Zhang et al., "mGTE"; Warner et al., "Smarter, Better, Faster,
Longer" (ModernBERT); Song et al., "MPNet".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.engine.attention import BUCKETS, RelativeBias
from cairn.pipeline.model.engine.pattern import Shape
from cairn.pipeline.model.engine.rotary import RotaryTable, even_head_dim, read_rotary
from cairn.pipeline.model.engine.transformer import (
    Activation,
    InputEmbedding,
    Layer,
    Mlp,
    Transformer,
    activation_named,
)
from cairn.pipeline.model.engine.weights import AnyLinear, Linear, Norm, WeightReader
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.first_layers import LAYER_COUNTS
from cairn.pipeline.model.folders.model_types import PPLX


@dataclass(frozen=True, kw_only=True, slots=True)
class _Names:
    """What a layout calls the tensors of a layer; the parts of one product, and of a gate, stand in order.

    Without ``first_norm`` the embedding norm stands in for the first layer's attention norm.
    """

    layer: str
    qkv: Sequence[str]
    output: str
    attention_norm: str
    up: Sequence[str]
    down: str
    mlp_norm: str
    first_norm: bool = True


_BERT: Final = _Names(
    layer="encoder.layer",
    qkv=["attention.self.query", "attention.self.key", "attention.self.value"],
    output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up=["intermediate.dense"],
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
_MPNET: Final = replace(
    _BERT,
    qkv=[f"attention.attn.{part}" for part in "qkv"],
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
)
_DISTIL: Final = _Names(
    layer="transformer.layer",
    qkv=["attention.q_lin", "attention.k_lin", "attention.v_lin"],
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up=["ffn.lin1"],
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)
_NOMIC: Final = _Names(
    layer="encoder.layers",
    qkv=["attn.Wqkv"],
    output="attn.out_proj",
    attention_norm="norm1",
    # fc12 is the gate, fc11 what it multiplies.
    up=["mlp.fc12", "mlp.fc11"],
    down="mlp.fc2",
    mlp_norm="norm2",
)
_GTE: Final = _Names(
    layer="encoder.layer",
    qkv=["attention.qkv_proj"],
    output="attention.o_proj",
    attention_norm="attn_ln",
    up=["mlp.up_gate_proj"],
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
)
_MODERN: Final = _Names(
    layer="layers",
    qkv=["attn.Wqkv"],
    output="attn.Wo",
    attention_norm="attn_norm",
    up=["mlp.Wi"],
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    first_norm=False,
)
_NATIVE: Final = _Names(
    layer="layers",
    qkv=["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    output="self_attn.o_proj",
    attention_norm="post_attention_layernorm",
    up=["mlp.gate_proj", "mlp.up_proj"],
    down="mlp.down_proj",
    mlp_norm="post_mlp_layernorm",
)
"""NomicBERT and GTE as transformers names them."""
_DECODER: Final = replace(_NATIVE, attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")


_TOKENS: Final = "embeddings.word_embeddings.weight"
"""The first tensor that is read, by which any prefix of the names is found."""
_TYPES: Final = "embeddings.token_type_embeddings.weight"
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads")
_COUNT_FROM_PADDING: Final = ("roberta", "xlm-roberta", "camembert")
"""Model types whose first position stands after the padding id."""
_MPNET_FIRST_POSITION: Final = 2
"""MPNet's code counts from behind the id 1, whatever its padding is."""


def _transformer(
    checkpoint: Checkpoint,
    reader: WeightReader,
    names: _Names,
    shape: Shape,
    embedding: InputEmbedding,
    *,
    inner: int,
    activation: Activation,
    biases: tuple[bool, bool, bool, bool],
    norm_bias: bool = True,
    is_gated: bool = True,
    local: Collection[int] = (),
    finish: Callable[[Layer, str], Layer] | None = None,
    final_norm: Norm | None = None,
    rotary: Mapping[bool, RotaryTable] = MappingProxyType({}),
    relative_bias: RelativeBias | None = None,
) -> Transformer:
    """Read all layers of a model; ``biases`` are those of qkv, output, up and down.

    ``local`` are the layers of local attention. ``finish`` is given each layer, and where its tensors' names
    begin.
    """
    width = embedding.tokens_VD.shape[1]
    rows = [num_heads * shape.head_dim for num_heads in shape.heads_by_kind]
    of_qkv, of_output, of_up, of_down = biases

    def layer(index: int) -> Layer:
        prefix = f"{names.layer}.{index}"

        def stacked(parts: Sequence[str], rows: Sequence[int], *, bias: bool) -> AnyLinear:
            return reader.stacked([f"{prefix}.{part}" for part in parts], rows, width, bias=bias)

        def norm(name: str) -> Norm:
            return reader.norm(f"{prefix}.{name}", width, bias=norm_bias)

        qkv = stacked(names.qkv, rows, bias=of_qkv)
        output = reader.linear(f"{prefix}.{names.output}", (width, rows[0]), bias=of_output)
        mlp = Mlp(
            up=stacked(names.up, [inner] * (2 if is_gated else 1), bias=of_up),
            down=reader.linear(f"{prefix}.{names.down}", (width, inner), bias=of_down),
            activation=activation,
            is_gated=is_gated,
        )
        read = Layer(
            qkv=qkv,
            attention_output=output,
            attention_norm=norm(names.attention_norm) if index > 0 or names.first_norm else None,
            mlp=mlp,
            mlp_norm=norm(names.mlp_norm),
            is_local=index in local,
        )
        return read if finish is None else finish(read, prefix)

    return Transformer(
        checkpoint,
        embedding=embedding,
        layers=list(map(layer, range(checkpoint.integer(*LAYER_COUNTS)))),
        final_norm=final_norm,
        shape=shape,
        rotary=rotary,
        relative_bias=relative_bias,
        dtype=reader.dtype,
        device=reader.device,
    )


def read_bert(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Read BERT and its kin; another variant or a misfit raises :class:`ModelError`."""
    config, model_type = checkpoint.config, checkpoint.config["model_type"]
    is_distilled, is_mpnet = model_type == "distilbert", model_type == "mpnet"
    if config.get("position_embedding_type", "absolute") != "absolute" or config.get("is_decoder", False):
        raise ModelError(
            "the model must be an encoder with absolute positions, got another variant; choose another model"
        )
    width, num_heads = checkpoint.integer("hidden_size", "dim"), checkpoint.integer(*_HEADS)
    if width % num_heads:
        raise ModelError(
            f"hidden_size must be a multiple of the {num_heads} heads, got {width}; config.json does not "
            "fit the model"
        )
    num_positions = checkpoint.integer("max_position_embeddings")
    reader = _reader(checkpoint, dtype, device, "layer_norm_eps")
    # Tables are kept in float32 where layers are in less, and in their own precision where they are in more.
    wide = torch.promote_types(dtype, torch.float32)
    tokens_VD = reader.read(_TOKENS, (checkpoint.integer("vocab_size"), width), wide)
    positions_PD = reader.read("embeddings.position_embeddings.weight", (num_positions, width), wide)
    if model_type in _COUNT_FROM_PADDING:
        positions_PD = positions_PD[int(config.get("pad_token_id") or 0) + 1 :]
    types_D = relative_bias = None
    if is_mpnet:
        positions_PD = positions_PD[_MPNET_FIRST_POSITION:]
        numbers_RH = reader.read("encoder.relative_attention_bias.weight", (BUCKETS, num_heads), wide)
        relative_bias = RelativeBias(numbers_RH, len(positions_PD))
    elif not is_distilled:
        num_types = checkpoint.integer("type_vocab_size", default=2)
        types_D = reader.read(_TYPES, (num_types, width), wide)[0].clone()
    norm = reader.norm("embeddings.LayerNorm", width, wide)
    return _transformer(
        checkpoint,
        reader,
        _DISTIL if is_distilled else _MPNET if is_mpnet else _BERT,
        _shape(num_heads, width // num_heads, len(positions_PD)),
        InputEmbedding(tokens_VD=tokens_VD, positions_PD=positions_PD, token_type_D=types_D, norm=norm),
        inner=checkpoint.integer("intermediate_size", "hidden_dim"),
        activation=_activation(checkpoint, "activation" if is_distilled else "hidden_act"),
        biases=(True, True, True, True),
        is_gated=False,
        relative_bias=relative_bias,
    )


def _reader(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, *names_of_epsilon: str
) -> WeightReader:
    epsilon = checkpoint.number(*names_of_epsilon, default=1e-12)
    return WeightReader(checkpoint.tensors, _TOKENS, device, dtype, epsilon=epsilon)


def _shape(
    num_heads: int, head_dim: int, max_positions: int, *, norm_first: bool = False, radius: int | None = None
) -> Shape:
    return Shape(
        num_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_first=norm_first,
        local_radius=radius,
    )


def _activation(checkpoint: Checkpoint, setting: str = "hidden_act", default: str = "gelu") -> Activation:
    return activation_named(setting, str(checkpoint.config.get(setting, default)))


_NOMIC_VARIANTS: Final = (
    "prenorm",
    "causal",
    "parallel_block",
    "use_rms_norm",
    "rotary_emb_interleaved",
    "rotary_emb_scale_base",
    "qkv_proj_bias",
    "mlp_fc1_bias",
    "mlp_fc2_bias",
    "num_experts",
)
"""Settings of the published code that no supported model switches on."""


def read_nomic_bert(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Read a NomicBERT in either layout; another variant or a misfit raises :class:`ModelError`."""
    config = checkpoint.config
    for name in _NOMIC_VARIANTS:
        if config.get(name):
            raise ModelError(f"{name} of a NomicBERT must be off, got {config[name]!r}; choose another model")
    activation = config.get("activation_function") or config.get("hidden_act", "silu")
    if activation not in ("swiglu", "silu"):
        raise ModelError(
            f"the activation of a NomicBERT must be swiglu or silu, got {activation!r}; choose another model"
        )
    rope: Mapping[str, Any] = config.get("rope_parameters") or {}
    _require_plain_rope(None if rope.get("rope_type", "default") == "default" else rope)
    theta = rope.get("rope_theta") or checkpoint.number("rotary_emb_base", "rope_theta", default=1000.0)
    is_stretched = config.get("rotary_scaling_factor") and config.get("max_trained_positions")
    of_length = ("max_trained_positions",) if is_stretched else ("n_positions", "max_position_embeddings")
    max_positions = checkpoint.integer(*of_length, default=2048)
    width = checkpoint.integer("n_embd", "hidden_size")
    num_heads = checkpoint.integer(*_HEADS)
    shape = _shape(num_heads, even_head_dim(width, num_heads), max_positions)
    rotary = RotaryTable(
        rotary_dim=int(shape.head_dim * checkpoint.number("rotary_emb_fraction", default=1.0)),
        theta=float(theta),
        num_positions=max_positions,
        device=device,
    )
    reader = _reader(checkpoint, dtype, device, "layer_norm_epsilon", "layer_norm_eps")
    norm_name, names = ("emb_ln", _NOMIC) if "emb_ln.weight" in reader else ("embeddings.LayerNorm", _NATIVE)
    return _transformer(
        checkpoint,
        reader,
        names,
        shape,
        _embedding(checkpoint, reader, width, norm_name, default_types=2),
        inner=checkpoint.integer("n_inner", "intermediate_size", default=4 * width),
        activation="silu",
        biases=(False, False, False, False),
        rotary={False: rotary},
    )


def _require_plain_rope(variant: object) -> None:
    if variant is not None:
        raise ModelError(
            f"rotary positions must be the plain ones (rope_type default), got {variant!r}; choose "
            "another model"
        )


def _embedding(
    checkpoint: Checkpoint, reader: WeightReader, width: int, norm_name: str, *, default_types: int
) -> InputEmbedding:
    """Read tables without positions; a model without types, such as gte-base-en-v1.5, has none of type 0."""
    tokens_VD, types_D = reader.read(_TOKENS, (checkpoint.integer("vocab_size"), width)), None
    if checkpoint.config.get("type_vocab_size", default_types) != 0:
        num_types = checkpoint.integer("type_vocab_size", default=default_types)
        types_D = reader.read(_TYPES, (num_types, width))[0].clone()
    return InputEmbedding(
        tokens_VD=tokens_VD, token_type_D=types_D, norm=reader.norm(norm_name, width, torch.float32)
    )


_GTE_THETA: Final = {"new": 10_000.0, "gte": 160_000.0}
_GTE_REQUIRED: Final = {
    "position_embedding_type": "rope",
    "logn_attention_scale": False,
    "layer_norm_type": "layer_norm",
}
"""Settings of the published code, with the one value that every published model gives them."""


def read_gte(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Read a GTE in either layout; another variant or a misfit raises :class:`ModelError`."""
    config = checkpoint.config
    for name, value in _GTE_REQUIRED.items():
        if config.get(name, value) != value:
            raise ModelError(f"{name} of a GTE must be {value!r}, got {config[name]!r}; choose another model")
    width, num_heads = checkpoint.integer("hidden_size"), checkpoint.integer("num_attention_heads")
    max_positions = checkpoint.integer("max_position_embeddings")
    shape = _shape(num_heads, even_head_dim(width, num_heads), max_positions)
    rotary = read_rotary(checkpoint, shape.head_dim, max_positions, device, _GTE_THETA[config["model_type"]])
    reader = _reader(checkpoint, dtype, device, "layer_norm_eps")
    is_published = "encoder.layer.0.attn_ln.weight" in reader
    names = _GTE if is_published else _NATIVE
    if is_published and not config.get("pack_qkv", True):
        names = replace(names, qkv=[f"attention.{name}_proj" for name in "qkv"])
    return _transformer(
        checkpoint,
        reader,
        names,
        shape,
        _embedding(checkpoint, reader, width, "embeddings.LayerNorm", default_types=1),
        inner=checkpoint.integer("intermediate_size"),
        activation=_activation(checkpoint),
        biases=(True, True, False, True),
        finish=_with_gate_first if is_published else None,
        rotary={False: rotary},
    )


def _with_gate_first(layer: Layer, _prefix: str) -> Layer:
    """Turn a joint projection round whose first half is the factor and second half the gate."""
    up = Linear(weight=torch.cat(layer.mlp.up.weight.chunk(2)[::-1]))
    return replace(layer, mlp=replace(layer.mlp, up=up))


_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_MODERN_TOKENS: Final = "embeddings.tok_embeddings.weight"


def read_modernbert(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Read a ModernBERT; another variant or a misfit raises :class:`ModelError`."""
    width, num_heads = checkpoint.integer("hidden_size"), checkpoint.integer("num_attention_heads")
    epsilon = checkpoint.number("norm_eps", default=1e-5)
    norm_bias, attention_bias, mlp_bias = (
        bool(checkpoint.config.get(name, False)) for name in ("norm_bias", "attention_bias", "mlp_bias")
    )
    shape = _shape(
        num_heads,
        even_head_dim(width, num_heads),
        checkpoint.integer("max_position_embeddings", default=8192),
        norm_first=True,
        radius=checkpoint.integer("local_attention", default=128) // 2,
    )
    reader = WeightReader(checkpoint.tensors, _MODERN_TOKENS, device, dtype, epsilon=epsilon)
    return _transformer(
        checkpoint,
        reader,
        _MODERN,
        shape,
        InputEmbedding(
            tokens_VD=reader.read(_MODERN_TOKENS, (checkpoint.integer("vocab_size"), width)),
            norm=reader.norm("embeddings.norm", width, torch.float32, bias=norm_bias),
        ),
        inner=checkpoint.integer("intermediate_size"),
        activation=_activation(checkpoint, "hidden_activation"),
        biases=(attention_bias, attention_bias, mlp_bias, mlp_bias),
        norm_bias=norm_bias,
        local=[index for index, kind in enumerate(_layer_kinds(checkpoint)) if kind == _LOCAL],
        final_norm=reader.norm("final_norm", width, bias=norm_bias),
        rotary={
            kind == _LOCAL: RotaryTable(
                rotary_dim=shape.head_dim, theta=theta, num_positions=shape.max_positions, device=device
            )
            for kind, theta in _thetas(checkpoint.config).items()
        },
    )


def _layer_kinds(checkpoint: Checkpoint) -> list[str]:
    num_layers = checkpoint.integer("num_hidden_layers")
    kinds: Any = checkpoint.config.get("layer_types")
    if kinds is None:
        step = checkpoint.integer("global_attn_every_n_layers", default=3)
        return [_LOCAL if index % step else _GLOBAL for index in range(num_layers)]
    known = isinstance(kinds, list) and all(kind in (_GLOBAL, _LOCAL) for kind in kinds)
    if not known or len(kinds) < num_layers:
        raise ModelError(
            f"layer_types must name {num_layers} layers as {_GLOBAL} or {_LOCAL}, got {kinds!r}; choose "
            "another model"
        )
    return [str(kind) for kind in kinds[:num_layers]]


def _thetas(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the RoPE base of both kinds of layer, in today's or the older published names."""
    named: Mapping[str, Any] = config.get("rope_parameters") or {}
    kinds = {kind: named.get(kind) or {} for kind in (_GLOBAL, _LOCAL)}
    others = (item for item in kinds.values() if item.get("rope_type", "default") != "default")
    _require_plain_rope(config.get("rope_scaling") or next(others, None))
    of_global = kinds[_GLOBAL].get("rope_theta") or config.get("global_rope_theta") or 160_000.0
    # An older file whose local base is null means the global one.
    of_local = kinds[_LOCAL].get("rope_theta") or config.get("local_rope_theta", 10_000.0) or of_global
    return {_GLOBAL: float(of_global), _LOCAL: float(of_local)}


def language_model(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint of the language model inside an NV-Embed's, any other as it is."""
    if checkpoint.config.get("model_type") != "nvembed":
        return checkpoint
    inner: Any = checkpoint.config.get("text_config")
    if not isinstance(inner, dict) or inner.get("model_type") != "bidir_mistral":
        raise ModelError(
            "text_config of an NV-Embed must describe a model of type bidir_mistral, got another; fetch "
            "config.json again"
        )
    # The latent attention behind it keeps its own part of the configuration.
    kept = {name: value for name, value in checkpoint.config.items() if name == "latent_attention_config"}
    return replace(checkpoint, config={**inner, **kept, "model_type": "mistral"})


def read_decoder(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, is_causal: bool = False
) -> Transformer:
    """Read a decoder; another variant or a misfit raises :class:`ModelError`.

    Causal, it is a model with a fingerprint of its own.
    """
    if is_causal:
        key = fingerprint(kind="causal", checkpoint=checkpoint.fingerprint)
        checkpoint = replace(checkpoint, fingerprint=key)
    config, shape = checkpoint.config, _decoder_shape(checkpoint, is_causal=is_causal)
    width, epsilon = checkpoint.integer("hidden_size"), checkpoint.number("rms_norm_eps", default=1e-6)
    rotary = read_rotary(checkpoint, shape.head_dim, shape.max_positions, device)
    tokens = "embed_tokens.weight"
    reader = WeightReader(checkpoint.tensors, tokens, device, dtype, epsilon=epsilon, kind="rms")
    output_bias, mlp_bias = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
    input_bias = output_bias or config.get("model_type") == "qwen2"

    def finish(layer: Layer, prefix: str) -> Layer:
        if config.get("model_type") in ("qwen3", PPLX):
            query_norm, key_norm = (
                reader.norm(f"{prefix}.self_attn.{name}_norm", shape.head_dim) for name in "qk"
            )
            layer = replace(layer, query_norm=query_norm, key_norm=key_norm)
        reader.require_all_read(prefix)
        return layer

    return _transformer(
        checkpoint,
        reader,
        _DECODER,
        shape,
        InputEmbedding(tokens_VD=reader.read(tokens, (checkpoint.integer("vocab_size"), width))),
        inner=checkpoint.integer("intermediate_size"),
        activation=_activation(checkpoint, default="silu"),
        biases=(input_bias, output_bias, mlp_bias, mlp_bias),
        finish=finish,
        final_norm=reader.norm("norm", width),
        rotary={False: rotary},
    )


def _decoder_shape(checkpoint: Checkpoint, *, is_causal: bool) -> Shape:
    width, num_heads = checkpoint.integer("hidden_size"), checkpoint.integer("num_attention_heads")
    num_shared_heads = checkpoint.integer("num_key_value_heads", default=num_heads)
    head_dim = checkpoint.integer("head_dim", default=max(1, width // num_heads))
    if num_heads % num_shared_heads or head_dim % 2:
        raise ModelError(
            "a decoder must have a multiple of num_key_value_heads as heads and an even head_dim, got "
            f"{num_heads} heads for {num_shared_heads} and {head_dim} dimensions; config.json does not fit "
            "the model"
        )
    max_positions, config = checkpoint.integer("max_position_embeddings"), checkpoint.config
    # Mistral's layers slide a window where one is given, Qwen's where it is switched on besides.
    has_window = config.get("use_sliding_window", config.get("model_type") == "mistral")
    if is_causal and has_window and config.get("sliding_window") is not None:
        max_positions = min(max_positions, checkpoint.integer("sliding_window"))
    return Shape(
        num_heads=num_heads,
        num_key_value_heads=num_shared_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_first=True,
        is_causal=is_causal,
    )
