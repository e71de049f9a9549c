"""Random CDE checkpoints in the published layouts of both versions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.tiny_models import TINY, Size

if TYPE_CHECKING:
    import torch

CDE_CONTEXT = 6
"""J of the tiny CDE models.

With 8 soft prompts and texts of up to 40 tokens before it, fewer than their backbones' positions.
"""

BACKBONE_FILES = {1: "nomic-bert-2048.json", 2: "ModernBERT-base.json"}
BACKBONE_LAYERS = {1: 2, 2: 4}
"""By version, unless the size says otherwise."""


@pytest.fixture(scope="session")
def make_cde(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return ``make(version, **settings)``, which writes a random CDE checkpoint in the published layout.

    Settings are those of config.json. Its backbones' configuration lies beside it.
    """

    def make(version: int, seed: int = 0, size: Size = TINY, **settings: Any) -> Path:
        from safetensors.torch import save_file

        vocab_size: int = json.loads((tiny_model_folder / "config.json").read_text())["vocab_size"]
        config = cde_config(version) | settings
        num_layers = size.layers or BACKBONE_LAYERS[version]
        folder = tmp_path_factory.mktemp("cde") / "model"
        folder.mkdir()
        shutil.copy(tiny_model_folder / "tokenizer.json", folder)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(cde_tensors(version, size, num_layers, vocab_size, seed), folder / "model.safetensors")
        (folder / BACKBONE_FILES[version]).write_text(
            json.dumps(cde_backbone_config(version, size, num_layers, vocab_size))
        )
        return folder

    return make


def cde_config(version: int) -> dict[str, Any]:
    """Return config.json as published, but for the size."""
    config = {
        "architecture": "transductive",
        "architectures": ["DatasetTransformer" if version == 1 else "ContextualDocumentEmbeddingTransformer"],
        "autoregressive_backbone": False,
        "dataset_backbone": None,
        "disable_dropout": True,
        "disable_transductive_rotary_embedding": True,
        "embedder": "nomic-ai/nomic-bert-2048" if version == 1 else "answerdotai/ModernBERT-base",
        "embedding_output_dim": None,
        "limit_layers": None,
        "limit_layers_first_stage": None,
        "logit_scale": 50.0,
        "max_seq_length": 40,
        "torch_dtype": "float32",
        "transductive_corpus_size": CDE_CONTEXT,
        "transductive_sequence_dropout_prob": 0.0,
        "transductive_tie_token_embeddings": False,
        "transductive_tokens_per_document": 1,
    }
    if version == 2:
        config |= {
            "pool_ignore_contextual_tokens": True,
            "pool_ignore_instruction_tokens": True,
            "pooling_strategy": "mean",
        }
    return config


def cde_backbone_config(version: int, size: Size, num_layers: int, vocab_size: int) -> dict[str, Any]:
    """Return the configuration of a version's backbone."""
    if version == 1:
        return {
            "model_type": "nomic_bert", "n_embd": size.width, "n_head": size.heads, "n_inner": size.inner,
            "n_layer": num_layers, "n_positions": size.positions, "rotary_emb_base": 1000,
            "vocab_size": vocab_size,
        }  # fmt: skip
    return {
        "model_type": "modernbert", "hidden_size": size.width, "num_attention_heads": size.heads,
        "intermediate_size": size.inner, "num_hidden_layers": num_layers,
        "max_position_embeddings": size.positions, "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "local_attention": size.window,
        "vocab_size": vocab_size,
    }  # fmt: skip


def cde_tensors(
    version: int, size: Size, num_layers: int, vocab_size: int, seed: int
) -> dict[str, torch.Tensor]:
    """Return the tensors of both stages in the published names."""
    weights = RandomWeights(100 * version + seed, size.width)
    first, second = "first_stage_model", "second_stage_model"
    add_backbone = weights.add_nomic_bert if version == 1 else weights.add_modernbert
    for prefix in (f"{first}.embedder.", f"{second}.backbone."):
        add_backbone(prefix, num_layers, size.inner, vocab_size)
    for name, rows in (
        (f"{first}.mlp.0", size.width),
        (f"{first}.mlp.2", size.width),
        (f"{second}.prompt_projection.0", size.width),
        (f"{second}.prompt_projection.2", 8 * size.width),
        (f"{second}.output_projection.0", size.width),
        (f"{second}.output_projection.2", size.width),
    ):
        weights.matrix(name, rows, size.width, bias=True)
    return weights.tensors


class RandomWeights:
    """Random tensors by name, of a model of one width."""

    def __init__(self, seed: int, width: int) -> None:
        import torch

        self._generator = torch.Generator().manual_seed(seed)
        self._width = width
        self.tensors: dict[str, torch.Tensor] = {}

    def _random(self, *shape: int) -> torch.Tensor:
        import torch

        return torch.randn(*shape, generator=self._generator)

    def matrix(self, name: str, rows: int, columns: int, scale: float = 0.2, *, bias: bool = False) -> None:
        self.tensors[f"{name}.weight"] = self._random(rows, columns) * scale
        if bias:
            self.tensors[f"{name}.bias"] = self._random(rows) * 0.1

    def norm(self, name: str, *, bias: bool = False) -> None:
        self.tensors[f"{name}.weight"] = 1 + self._random(self._width) * 0.1
        if bias:
            self.tensors[f"{name}.bias"] = self._random(self._width) * 0.1

    def add_nomic_bert(self, prefix: str, num_layers: int, inner: int, vocab_size: int) -> None:
        width = self._width
        self.matrix(f"{prefix}embeddings.word_embeddings", vocab_size, width, scale=1.0)
        self.matrix(f"{prefix}embeddings.token_type_embeddings", 2, width)
        self.norm(f"{prefix}emb_ln", bias=True)
        for layer in (f"{prefix}encoder.layers.{index}" for index in range(num_layers)):
            self.matrix(f"{layer}.attn.Wqkv", 3 * width, width)
            self.matrix(f"{layer}.attn.out_proj", width, width)
            self.matrix(f"{layer}.mlp.fc11", inner, width)
            self.matrix(f"{layer}.mlp.fc12", inner, width)
            self.matrix(f"{layer}.mlp.fc2", width, inner)
            self.norm(f"{layer}.norm1", bias=True)
            self.norm(f"{layer}.norm2", bias=True)

    def add_modernbert(self, prefix: str, num_layers: int, inner: int, vocab_size: int) -> None:
        width = self._width
        self.matrix(f"{prefix}embeddings.tok_embeddings", vocab_size, width, scale=1.0)
        self.norm(f"{prefix}embeddings.norm")
        self.norm(f"{prefix}final_norm")
        for index in range(num_layers):
            layer = f"{prefix}layers.{index}"
            if index:
                self.norm(f"{layer}.attn_norm")
            self.matrix(f"{layer}.attn.Wqkv", 3 * width, width)
            self.matrix(f"{layer}.attn.Wo", width, width)
            self.norm(f"{layer}.mlp_norm")
            self.matrix(f"{layer}.mlp.Wi", 2 * inner, width)
            self.matrix(f"{layer}.mlp.Wo", width, inner)
