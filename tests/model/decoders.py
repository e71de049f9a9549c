"""A folder's decoder as we load it and as transformers does, the oracle, and rows of ids for both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from safetensors.torch import load_file

LENGTHS = np.array([41, 40, 7, 1])
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Settings of rotary positions."""


def load(folder: Path, **settings: Any) -> Any:
    """Return the backbone, in fp32 unless told otherwise."""
    named: dict[str, Any] = {"precision": "fp32"} | settings
    return load_backbone(EncoderConfig(model=str(folder), **named))


def random_ids(backbone: Any, lengths: np.ndarray = LENGTHS) -> np.ndarray:
    """Return padded rows of those lengths."""
    ids = np.random.default_rng(0).integers(
        5, len(backbone.token_embeddings), (len(lengths), int(lengths.max()))
    )
    return np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, backbone.pad_id).astype(np.int64)


def published(folder: Path) -> Any:
    """Return the folder's model as transformers reads it: eager, float32, every name used."""
    import transformers

    config = json.loads((folder / "config.json").read_text())
    name = config["model_type"].capitalize()
    settings = getattr(transformers, f"{name}Config")(**config, attn_implementation="eager")
    model = getattr(transformers, f"{name}Model")(settings).eval()
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict(
        {key.removeprefix("model."): tensor for key, tensor in tensors.items() if "lm_head" not in key},
        strict=True,
    )
    return model


@torch.inference_mode()
def published_hidden(model: Any, ids: np.ndarray, lengths: np.ndarray, *, is_causal: bool) -> torch.Tensor:
    """All tokens of a row see each other, or those before them.

    The mask is given whole, so that nothing is added to it.
    """
    num_tokens = ids.shape[1]
    visible = (torch.arange(num_tokens) < torch.from_numpy(lengths)[:, None])[:, None, None].expand(
        -1, 1, num_tokens, -1
    )
    if is_causal:
        visible = visible & torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    return model(input_ids=torch.from_numpy(ids), attention_mask=bias, use_cache=False).last_hidden_state


def worst(ours: torch.Tensor, theirs: torch.Tensor, lengths: np.ndarray = LENGTHS) -> float:
    """Return the largest difference of tokens that are not padding."""
    return max(
        float((ours[row, :length] - theirs[row, :length]).abs().max())
        for row, length in enumerate(lengths.tolist())
    )
