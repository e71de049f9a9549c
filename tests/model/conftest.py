"""Tiny random models with rotary positions, in their published layouts and as transformers reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cde_checkpoints import RandomWeights
from tests.model.transformers_families import make_family as make_family

DIM, HEADS, INNER, POSITIONS = 32, 4, 48, 96


def weights_of(seed: int) -> RandomWeights:
    return RandomWeights(seed, DIM, scale=0.15, bias_scale=0.3)


def _write(folder: Path, tokenizer: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _vocab_size(tokenizer: Path) -> int:
    return json.loads((tokenizer / "config.json").read_text())["vocab_size"]


@pytest.fixture(scope="session")
def make_modernbert(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a writer of ModernBERTs: four layers, the second and third local.

    Settings may be changed or, as None, left out.
    """

    def make(prefix: str = "", bias: bool = False, **changes: Any) -> Path:
        vocab_size = _vocab_size(tiny_model_folder)
        config = {
            "model_type": "modernbert",
            "hidden_size": DIM,
            "num_hidden_layers": 4,
            "num_attention_heads": HEADS,
            "intermediate_size": INNER,
            "hidden_activation": "gelu",
            "max_position_embeddings": POSITIONS,
            "norm_eps": 1e-5,
            "norm_bias": bias,
            "attention_bias": False,
            "mlp_bias": False,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
            "local_attention": 8,
            "vocab_size": vocab_size,
            "pad_token_id": 0,
            "cls_token_id": 2,
            "bos_token_id": 2,
            "sep_token_id": 3,
            "eos_token_id": 3,
        } | changes
        weights = weights_of(seed=2)
        weights.add_modernbert(prefix, 4, INNER, vocab_size, bias=bias)
        tensors = weights.tensors
        if prefix:
            tensors |= {"head.dense.weight": torch.zeros(DIM, DIM), "decoder.bias": torch.zeros(vocab_size)}
        config = {name: value for name, value in config.items() if value is not None}
        return _write(tmp_path_factory.mktemp("modernbert") / "model", tiny_model_folder, config, tensors)

    return make


@pytest.fixture(scope="session")
def make_nomic_bert(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a writer of NomicBERTs of two layers, in the published names; settings may be changed."""

    def make(prefix: str = "", **changes: Any) -> Path:
        vocab_size = _vocab_size(tiny_model_folder)
        config = {
            "model_type": "nomic_bert",
            "activation_function": "swiglu",
            "n_embd": DIM,
            "n_head": HEADS,
            "n_inner": INNER,
            "n_layer": 2,
            "n_positions": POSITIONS,
            "layer_norm_epsilon": 1e-12,
            "rotary_emb_base": 1000,
            "rotary_emb_fraction": 1.0,
            "rotary_emb_interleaved": False,
            "rotary_emb_scale_base": None,
            "rotary_scaling_factor": None,
            "prenorm": False,
            "causal": False,
            "qkv_proj_bias": False,
            "mlp_fc1_bias": False,
            "mlp_fc2_bias": False,
            "type_vocab_size": 2,
            "vocab_size": vocab_size,
        } | changes
        weights = weights_of(seed=3)
        weights.add_nomic_bert(prefix, 2, INNER, vocab_size)
        return _write(tmp_path_factory.mktemp("nomic") / "model", tiny_model_folder, config, weights.tensors)

    return make


@pytest.fixture(scope="session")
def make_decoder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a writer of decoders of two layers and two shared heads.

    Settings may be changed or, as None, left out.
    """

    def make(model_type: str, prefix: str = "model.", **changes: Any) -> Path:
        vocab_size = _vocab_size(tiny_model_folder)
        config = {
            "model_type": model_type,
            "hidden_size": DIM,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": 2,
            "head_dim": DIM // HEADS if model_type == "qwen2" else 12,
            "intermediate_size": INNER,
            "hidden_act": "silu",
            "max_position_embeddings": POSITIONS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000.0,
            "vocab_size": vocab_size,
            "tie_word_embeddings": False,
            "attention_bias": None,
            "bos_token_id": 2,
            "eos_token_id": 3,
        } | changes
        of_queries, of_keys = HEADS * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
        weights = weights_of(seed=4)
        weights.matrix("embed_tokens", vocab_size, DIM, 1.0)
        for index in range(2):
            layer = f"layers.{index}"
            weights.norm(f"{layer}.input_layernorm", bias=False)
            weights.norm(f"{layer}.post_attention_layernorm", bias=False)
            for name, rows in (("q", of_queries), ("k", of_keys), ("v", of_keys)):
                weights.matrix(
                    f"{layer}.self_attn.{name}_proj",
                    rows,
                    DIM,
                    bias=model_type == "qwen2" or bool(config["attention_bias"]),
                )
            weights.matrix(f"{layer}.self_attn.o_proj", DIM, of_queries, bias=bool(config["attention_bias"]))
            if "qwen3" in model_type:
                for name in ("q_norm", "k_norm"):
                    weights.norm(f"{layer}.self_attn.{name}", bias=False, width=config["head_dim"])
            for name, rows, columns in (("gate", INNER, DIM), ("up", INNER, DIM), ("down", DIM, INNER)):
                weights.matrix(f"{layer}.mlp.{name}_proj", rows, columns, bias=bool(config.get("mlp_bias")))
        weights.norm("norm", bias=False)
        tensors = {prefix + name: tensor for name, tensor in weights.tensors.items()}
        if prefix:
            tensors["lm_head.weight"] = torch.zeros(vocab_size, DIM)
        config = {name: value for name, value in config.items() if value is not None}
        return _write(tmp_path_factory.mktemp(model_type) / "model", tiny_model_folder, config, tensors)

    return make


@pytest.fixture(scope="session")
def make_nv_embed(
    make_decoder: Callable[..., Path], latent_block: Callable[..., dict[str, torch.Tensor]]
) -> Callable[..., Path]:
    """Return a writer of Mistrals as NV-Embed publishes them: below a prefix, their configuration inside.

    With ``num_heads`` they have a latent attention of so many.
    """

    def make(num_heads: int | None = None) -> Path:
        folder = make_decoder("mistral", prefix="embedding_model.")
        inner = json.loads((folder / "config.json").read_text()) | {"model_type": "bidir_mistral"}
        config: dict[str, Any] = {"model_type": "nvembed", "text_config": inner}
        if num_heads is not None:
            config["latent_attention_config"] = {"num_cross_heads": num_heads}
            tensors = load_file(folder / "model.safetensors") | latent_block(DIM, num_heads, 16)
            save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture(scope="session")
def make(
    tiny_model_folder: Path,
    tiny_roberta_folder: Path,
    make_modernbert: Callable[..., Path],
    make_nomic_bert: Callable[..., Path],
    make_gte: Callable[..., Path],
    make_decoder: Callable[..., Path],
    make_family: Callable[[str], Path],
) -> Callable[..., Path]:
    """Return a writer of folders by family; settings may be changed or, as None, left out."""
    makers: dict[str, Callable[..., Path]] = {
        "bert": lambda: tiny_model_folder,
        "roberta": lambda: tiny_roberta_folder,
        "distilbert": lambda: make_family("distilbert"),
        "mpnet": lambda prefix="": _with_prefix(make_family("mpnet"), prefix),
        "mpnet long": lambda: make_family("mpnet long"),
        "modernbert": make_modernbert,
        "nomic_bert": make_nomic_bert,
        "gte": make_gte,
    }
    return lambda family, **changes: (
        makers[family](**changes) if family in makers else make_decoder(family, **changes)
    )


def _with_prefix(folder: Path, prefix: str) -> Path:
    """Return a copy of a folder whose tensors' names begin so."""
    if not prefix:
        return folder
    copy = shutil.copytree(folder, folder.with_name(f"{folder.name} {prefix}"), dirs_exist_ok=True)
    tensors = load_file(copy / "model.safetensors")
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, copy / "model.safetensors")
    return copy


