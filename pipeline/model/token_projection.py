"""The token projection: last-layer states to the dimensions of late interaction, and query weights.

    document token    normalise(h W)              query token    normalise(h W), weighing w[id]

One file, ``cairn_late.safetensors``, beside the model it was trained for: the matrix W in float16, a weight a
token id in 8 bits, root mean squares of the projected dimensions, from which a codec takes its steps, and how
many neighbours it was trained to pool. Its metadata names the base with the hash of its weights.

    T tokens    D model dim    V vector dim    X vocabulary
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from jaxtyping import Float, Float32, Int, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from pipeline import durable
from pipeline.errors import ModelError
from pipeline.manifest import fingerprint

LATE_NAME: Final = "cairn_late.safetensors"
LATE_FORMAT: Final = 1
METADATA_KEY: Final = "cairn_late"
MAX_CODE: Final = 255


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenProjection:
    """A trained projection; ``base_sha256`` names the weights it was trained for."""

    matrix_DV: Float32[np.ndarray, "D V"]
    weight_codes_X: UInt8[np.ndarray, " X"]
    weight_step: float
    rms_V: Float32[np.ndarray, " V"]
    pool_tokens: int
    base_sha256: str

    @property
    def fingerprint(self) -> str:
        """Identify everything that moves a score."""
        return fingerprint(
            kind="token projection",
            format=LATE_FORMAT,
            matrix=self.matrix_DV.tobytes().hex(),
            weights=self.weight_codes_X.tobytes().hex(),
            weight_step=self.weight_step,
            pool_tokens=self.pool_tokens,
        )

    def project(self, states_TD: Float[torch.Tensor, "T D"]) -> Float32[torch.Tensor, "T V"]:
        """Return the unit vectors of token states."""
        matrix_DV = torch.from_numpy(self.matrix_DV).to(states_TD.device)
        return F.normalize(states_TD.float() @ matrix_DV, dim=1)

    def weights_of(self, ids_q: Int[np.ndarray, " q"]) -> Float32[np.ndarray, " q"]:
        """Return what each token of a query weighs."""
        return self.weight_codes_X[ids_q].astype(np.float32) * np.float32(self.weight_step)


def quantised_weights(weight_X: Float[np.ndarray, " X"]) -> tuple[UInt8[np.ndarray, " X"], float]:
    """Return weights of at least 0 as whole steps, and the step."""
    step = max(float(weight_X.max()), float(np.finfo(np.float32).tiny)) / MAX_CODE
    return np.rint(weight_X / step).astype(np.uint8), step


def save_token_projection(folder: Path, projection: TokenProjection) -> None:
    """Write the file into a folder, whole or not at all."""
    tensors = {
        "matrix": torch.from_numpy(projection.matrix_DV).half(),
        "term_weights": torch.from_numpy(projection.weight_codes_X),
        "rms": torch.from_numpy(projection.rms_V),
    }
    settings = {
        "format": LATE_FORMAT,
        "term_weight_step": projection.weight_step,
        "pool_tokens": projection.pool_tokens,
        "base_sha256": projection.base_sha256,
    }
    # One entry: safetensors writes several in any order.
    metadata = {METADATA_KEY: json.dumps(settings, sort_keys=True)}
    with durable.storage_errors(f"saving {LATE_NAME}"):
        folder.mkdir(parents=True, exist_ok=True)
        durable.write_bytes(folder / LATE_NAME, save(tensors, metadata=metadata))


def read_token_projection(
    folder: Path, *, model_dim: int, vocabulary_size: int, weights_sha256: str
) -> TokenProjection | None:
    """Return the projection of a model's folder, None where it has none.

    One that is damaged, or was trained for another model, raises :class:`ModelError`.
    """
    path = folder / LATE_NAME
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="np") as stored:
            settings = json.loads((stored.metadata() or {})[METADATA_KEY])
            stored_format = settings["format"]
            matrix_DV, codes_X, rms_V = (
                stored.get_tensor(name) for name in ("matrix", "term_weights", "rms")
            )
            projection = TokenProjection(
                matrix_DV=matrix_DV.astype(np.float32),
                weight_codes_X=codes_X,
                weight_step=float(settings["term_weight_step"]),
                rms_V=rms_V,
                pool_tokens=int(settings["pool_tokens"]),
                base_sha256=settings["base_sha256"],
            )
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{LATE_NAME} of the model must be a whole token projection, got a damaged file; train it again"
        ) from error
    if stored_format != LATE_FORMAT:
        raise ModelError(
            f"{LATE_NAME} of the model must have format {LATE_FORMAT}, got {stored_format}; update Cairn"
        )
    shape = (*projection.matrix_DV.shape, len(projection.rms_V), len(codes_X))
    wanted = (model_dim, len(rms_V), len(rms_V), vocabulary_size)
    if shape != wanted or projection.base_sha256 != weights_sha256:
        raise ModelError(
            f"{LATE_NAME} of the model must be trained for its weights, got one of {shape[0]} dimensions and "
            f"{shape[3]} token ids for others; train one with `cairn train-late`"
        )
    return projection
