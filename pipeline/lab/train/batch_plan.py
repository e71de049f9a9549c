"""Which pairs each step of a run trains on.

Units are clustered by the mean of their pairs' vectors and packed into other batches every epoch.

A pure function of pairs, vectors and settings: a resumed run asks for the step it stands at.

    N pairs    U units    V surrogate dim
"""

from __future__ import annotations

import numpy as np
from cairn.pipeline.config import ClusterConfig
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.train.batches import cluster_domains, draw_batches
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.sequences import make_units, units_of_a_batch
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.lab.train.surrogate import PairVectors
from jaxtyping import Float32, Int64


def require_batch(num_pairs: int, config: TrainConfig) -> None:
    """Raise :class:`SourceError` for fewer pairs than a batch."""
    if num_pairs < config.batch_pairs:
        raise SourceError(
            f"training needs at least the {config.batch_pairs} pairs of one batch, got {num_pairs}; "
            "lower batch_pairs or give more pairs"
        )


class BatchPlan:
    """Which pairs each step trains on."""

    def __init__(
        self,
        pairs: TrainingPairs,
        heldout: Int64[np.ndarray, " n"],
        vectors: PairVectors,
        config: TrainConfig,
    ) -> None:
        kept = np.setdiff1d(np.arange(len(pairs)), heldout)
        self.units = make_units(pairs, kept.tolist(), config.sequence_documents)
        self._batch_units = units_of_a_batch(self.units, config.batch_pairs)
        self._config = config
        self._phi, self._psi = (self._mean_of_units(side) for side in (vectors.document_NV, vectors.query_NV))
        self._domains = cluster_domains(
            [pairs.sources[unit[0]] for unit in self.units],
            self._phi,
            self._psi,
            units_of_a_batch(self.units, config.cluster_pairs or config.batch_pairs),
            ClusterConfig(
                num_iterations=config.cluster_iterations,
                num_redos=config.cluster_attempts,
                seed=config.seed,
            ),
            surrogate_fingerprint=vectors.fingerprint,
        )
        self._epoch, self._batches = -1, np.zeros((0, 0), np.int64)
        self._load(0)

    def _mean_of_units(self, vectors_NV: Float32[np.ndarray, "N V"]) -> Float32[np.ndarray, "U V"]:
        return np.stack([vectors_NV[list(unit)].mean(axis=0) for unit in self.units])

    def _load(self, epoch: int) -> None:
        if epoch != self._epoch:
            drawn = draw_batches(
                self._domains,
                self._phi,
                self._psi,
                self._batch_units,
                seed=self._config.seed,
                epoch=epoch,
                tour=self._config.tour,
            )
            self._epoch, self._batches = epoch, drawn.batches_BN

    def at(self, step: int) -> list[tuple[int, ...]]:
        """Return the units of a step; every epoch has as many batches."""
        self._load(step // len(self._batches))
        return [self.units[unit] for unit in self._batches[step % len(self._batches)].tolist()]