@pytest.fixture(scope="session")
def make_gte(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a writer of GTEs of two layers in the published layout.

    Settings may be changed or, as None, left out.
    """

    def make(prefix: str = "", **changes: Any) -> Path:
        vocab_size = _vocab_size(tiny_model_folder)
        config = {
            "model_type": "new",
            "hidden_size": DIM,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "intermediate_size": INNER,
            "hidden_act": "gelu",
            "max_position_embeddings": POSITIONS,
            "layer_norm_eps": 1e-12,
            "layer_norm_type": "layer_norm",
            "position_embedding_type": "rope",
            "rope_theta": 500.0,
            "rope_scaling": {"type": "ntk", "factor": 2.0},
            "logn_attention_scale": False,
            "pack_qkv": True,
            "type_vocab_size": 2,
            "vocab_size": vocab_size,
        } | changes
        weights = weights_of(seed=5)
        weights.matrix("embeddings.word_embeddings", vocab_size, DIM, 1.0)
        if config["type_vocab_size"]:
            weights.matrix("embeddings.token_type_embeddings", config["type_vocab_size"], DIM)
        weights.norm("embeddings.LayerNorm", bias=True)
        for index in range(2):
            layer = f"encoder.layer.{index}"
            if config["pack_qkv"]:
                weights.matrix(f"{layer}.attention.qkv_proj", 3 * DIM, DIM, bias=True)
            else:
                for name in "qkv":
                    weights.matrix(f"{layer}.attention.{name}_proj", DIM, DIM, bias=True)
            weights.matrix(f"{layer}.attention.o_proj", DIM, DIM, bias=True)
            weights.norm(f"{layer}.attn_ln", bias=True)
            weights.matrix(f"{layer}.mlp.up_gate_proj", 2 * INNER, DIM)
            weights.matrix(f"{layer}.mlp.down_proj", DIM, INNER, bias=True)
            weights.norm(f"{layer}.mlp_ln", bias=True)
        tensors = {prefix + name: tensor for name, tensor in weights.tensors.items()}
        if prefix:
            tensors["lm_head.decoder.bias"] = torch.zeros(vocab_size)
        config = {name: value for name, value in config.items() if value is not None}
        return _write(tmp_path_factory.mktemp("gte") / "model", tiny_model_folder, config, tensors)

    return make


@pytest.fixture(scope="session")
def modernbert_folder(make_modernbert: Callable[..., Path]) -> Path:
    """Return the folder of a tiny ModernBERT."""
    return make_modernbert()


@pytest.fixture(scope="session")
def nomic_bert_folder(make_nomic_bert: Callable[..., Path]) -> Path:
    """Return the folder of a tiny NomicBERT."""
    return make_nomic_bert()
