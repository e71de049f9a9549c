"""Keep trained clusters in one Arrow file, with the surrogate they were trained in.

A later ingest must place documents in the same space. One row an array: name, dtype, shape, bytes. Everything
in the file is covered by its fingerprint, so damage is found here even before the generation's manifest is
asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from cairn.pipeline.cluster.arrow_file import read_arrow_file, write_arrow_file
from cairn.pipeline.errors import DamageError
from cairn.pipeline.manifest import fingerprint
from jaxtyping import Float32, Float64, Int64

_KIND = "cairn.clusters"
_STATE_PREFIX = "surrogate."
_DTYPES = ("float32", "float64", "int64")
_SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("data", pa.large_binary(), nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Clusters:
    """What asymmetric K-means found in a sample.

    ``centroids_KP``: unit length, P = 2V, in the space of first-order points φ(d)⊕ψ(q); rows no point chose
    may be anything. ``sizes_K``: documents of the sample in each cluster; a cluster that only second-order
    points ψ(q)⊕φ(d) chose has none. ``objective_I``: mean squared distance of all 2N points to their
    centroid, one entry an iteration, never rising. ``surrogate_state``: arrays that rebuild the embedder of φ
    and ψ, if it has any; ``settings``: what the training was asked for.
    """

    centroids_KP: Float32[np.ndarray, "K P"]
    sizes_K: Int64[np.ndarray, " K"]
    objective_I: Float64[np.ndarray, " I"]
    surrogate_fingerprint: str
    surrogate_state: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def num_clusters(self) -> int:
        """Return K."""
        return len(self.centroids_KP)

    @property
    def fingerprint(self) -> str:
        """Identify every array and setting."""
        return fingerprint(
            arrays={
                name: [str(array.dtype), list(array.shape), _sha256(array)]
                for name, array in self._arrays().items()
            },
            surrogate=self.surrogate_fingerprint,
            settings=dict(self.settings),
        )

    def write(self, path: Path) -> None:
        """Write durably; equal clusters give equal bytes."""
        arrays = self._arrays()
        table = pa.table(
            {
                "name": list(arrays),
                "dtype": [str(array.dtype) for array in arrays.values()],
                "shape": [list(array.shape) for array in arrays.values()],
                "data": [np.ascontiguousarray(array).tobytes() for array in arrays.values()],
            },
            schema=_SCHEMA,
        )
        header = {
            "surrogate_fingerprint": self.surrogate_fingerprint,
            "settings": dict(self.settings),
            "fingerprint": self.fingerprint,
        }
        write_arrow_file(path, table, kind=_KIND, header=header)

    @classmethod
    def read(cls, path: Path) -> Clusters:
        """Read clusters back, bit for bit.

        A missing, damaged or foreign file raises :class:`IntegrityError`.
        """
        table, header = read_arrow_file(path, kind=_KIND, schema=_SCHEMA)
        try:
            arrays = {row["name"]: _decode(row) for row in table.to_pylist()}
            clusters = cls(
                centroids_KP=arrays.pop("centroids"),
                sizes_K=arrays.pop("sizes"),
                objective_I=arrays.pop("objective"),
                surrogate_fingerprint=header["surrogate_fingerprint"],
                surrogate_state={name.removeprefix(_STATE_PREFIX): array for name, array in arrays.items()},
                settings=header["settings"],
            )
            is_intact = clusters.fingerprint == header["fingerprint"]
        except (KeyError, TypeError, ValueError) as error:
            raise DamageError(f"{path.name} must hold clusters, got other arrays") from error
        if not is_intact:
            raise DamageError(f"{path.name} must match its own fingerprint, got other content")
        return clusters

    def _arrays(self) -> dict[str, np.ndarray]:
        state = {
            f"{_STATE_PREFIX}{name}": self.surrogate_state[name] for name in sorted(self.surrogate_state)
        }
        return {"centroids": self.centroids_KP, "sizes": self.sizes_K, "objective": self.objective_I, **state}


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _decode(row: Mapping[str, Any]) -> np.ndarray:
    if row["dtype"] not in _DTYPES:
        raise ValueError(row["dtype"])
    return np.frombuffer(row["data"], dtype=row["dtype"]).reshape(row["shape"])
