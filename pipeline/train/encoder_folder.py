"""Write a trained encoder as a model folder that ``--model`` and Sentence-Transformers read.

    model.safetensors             the parameters, under their published names
    cairn_extra.safetensors       landmark_attention.gates, .context_gates, .null_context
    config.json, tokenizer files  as the base has them
    cairn_config.json             the encoder settings it was trained for, which ingest takes over
    modules.json, 1_Pooling/      the same for Sentence-Transformers: chunks pooled alone

The configuration is written last, so that a folder without it is known to be unfinished.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from pipeline import durable
from pipeline.config import EncoderConfig
from pipeline.model.checkpoint import EXTRA_NAME, WEIGHTS_NAME, Checkpoint
from pipeline.model.model_defaults import CAIRN_SETTINGS_NAME, settings_of_a_folder
from pipeline.model.sentence_transformers_folder import TRANSFORMER_SETTINGS_NAME
from pipeline.train.landmark_encoder import OWN_NAMES, LandmarkEncoder

_COPIED: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", TRANSFORMER_SETTINGS_NAME)


def save_encoder(
    model: LandmarkEncoder, base: Checkpoint, folder: Path, encoder: EncoderConfig, *, dtype: torch.dtype = torch.float32
) -> None:
    """Write the folder; ``dtype`` is what the published parameters are stored in. A full disk raises :class:`DiskFullError`."""
    parameters = {name: parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters()}
    own = {name: parameters.pop(name) for name in OWN_NAMES}
    published = {name: tensor.to(dtype) for name, tensor in parameters.items()} | model.other_tensors
    with durable.storage_errors("writing the model"):
        (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
        for name, tensors in ((WEIGHTS_NAME, published), (EXTRA_NAME, own)):
            with durable.replacing(folder / name) as temporary:
                save_file(tensors, temporary)
        for name in _COPIED:
            if (base.folder / name).is_file():
                shutil.copyfile(base.folder / name, folder / name)
        durable.write_json(folder / CAIRN_SETTINGS_NAME, settings_of_a_folder(encoder))
        durable.write_json(folder / "1_Pooling" / "config.json", _pooling(model.model_dim, encoder))
        durable.write_json(folder / "modules.json", _modules())
        durable.write_json(folder / "config.json", dict(base.config))


def save_changes(model: LandmarkEncoder, base: Checkpoint, path: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write only what differs from the base: as ``cairn_extra.safetensors`` beside the base's own weights it makes the trained model.

    Tensors have the base's names; published parameters are stored in ``dtype``, gates and null token in float32.
    """
    changed: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().cpu().contiguous()
        if name in OWN_NAMES:
            changed[name] = tensor
        elif not torch.equal(tensor, base.tensors[model.base_prefix + name].float()):
            changed[model.base_prefix + name] = tensor.to(dtype)
    with durable.storage_errors("writing what changed"), durable.replacing(path) as temporary:
        save_file(changed, temporary)


def _pooling(model_dim: int, encoder: EncoderConfig) -> dict[str, Any]:
    mode = "mean" if encoder.pooling == "mean" else "lasttoken"
    return {"word_embedding_dimension": model_dim, "pooling_mode": mode, "include_prompt": True}


def _modules() -> list[dict[str, Any]]:
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    return [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(parts)
    ]
