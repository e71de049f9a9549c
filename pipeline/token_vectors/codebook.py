"""The codebook of a collection's token vectors: FAISS's product quantiser, and what tokens of a query weigh.

    document token    unit state ─▶ M bytes, a centroid of 256 for each of M subspaces
    query token       unit state · what codes stand for, weighing its idf

Nothing of it is trained ahead: centroids and weights come from a collection's first sample, so that every
encoder whose token states are at hand has token vectors; a model may bring a trained projection instead
(:mod:`cairn.pipeline.token_vectors.projection`). A collection keeps its codebook, as it keeps its clusters.
Decoded vectors are not normalised: a token that no centroid is near to matches less.

Source: Jégou, Douze & Schmid 2011 for the quantiser, through FAISS.

    T tokens    D model dim    M subspaces    X vocabulary    q query tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from cairn.pipeline import durable
from cairn.pipeline.errors import DamageError, ModelError
from cairn.pipeline.faiss_device import train_kmeans
from cairn.pipeline.faiss_library import faiss
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.token_vectors.projection import (
    LATE_NAME,
    TokenProjection,
    load_token_projection,
    looked_up,
)
from jaxtyping import Float16, Float32, Int, Int32, Int64, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

CENTROIDS: Final = 256
LEAST_STATES: Final = 8 * CENTROIDS
"""States that a codebook is fitted to, at least."""
NUM_ITERATIONS: Final = 10
"""Of K-means in each subspace: a second or two at 16,000 states; more gain nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenCodebook:
    """How token states become codes and back, and what each token id weighs in a query."""

    centroids: Float16[np.ndarray, "M 256 d"]
    weights_X: Float16[np.ndarray, " X"]

    @classmethod
    def fit(
        cls, states_TD: Float32[np.ndarray, "T D"], weights_X: Float32[np.ndarray, " X"], max_bytes: int
    ) -> TokenCodebook:
        """Fit centroids to a sample of unit states, so that a code has at most ``max_bytes``."""
        model_dim = states_TD.shape[1]
        num_bytes = max(size for size in range(1, max_bytes + 1) if model_dim % size == 0)
        parameters = {
            "niter": NUM_ITERATIONS,
            "seed": 0,
            "min_points_per_centroid": 1,
            "max_points_per_centroid": len(states_TD),
        }
        subspaces = np.split(np.asarray(states_TD, np.float32), num_bytes, axis=1)
        centroids = np.stack([train_kmeans(each, CENTROIDS, parameters).centroids for each in subspaces])
        return cls(centroids=centroids.astype(np.float16), weights_X=weights_X.astype(np.float16))

    @cached_property
    def _quantiser(self) -> Any:
        num_bytes, _, width = self.centroids.shape
        quantiser = faiss.ProductQuantizer(num_bytes * width, num_bytes, 8)
        faiss.copy_array_to_vector(self.centroids.astype(np.float32).ravel(), quantiser.centroids)
        return quantiser

    def __getstate__(self) -> dict[str, Any]:
        """Leave FAISS's object out: workers make their own."""
        return {"centroids": self.centroids, "weights_X": self.weights_X}

    @property
    def vector_bytes(self) -> int:
        """Return the bytes of one code."""
        return len(self.centroids)

    @property
    def model_dim(self) -> int:
        """Return the width of the states it was fitted to."""
        return self.centroids.shape[0] * self.centroids.shape[2]

    @property
    def fingerprint(self) -> str:
        """Identify everything that moves a score or a code."""
        return fingerprint(
            kind="token codebook",
            centroids=self.centroids.tobytes().hex(),
            shape=list(self.centroids.shape),
            weights=self.weights_X.tobytes().hex(),
        )

    def encode(self, states_TD: Float32[np.ndarray, "T D"]) -> UInt8[np.ndarray, "T M"]:
        """Return the codes of unit states."""
        return self._quantiser.compute_codes(np.ascontiguousarray(states_TD, np.float32))

    def similarities(
        self, codes: UInt8[np.ndarray, "T M"], query_qD: Float32[np.ndarray, "q D"]
    ) -> Float32[np.ndarray, "T q"]:
        """Return the inner products of what codes stand for with a query's unit states."""
        parts_Mdq = query_qD.reshape(len(query_qD), len(self.centroids), -1).transpose(1, 2, 0)
        return looked_up(self.centroids.astype(np.float32) @ parts_Mdq, codes)

    def average_similarities(self, query_qD: Float32[np.ndarray, "q D"]) -> Float32[np.ndarray, " q"]:
        """Return the inner products of the mean of all centroids with a query's unit states."""
        return query_qD @ self.centroids.mean(axis=1, dtype=np.float32).ravel()

    def project(self, states_TD: Float32[np.ndarray, "T D"]) -> Float32[np.ndarray, "T D"]:
        """Return a query's unit states as they are."""
        return states_TD

    @property
    def heaviest(self) -> float:
        """Return the weight of the token that weighs most."""
        return float(self.weights_X.max())

    def weights_of(self, ids_q: Int[np.ndarray, " q"]) -> Float32[np.ndarray, " q"]:
        """Return what each token of a query weighs."""
        return self.weights_X[ids_q].astype(np.float32)

    def save(self, folder: Path) -> None:
        """Write the file into a folder, whole or not at all."""
        with durable.storage_errors(f"saving {LATE_NAME}"):
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {"centroids": self.centroids, "weights": self.weights_X}
            durable.write_bytes(folder / LATE_NAME, save(tensors))


TokenCoder = TokenCodebook | TokenProjection
"""What makes the codes of a collection: fitted to its sample, or trained with its model."""


def load_token_coder(folder: Path) -> TokenCoder:
    """Read a collection's file; one that is damaged or not finite raises :class:`DamageError`."""
    path = folder / LATE_NAME
    try:
        with safe_open(path, framework="np") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
        if "centroids" not in tensors:
            return load_token_projection(path)
        centroids, weights_X = tensors["centroids"], tensors["weights"]
    except (SafetensorError, OSError, KeyError, ValueError, ModelError) as error:
        raise DamageError(f"{LATE_NAME} cannot be read") from error
    is_whole = centroids.ndim == 3 and centroids.shape[1] == CENTROIDS and weights_X.ndim == 1
    are_halves = (centroids.dtype, weights_X.dtype) == (np.float16, np.float16)
    if not (is_whole and are_halves and np.isfinite(centroids).all() and np.isfinite(weights_X).all()):
        raise DamageError(f"{LATE_NAME} must hold finite centroids and weights")
    return TokenCodebook(centroids=centroids, weights_X=weights_X)


def token_idf(
    ids_T: Int32[np.ndarray, " T"],
    offsets_M1: Int64[np.ndarray, " M1"],
    vocabulary_size: int,
    num_unseen: int = 0,
) -> Float32[np.ndarray, " vocabulary"]:
    """Return ln(1 + (M - m + ½) / (m + ½)) of every token id, m of M texts holding it.

    ``num_unseen`` more texts hold none.
    """
    num_texts = len(offsets_M1) - 1
    text_T = np.repeat(np.arange(num_texts), np.diff(offsets_M1))
    held = np.unique(text_T * vocabulary_size + ids_T) % vocabulary_size
    holding = np.bincount(held, minlength=vocabulary_size)
    return np.log1p((num_texts + num_unseen - holding + 0.5) / (holding + 0.5)).astype(np.float32)
