"""A model's folder as we load it and as transformers does, the oracle, and rows of ids for both."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.packed import Packed
from cairn.pipeline.model.engine.pattern import Rectangle
from safetensors.torch import load_file

DIM, HEADS = 32, 4
SIZES: dict[str, Any] = {
    "hidden_size": DIM,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
}
"""Of tiny models, in the names of transformers."""

LENGTHS = np.array([61, 40, 7, 1])
"""In blocks of local layers the longest is several long, the others end inside one."""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Settings of rotary positions."""

_NOMIC_SETTINGS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
NOMIC_NAMES = {
    "encoder.layers": "layers",
    "emb_ln": "embeddings.LayerNorm",
    "attn.out_proj": "self_attn.o_proj",
    "fc11": "up_proj",
    "fc12": "gate_proj",
    "fc2": "down_proj",
    "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
}
"""Parts of names as its authors have them, and as transformers has them."""
NATIVE_WEIGHTS = "native.safetensors"
"""Beside the weights in their authors' names: the same in those of transformers, as ``make`` drew them."""

_TYPES = "embeddings.token_type_embeddings.weight"


def load(folder: Path, **settings: Any) -> Any:
    """Return the backbone, in fp32 unless told otherwise."""
    named: dict[str, Any] = {"precision": "fp32"} | settings
    return load_backbone(EncoderConfig(model=str(folder), **named))


def states_in_all_patterns(backbone: Any, *given: Any, **settings: Any) -> list[torch.Tensor]:
    """Return the states of padded rows, then of packed ones, which know no bias of distances."""
    patterns = [Rectangle] if backbone.relative_bias else [Rectangle, Packed]
    found: list[torch.Tensor] = []
    for backbone.pattern_type in patterns:
        found.append(backbone.hidden_states(*given, **settings))
    return found


def random_ids(backbone: Any, lengths: np.ndarray = LENGTHS) -> np.ndarray:
    """Return padded rows of those lengths."""
    ids = np.random.default_rng(0).integers(
        5, len(backbone.token_embeddings), (len(lengths), int(lengths.max()))
    )
    return np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, backbone.pad_id).astype(np.int64)


def published(folder: Path) -> Any:
    """Return the folder's model as transformers reads it: eager, float32, every name used."""
    return transformers_model(*native(folder))


def transformers_model(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """Return a model by configuration and tensors in the names of transformers."""
    from transformers import AutoConfig, AutoModel

    if config.get("type_vocab_size") == 0:  # the library has no model without types
        config["type_vocab_size"], tensors[_TYPES] = 1, torch.zeros(1, config["hidden_size"])
    settings = AutoConfig.for_model(config.pop("model_type"), **config)
    model = AutoModel.from_config(settings, attn_implementation="eager").eval()
    found = model.load_state_dict(tensors, strict=False)
    assert {name.partition(".")[0] for name in found.unexpected_keys} <= {
        "head",
        "decoder",
        "lm_head",
        "pooler",
    }
    assert {name.partition(".")[0] for name in found.missing_keys} <= {"pooler"}
    return model


def native(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a folder's configuration and tensors in the names transformers gives them."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    tensors = {
        re.sub(r"^(model|bert|new|mpnet)\.", "", name): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    if "n_embd" in config:
        return nomic_config(config), load_file(folder / NATIVE_WEIGHTS)
    if config["model_type"] == "new":
        scaling, theta = config.pop("rope_scaling", None), config.pop("rope_theta")
        rope = {"rope_type": "default", "rope_theta": theta}
        if scaling and scaling["factor"] > 1:
            # Fixed NTK is a larger base with all frequencies divided; a head has 8 dimensions.
            factor = scaling["factor"]
            rope = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / 8)}
        for name in ("pack_qkv", "logn_attention_scale"):
            config.pop(name)
        return config | {"model_type": "gte", "rope_parameters": rope}, load_file(folder / NATIVE_WEIGHTS)
    known = {"bidirectional_pplx_qwen3": "qwen3", "m3bert": "llama"}
    return config | {"model_type": known.get(config["model_type"], config["model_type"])}, tensors


