"""A checkpoint as the engine that compression works on: float32 on the CPU, weights as they lie."""

from __future__ import annotations

import torch
from cairn.pipeline.model.backbone_loader import reader_of
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.families.decoder import language_model
from cairn.pipeline.model.folders.checkpoint import Checkpoint


def read_engine(
    checkpoint: Checkpoint, *, is_causal: bool, dtype: torch.dtype = torch.float32
) -> Transformer:
    """Return a checkpoint's engine; a misfit raises :class:`ModelError`."""
    read = reader_of(checkpoint.config.get("model_type"))
    settings = {"is_causal": True} if is_causal else {}
    return read(language_model(checkpoint), dtype=dtype, device=torch.device("cpu"), **settings)
