"""The file of a quantised model: ``cairn_quantized.safetensors`` in place of ``model.safetensors``.

    NAME                        a tensor as published, such as embeddings, norms and biases
    NAME.codes NAME.scales      a quantised matrix (``pipeline/quantized_matrix.py``)
    NAME.zeros                  the same, of int4

``cairn_quantized.json`` holds the version of this layout, the format of the weights and the file's SHA-256.
There is no ``model.safetensors`` beside it: another library says that it is missing and computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from cairn.pipeline import durable
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.folders.sentence_transformers_folder import read_json
from cairn.pipeline.quantized_matrix import QuantizedMatrix, QuantizedTensors
from safetensors.torch import save_file

QUANTIZED_NAME: Final = "cairn_quantized.safetensors"
DESCRIPTION_NAME: Final = "cairn_quantized.json"
VERSION: Final = 1


def write_quantized(folder: Path, tensors: QuantizedTensors) -> None:
    """Write both files into a folder that is being made."""
    stored = dict(tensors.plain)
    for name, matrix in tensors.matrices.items():
        stored |= {f"{name}.codes": matrix.codes, f"{name}.scales": matrix.scales_EG}
        if matrix.zeros_EG is not None:
            stored[f"{name}.zeros"] = matrix.zeros_EG
    path = folder / QUANTIZED_NAME
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in stored.items()}, path)
    durable.write_json(
        folder / DESCRIPTION_NAME, {"version": VERSION, "sha256": durable.sha256_of_file(path)}
    )


def require_described(path: Path) -> None:
    """Raise :class:`ModelError` for a file of another version, or that is not as it was written."""
    description: Any = read_json(path.parent / DESCRIPTION_NAME)
    if description.get("version") != VERSION:
        raise ModelError(
            f"{DESCRIPTION_NAME} must be of version {VERSION}, got {description.get('version')!r}; compress "
            "the model again"
        )
    if description.get("sha256") != durable.sha256_of_file(path):
        raise ModelError(
            f"{path.name} of the model must have the SHA-256 that {DESCRIPTION_NAME} gives, got another; "
            "copy or compress the model again"
        )


def quantized_tensors(stored: Mapping[str, torch.Tensor]) -> QuantizedTensors:
    """Return what the file holds, matrices as they are stored.

    A matrix that is there whole as well, such as one trained since, is read whole.
    """
    matrices: dict[str, QuantizedMatrix] = {}
    for name in stored:
        if name.endswith(".codes"):
            base = name.removesuffix(".codes")
            matrices[base] = QuantizedMatrix(
                codes=stored[name], scales_EG=stored[f"{base}.scales"], zeros_EG=stored.get(f"{base}.zeros")
            )
    parts = {f"{base}.{part}" for base in matrices for part in ("codes", "scales", "zeros")}
    plain = {name: tensor for name, tensor in stored.items() if name not in parts}
    return QuantizedTensors(plain, {name: each for name, each in matrices.items() if name not in plain})
