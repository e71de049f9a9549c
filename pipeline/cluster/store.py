"""Keep trained clusters in one Arrow file, with the surrogate they were trained in.

A later ingest must place documents in the same space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cairn.pipeline.cluster.arrow_file import content_fingerprint, read_arrow_file, write_arrow_file
from cairn.pipeline.errors import DamageError
from jaxtyping import Float32, Float64, Int64

_KIND = "cairn.clusters"
_STATE_PREFIX = "surrogate."


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
        return content_fingerprint(self._arrays(), self._facts())

    def write(self, path: Path) -> None:
        """Write durably; equal clusters give equal bytes."""
        write_arrow_file(path, self._arrays(), kind=_KIND, facts=self._facts())

    @classmethod
    def read(cls, path: Path) -> Clusters:
        """Read clusters back; a missing, damaged or foreign file raises :class:`DamageError`."""
        arrays, facts = read_arrow_file(path, kind=_KIND)
        try:
            return cls(
                centroids_KP=arrays.pop("centroids"),
                sizes_K=arrays.pop("sizes"),
                objective_I=arrays.pop("objective"),
                surrogate_fingerprint=facts["surrogate"],
                surrogate_state={name.removeprefix(_STATE_PREFIX): array for name, array in arrays.items()},
                settings=facts["settings"],
            )
        except KeyError as error:
            raise DamageError(f"{path.name} must hold clusters, got other arrays") from error

    def _arrays(self) -> dict[str, np.ndarray]:
        state = {
            f"{_STATE_PREFIX}{name}": self.surrogate_state[name] for name in sorted(self.surrogate_state)
        }
        return {"centroids": self.centroids_KP, "sizes": self.sizes_K, "objective": self.objective_I, **state}

    def _facts(self) -> dict[str, Any]:
        return {"surrogate": self.surrogate_fingerprint, "settings": dict(self.settings)}
