"""The default model's token projection: last-layer states to few dimensions of two bits, and query weights.

    document token    normalise(h W), each component in one of four even steps, four to a byte
    query token       normalise(h W), weighing w[id]

One file, ``cairn_late.safetensors``, beside the model it was trained for: the matrix W in float16, a weight a
token id in 8 bits, and the root mean squares of the projected dimensions, of which the steps are multiples.
Its metadata names the base by the hash of its weights. A collection keeps a copy, so that its codes stay
readable when the model's file changes, and codes of two segments are joined without decoding.

Source: Max 1960, table II, for the reach of an even quantiser of a normal variable; ColBERTv2 and PLAID for
the packing. Differs: no centroids, no residuals.

    T tokens    D model dim    V vector dim    X vocabulary    q query tokens
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from cairn.pipeline import durable
from cairn.pipeline.errors import ModelError
from cairn.pipeline.manifest import fingerprint
from jaxtyping import Float, Float32, Int, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

LATE_NAME: Final = "cairn_late.safetensors"
LATE_FORMAT: Final = 2
METADATA_KEY: Final = "cairn_late"
BITS: Final = 2
"""Of a component: the one width that a projection was trained for."""
REACH: Final = 1.991
"""Half the range of 2^BITS even steps with the least squared error, in root mean squares."""

_LEVELS: Final = 1 << BITS
_SHIFTS: Final = range(8 - BITS, -1, -BITS)
_LEVELS_OF_BYTES: Final = np.stack(
    [((np.arange(256) >> shift) & (_LEVELS - 1)) + 0.5 - _LEVELS / 2 for shift in _SHIFTS], axis=1
).astype(np.float32)
"""The middles of the steps that each byte stands for, in steps."""


def looked_up(
    table_MBq: Float32[np.ndarray, "M 256 q"], codes: UInt8[np.ndarray, "T M"]
) -> Float32[np.ndarray, "T q"]:
    """Return the sum of what the bytes of each code stand for, a table for each byte.

    Every code is summed alike whatever stands beside it, so that shards have the scores of one whole and
    copies tie; a product of matrices does not do that.
    """
    sum_Tq = table_MBq[0].take(codes[:, 0], axis=0)
    next_Tq = np.empty_like(sum_Tq)
    for table_Bq, code_T in zip(table_MBq[1:], codes.T[1:], strict=True):
        # A byte is within its table; "clip" spares the check and a copy.
        table_Bq.take(code_T, axis=0, out=next_Tq, mode="clip")
        sum_Tq += next_Tq
    return sum_Tq


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenProjection:
    """A trained projection; ``base_sha256`` names the weights it was trained for."""

    matrix_DV: Float32[np.ndarray, "D V"]
    weight_codes_X: UInt8[np.ndarray, " X"]
    weight_step: float
    rms_V: Float32[np.ndarray, " V"]
    base_sha256: str

    @property
    def fingerprint(self) -> str:
        """Identify everything that moves a score or a code."""
        return fingerprint(
            kind="token projection",
            format=LATE_FORMAT,
            matrix=self.matrix_DV.tobytes().hex(),
            weights=self.weight_codes_X.tobytes().hex(),
            weight_step=self.weight_step,
            bits=BITS,
            rms=self.rms_V.tobytes().hex(),
        )

    @property
    def vector_bytes(self) -> int:
        """Return the bytes of one code."""
        return len(self.rms_V) * BITS // 8

    @property
    def _steps(self) -> Float32[np.ndarray, " V"]:
        return (2 * REACH / _LEVELS * self.rms_V).astype(np.float32)

    def encode(self, states_TD: Float32[np.ndarray, "T D"]) -> UInt8[np.ndarray, "T bytes"]:
        """Return the codes of token states; a component beyond the steps falls into the first or the last."""
        steps_TV = np.floor(self.project(states_TD) / self._steps + _LEVELS / 2)
        codes_TV = np.clip(steps_TV, 0, _LEVELS - 1).astype(np.uint8)
        packed = np.zeros((len(codes_TV), self.vector_bytes), np.uint8)
        for place, shift in enumerate(_SHIFTS):
            packed |= codes_TV[:, place :: len(_SHIFTS)] << shift
        return packed

    def similarities(
        self, codes: UInt8[np.ndarray, "T bytes"], query_qV: Float32[np.ndarray, "q V"]
    ) -> Float32[np.ndarray, "T q"]:
        """Return the cosines of what codes stand for, the middles of their steps, with a query's tokens.

        The last column looked up is the squared norm of a token.
        """
        shape, steps_V = (-1, len(_SHIFTS), 1), self._steps
        parts_M4q = (query_qV * steps_V).reshape(len(query_qV), -1, len(_SHIFTS)).transpose(1, 2, 0)
        squares_MB1 = _LEVELS_OF_BYTES**2 @ (steps_V * steps_V).reshape(shape)
        table_MBq1 = np.concatenate([_LEVELS_OF_BYTES @ parts_M4q, squares_MB1], axis=2)
        product_Tq1 = looked_up(table_MBq1, codes)
        return product_Tq1[:, :-1] / np.sqrt(product_Tq1[:, -1:])

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
            "bits": BITS,
            "base_sha256": self.base_sha256,
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
            projection = TokenProjection(
                matrix_DV=stored.get_tensor("matrix").astype(np.float32),
                weight_codes_X=stored.get_tensor("term_weights"),
                weight_step=float(settings["term_weight_step"]),
                rms_V=stored.get_tensor("rms"),
                base_sha256=settings["base_sha256"],
            )
        is_of_format = (settings["format"], settings["bits"]) == (LATE_FORMAT, BITS)
        is_usable = is_of_format and _is_usable(projection)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise _damaged() from error
    if not is_usable:
        raise _damaged()
    return projection


def _damaged() -> ModelError:
    return ModelError(
        f"{LATE_NAME} of the model must be a whole token projection of format {LATE_FORMAT}, got a damaged "
        "file or another format; fetch the model again"
    )


def _is_usable(projection: TokenProjection) -> bool:
    """Tell whether the parts fit one another, and whether all codes and scores of them will be finite."""
    matrix_DV, rms_V, codes_X = projection.matrix_DV, projection.rms_V, projection.weight_codes_X
    return (
        matrix_DV.shape[1:] == rms_V.shape
        and len(rms_V) > 0
        and len(rms_V) % len(_SHIFTS) == 0
        and (codes_X.ndim, codes_X.dtype) == (1, np.uint8)
        and bool(np.isfinite(matrix_DV).all())
        and bool((np.isfinite(rms_V) & (rms_V > 0.0)).all())
        and 0.0 <= projection.weight_step < np.inf
    )


def unit(vectors_PV: Float32[np.ndarray, "P V"]) -> Float32[np.ndarray, "P V"]:
    """Return the rows at length one; a row of zeros stays."""
    norms_P1 = np.linalg.norm(vectors_PV, axis=1, keepdims=True)
    return vectors_PV / np.maximum(norms_P1, np.finfo(np.float32).tiny)
