"""Tiny models of new random weights of every family that the engine runs, in their published layouts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cairn.pipeline.lab.train.pretrain import new_checkpoint
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from safetensors.torch import load_file, save_file

from tests.model.published import DIM, HEADS, NATIVE_WEIGHTS, NOMIC_NAMES, SIZES
from tests.model.transformers_families import make_family as make_family

DECODER: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "distilbert": {
        "dim": DIM,
        "n_layers": 2,
        "n_heads": HEADS,
        "hidden_dim": 48,
        "max_position_embeddings": 96,
    },
    "mpnet": {**SIZES, "max_position_embeddings": 98},
    "modernbert": {  # the second and third layer are local
        **SIZES,
        "num_hidden_layers": 4,
        "hidden_activation": "gelu",
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "local_attention": 8,
        "pad_token_id": 0,
        "cls_token_id": 2,
    },
    "nomic_bert": {
        "activation_function": "swiglu",
        "n_embd": DIM,
        "n_head": HEADS,
        "n_inner": 48,
        "n_layer": 2,
        "n_positions": 96,
        "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 1000,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "prenorm": False,
        "causal": False,
        "qkv_proj_bias": False,
        "type_vocab_size": 2,
    },
    "new": {
        **SIZES,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "layer_norm_type": "layer_norm",
        "position_embedding_type": "rope",
        "rope_theta": 500.0,
        "rope_scaling": {"type": "ntk", "factor": 2.0},
        "logn_attention_scale": False,
        "pack_qkv": True,
        "type_vocab_size": 2,
    },
    **dict.fromkeys(("mistral", "qwen3", "llama", "bidirectional_pplx_qwen3"), DECODER),
    "qwen2": {**DECODER, "head_dim": DIM // HEADS},
    "m3bert": SIZES,
}
GTE_NAMES = {
    "encoder.layer": "layers",
    "attention.": "self_attn.",
    "attn_ln": "post_attention_layernorm",
    "mlp_ln": "post_mlp_layernorm",
}


def as_published(
    family: str, config: dict[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a family in the names that its authors gave them, with what they joined."""
    found, names = dict(tensors), {"nomic_bert": NOMIC_NAMES, "new": GTE_NAMES}.get(family, {})
    joined: dict[str, list[str]] = {}
    if names and config.get("pack_qkv", True):
        joint = "self_attn.qkv_proj" if family == "new" else "attn.Wqkv"
        joined = {joint: [f"self_attn.{part}_proj" for part in "qkv"]}
    if family == "new":
        joined["mlp.up_gate_proj"] = ["mlp.up_proj", "mlp.gate_proj"]
    for joint, parts in joined.items():
        for name in [name for name in found if parts[0] in name]:
            of_parts = [found.pop(name.replace(parts[0], part)) for part in parts]
            found[name.replace(parts[0], joint)] = torch.cat(of_parts)
    for theirs, native in names.items():
        found = {name.replace(native, theirs): tensor for name, tensor in found.items()}
    return found


@pytest.fixture(scope="session")
def make(
    tiny_model_folder: Path, tiny_roberta_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Return a writer of folders by family; settings may be changed or, as None, left out."""
    tokenizer = read_checkpoint(tiny_model_folder)

    def write(family: str, prefix: str | None = None, **changes: Any) -> Path:
        if family in ("bert", "roberta"):
            return tiny_roberta_folder if family == "roberta" else tiny_model_folder
        vocabulary = {"vocab_size": tokenizer.tokenizer.get_vocab_size()}
        config: dict[str, Any] = {"model_type": family, **vocabulary, **FAMILIES[family], **changes}
        config = {name: value for name, value in config.items() if value is not None or name not in changes}
        generator = torch.Generator().manual_seed(2)
        native: dict[str, torch.Tensor] = {}
        for name, drawn in new_checkpoint(config, tokenizer).tensors.items():
            random = torch.randn(drawn.shape, generator=generator)
            scale = 0.15 if drawn.ndim > 1 else 0.3 if name.endswith("bias") else 0.1
            is_table = drawn.ndim > 1 and len(drawn) >= vocabulary["vocab_size"] and "emb" in name
            native[name] = random if is_table else random * scale + float(drawn.flatten()[0] == 1)
        prefix = ("model." if "num_key_value_heads" in config else "") if prefix is None else prefix
        published = as_published(family, config, native)
        tensors = {prefix + name: tensor for name, tensor in published.items()}
        if prefix:
            tensors["lm_head.weight"] = torch.zeros(vocabulary["vocab_size"], DIM)
        folder = tmp_path_factory.mktemp(family) / "model"
        folder.mkdir()
        shutil.copy(tiny_model_folder / "tokenizer.json", folder)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        save_file(native, folder / NATIVE_WEIGHTS)
        return folder

    return write


@pytest.fixture(scope="session")
def make_nv_embed(
    make: Callable[..., Path], latent_block: Callable[..., dict[str, torch.Tensor]]
) -> Callable[..., Path]:
    """Return a writer of Mistrals as NV-Embed publishes them: below a prefix, their configuration inside.

    With ``num_heads`` they have a latent attention of so many.
    """

    def write(num_heads: int | None = None) -> Path:
        folder = make("mistral", prefix="embedding_model.")
        inner = json.loads((folder / "config.json").read_text()) | {"model_type": "bidir_mistral"}
        config: dict[str, Any] = {"model_type": "nvembed", "text_config": inner}
        if num_heads is not None:
            config["latent_attention_config"] = {"num_cross_heads": num_heads}
            tensors = load_file(folder / "model.safetensors") | latent_block(DIM, num_heads, 16)
            save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write
