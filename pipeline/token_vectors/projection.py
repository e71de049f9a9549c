"""The token projection: last-layer states to the dimensions of late interaction, and query weights.

    document token    normalise(h W)              query token    normalise(h W), weighing w[id]

One file, ``cairn_late.safetensors``, beside the model it was trained for: the matrix W in float16, a weight a
token id in 8 bits, root mean squares of the projected dimensions, from which a codec takes its steps,
and the bits its dimensions are stored in. Its metadata holds a hash of the tensors, and names the base with
the hash of its weights. A collection keeps a copy, so that its codes
stay readable when the model's file changes.

    T tokens    D model dim    V vector dim    X vocabulary
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from cairn.pipeline import durable
from cairn.pipeline.errors import ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.token_vectors.codes import TokenCodec, unit
from jaxtyping import Float, Float32, Int, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

LATE_NAME: Final = "cairn_late.safetensors"
LATE_FORMAT: Final = 2
METADATA_KEY: Final = "cairn_late"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenProjection:
    """A trained projection; ``base_sha256`` names the weights it was trained for."""

    matrix_DV: Float32[np.ndarray, "D V"]
    weight_codes_X: UInt8[np.ndarray, " X"]
    weight_step: float
    rms_V: Float32[np.ndarray, " V"]
    bits: int
    base_sha256: str

    @property
    def codec(self) -> TokenCodec:
        """Return how its vectors become codes."""
        return TokenCodec(rms_V=self.rms_V, bits=self.bits)

    @property
    def fingerprint(self) -> str:
        """Identify everything that moves a score or a code."""
        return fingerprint(
            kind="token projection",
            format=LATE_FORMAT,
            matrix=self.matrix_DV.tobytes().hex(),
            weights=self.weight_codes_X.tobytes().hex(),
            weight_step=self.weight_step,
            bits=self.bits,
            rms=self.rms_V.tobytes().hex(),
        )

    @property
    def vector_bytes(self) -> int:
        """Return the bytes of one code."""
        return self.codec.vector_bytes

    def encode(self, states_TD: Float32[np.ndarray, "T D"]) -> UInt8[np.ndarray, "T bytes"]:
        """Return the codes of token states."""
        return self.codec.encode(self.project(states_TD))

    def similarities(
        self, codes: UInt8[np.ndarray, "T bytes"], query_qV: Float32[np.ndarray, "q V"]
    ) -> Float32[np.ndarray, "T q"]:
        """Return the cosines of what codes stand for with a query's projected tokens."""
        return self.codec.cosines(codes, query_qV)

    def average_similarities(self, query_qV: Float32[np.ndarray, "q V"]) -> Float32[np.ndarray, " q"]:
        """Return zeros: it was trained to tell tokens apart, so that they have nothing in common."""
        return np.zeros(len(query_qV), np.float32)

    def save(self, folder: Path) -> None:
        """Write the file into a folder, whole or not at all."""
        tensors = {
            "matrix": self.matrix_DV.astype(np.float16),
            "term_weights": self.weight_codes_X,
            "rms": self.rms_V,
        }
        settings = {
            "format": LATE_FORMAT,
            "term_weight_step": self.weight_step,
            "bits": self.bits,
            "base_sha256": self.base_sha256,
            "tensors_sha256": _tensors_sha256(tensors),
        }
        # One entry: safetensors writes several in any order.
        metadata = {METADATA_KEY: json.dumps(settings, sort_keys=True)}
        with durable.storage_errors(f"saving {LATE_NAME}"):
            folder.mkdir(parents=True, exist_ok=True)
            durable.write_bytes(folder / LATE_NAME, save(tensors, metadata=metadata))

    def project(self, states_TD: Float[np.ndarray, "T D"]) -> Float32[np.ndarray, "T V"]:
        """Return the unit vectors of token states."""
        return unit(states_TD.astype(np.float32, copy=False) @ self.matrix_DV)

    @property
    def heaviest(self) -> float:
        """Return the weight of the token that weighs most."""
        return float(self.weight_codes_X.max()) * self.weight_step

    def weights_of(self, ids_q: Int[np.ndarray, " q"]) -> Float32[np.ndarray, " q"]:
        """Return what each token of a query weighs."""
        return self.weight_codes_X[ids_q].astype(np.float32) * np.float32(self.weight_step)


def read_token_projection(
    folder: Path, *, model_dim: int, vocabulary_size: int, weights_sha256: str
) -> TokenProjection | None:
    """Return the projection of a model's folder, None where it has none.

    One that is damaged, or was trained for another model, raises :class:`ModelError`.
    """
    if not (folder / LATE_NAME).is_file():
        return None
    projection = load_token_projection(folder / LATE_NAME)
    found_dim, num_weights = len(projection.matrix_DV), len(projection.weight_codes_X)
    if (found_dim, num_weights) != (model_dim, vocabulary_size):
        raise ModelError(
            f"{LATE_NAME} of the model must read states of {model_dim} dimensions and {vocabulary_size} "
            f"token ids, got one for {found_dim} and {num_weights}; fetch the model again"
        )
    if projection.base_sha256 != weights_sha256:
        raise ModelError(
            f"{LATE_NAME} of the model must be trained for its weights, got one that was trained for others; "
            "fetch the model again"
        )
    return projection


def load_token_projection(path: Path) -> TokenProjection:
    """Read the file; one that is damaged, not finite or of another format raises :class:`ModelError`."""
    try:
        with safe_open(path, framework="np") as stored:
            settings = json.loads((stored.metadata() or {})[METADATA_KEY])
            if settings["format"] != LATE_FORMAT:
                raise _other_format(settings["format"])
            tensors = {name: stored.get_tensor(name) for name in ("matrix", "term_weights", "rms")}
            # The shipped file has no hash of its own: its whole is checked.
            if settings.get("tensors_sha256") not in (None, _tensors_sha256(tensors)):
                raise _damaged()
            matrix_DV, codes_X, rms_V = tensors.values()
            projection = TokenProjection(
                matrix_DV=matrix_DV.astype(np.float32),
                weight_codes_X=codes_X,
                weight_step=float(settings["term_weight_step"]),
                rms_V=rms_V,
                bits=int(settings["bits"]),
                base_sha256=settings["base_sha256"],
            )
            is_usable = _is_usable(projection)
            _ = projection.codec
    except ModelError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise _damaged() from error
    if not is_usable:
        raise _damaged()
    return projection


def _tensors_sha256(tensors: Mapping[str, np.ndarray]) -> str:
    return hashlib.sha256(b"".join(tensors[name].tobytes() for name in sorted(tensors))).hexdigest()


def _is_usable(projection: TokenProjection) -> bool:
    """Tell whether the parts fit one another, and whether all codes and scores of them will be finite."""
    matrix_DV, rms_V, codes_X = projection.matrix_DV, projection.rms_V, projection.weight_codes_X
    return (
        matrix_DV.shape[1:] == rms_V.shape
        and len(rms_V) > 0
        and (codes_X.ndim, codes_X.dtype) == (1, np.uint8)
        and bool(np.isfinite(matrix_DV).all())
        and bool((np.isfinite(rms_V) & (rms_V > 0.0)).all())
        and 0.0 <= projection.weight_step < np.inf
    )


def _damaged() -> ModelError:
    return ModelError(
        f"{LATE_NAME} of the model must be a whole token projection, got a damaged file; train it again"
    )


def _other_format(found: object) -> ModelError:
    return ModelError(
        f"{LATE_NAME} of the model must have format {LATE_FORMAT}, got {found}; train it again, or update "
        "Cairn"
    )