def nomic_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a NomicBERT's configuration in the names of transformers."""
    rope = {"rope_type": "default", "rope_theta": config["rotary_emb_base"]}
    named = {name: config[published] for published, name in _NOMIC_SETTINGS.items()}
    kept = {name: config[name] for name in ("model_type", "type_vocab_size", "vocab_size")}
    return {**kept, **named, "rope_parameters": rope}


def visible_bias(visible: torch.Tensor) -> torch.Tensor:
    """Return a mask for transformers, given whole so that nothing is added to it."""
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)


@torch.inference_mode()
def published_hidden(
    model: Any, ids: np.ndarray, lengths: np.ndarray, *, is_causal: bool = False
) -> torch.Tensor:
    """All tokens of a row see each other, or those before them, by the mask that the model makes itself."""
    num_tokens = ids.shape[1]
    is_text = torch.arange(num_tokens) < torch.from_numpy(lengths)[:, None]
    mask, settings = is_text.long(), {}
    if hasattr(model, "embed_tokens"):  # a decoder
        settings["use_cache"] = False
        if not is_causal:
            mask = visible_bias(is_text[:, None, None].expand(-1, 1, num_tokens, -1))
    return model(input_ids=torch.from_numpy(ids), attention_mask=mask, **settings).last_hidden_state


@torch.inference_mode()
def published_behind_context(
    model: Any, ids: np.ndarray, context: np.ndarray, *, is_causal: bool = False
) -> torch.Tensor:
    """Return one text's states behind context as input embeddings that have no position.

    They stand at angle 0, see and are seen in global layers alone, and a learned position that the model adds
    is taken away before. The text's positions start where they do without context.
    """
    num_context, kind = len(context), model.config.model_type
    counts_from_padding = kind in ("roberta", "xlm-roberta", "camembert", "mpnet")
    first = model.embeddings.padding_idx + 1 if counts_from_padding else 0
    unplaced = torch.from_numpy(context)
    if hasattr(model, "embeddings") and hasattr(model.embeddings, "position_embeddings"):
        unplaced = unplaced - model.embeddings.position_embeddings.weight[0]
    embeds = torch.cat([unplaced, model.get_input_embeddings()(torch.from_numpy(ids))])[None]
    place = torch.arange(embeds.shape[1])
    positions = torch.where(place < num_context, 0, place - num_context + first)[None]
    settings: dict[str, Any] = {}
    if hasattr(model, "embed_tokens"):
        visible = torch.ones(len(place), len(place), dtype=torch.bool)
        visible = visible.tril() | (place < num_context) if is_causal else visible
        settings = {"attention_mask": visible_bias(visible)[None, None], "use_cache": False}
    elif kind == "modernbert":
        is_near = (place[:, None] - place).abs() <= model.config.local_attention // 2
        is_near &= (place[:, None] >= num_context) & (place >= num_context)
        local = torch.where(is_near | torch.eye(len(place), dtype=torch.bool), 0.0, -torch.inf)[None, None]
        settings["attention_mask"] = {"full_attention": torch.zeros_like(local), "sliding_attention": local}
    elif kind == "mpnet":
        bias_1HTT = type(model.encoder).compute_position_bias(model.encoder, embeds[:, num_context:])
        padded = torch.nn.functional.pad(bias_1HTT, (num_context, 0, num_context, 0))
        model.encoder.compute_position_bias = lambda _: padded
    found = model(inputs_embeds=embeds, position_ids=positions, **settings)
    return found.last_hidden_state[0, num_context:]


def worst(ours: torch.Tensor, theirs: torch.Tensor, lengths: np.ndarray = LENGTHS) -> float:
    """Return the largest difference of tokens that are not padding."""
    return max(
        float((ours[row, :length] - theirs[row, :length]).abs().max())
        for row, length in enumerate(lengths.tolist())
    )
