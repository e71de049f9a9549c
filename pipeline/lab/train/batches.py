"""Contrastive batches from clusters: each is a small domain, so that its other documents are hard negatives.

    units of one source ─▶ asymmetric K-means ─▶ packed into batches ─┐
    what is left over of all sources ─▶ packed along a tour of sources ─┴─▶ batches in random order,
                                                                            other ones every epoch

Packing cuts whole batches from a cluster, and lays the rests along a tour of the clusters: from a random one
always on to the nearest centroid not yet visited.

    cluster of 700 ─▶ 256 │ 256 │ 188 ┐
    cluster of  90 ─▶ 90              ├─ along the tour ─▶ 256 │ 256 │ … rest left over
    cluster of 300 ─▶ 256 │ 44        ┘

A pure function of pairs, vectors and settings: a resumed run asks for the step it stands at. FAISS's clusters
are those of one number of threads.

Source: Morris & Rush 2024 (CDE), §4.1 and §5: clusters per domain, of the size of a batch; §10.5: the greedy
tour. A cluster's points are shuffled first, so every epoch draws other batches. Differs: whole batches are
cut from a large cluster before its rest goes on the tour.

    N pairs, units or points    V surrogate dim    K clusters    P = 2V    B batches
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from cairn.pipeline.cluster.assignment import assign, first_order_points
from cairn.pipeline.cluster.asymmetric_kmeans import train_clusters
from cairn.pipeline.config import ClusterConfig
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.train.pair_data import PairVectors
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.sequences import make_units, units_of_a_batch
from cairn.pipeline.lab.train.settings import TrainConfig
from jaxtyping import Float32, Int32, Int64

MAX_TRAINING_POINTS = 65_536
"""Pairs of a source that K-means is trained on; all are assigned."""


class Domain(NamedTuple):
    """The n units of one source, by position, each in one of K clusters."""

    positions_n: Int64[np.ndarray, " n"]
    cluster_n: Int32[np.ndarray, " n"]
    centroids_KP: Float32[np.ndarray, "K P"]


def pack(
    cluster_N: Int32[np.ndarray, " N"],
    centroids_KP: Float32[np.ndarray, "K P"],
    batch_size: int,
    generator: np.random.Generator,
) -> tuple[Int64[np.ndarray, "B size"], Int64[np.ndarray, " rest"]]:
    """Pack points 0 … N - 1 by their clusters into batches, and return those left over, too.

    The same generator state gives the same batches.
    """
    shuffled = generator.permutation(len(cluster_N))
    order = shuffled[np.argsort(cluster_N[shuffled], kind="stable")]
    bounds = np.searchsorted(cluster_N[order], np.arange(len(centroids_KP) + 1))
    whole: list[np.ndarray] = []
    rests: dict[int, np.ndarray] = {}
    for cluster in np.unique(cluster_N).tolist():
        points = order[bounds[cluster] : bounds[cluster + 1]]
        num_whole = len(points) // batch_size * batch_size
        whole.append(points[:num_whole])
        if num_whole < len(points):
            rests[cluster] = points[num_whole:]
    clusters = np.array(list(rests), np.int64)
    visits = greedy_tour(centroids_KP[clusters], generator)
    along_tour = np.concatenate(
        [np.zeros(0, np.int64), *(rests[cluster] for cluster in clusters[visits].tolist())]
    )
    num_whole = len(along_tour) // batch_size * batch_size
    packed = np.concatenate([np.zeros(0, np.int64), *whole, along_tour[:num_whole]])
    return packed.reshape(-1, batch_size), along_tour[num_whole:]


def greedy_tour(
    centroids_KP: Float32[np.ndarray, "K P"], generator: np.random.Generator
) -> Int64[np.ndarray, " K"]:
    """Visit every centroid once: a random one, then always the nearest by inner product, ties the lowest."""
    num_clusters = len(centroids_KP)
    visits_K = np.empty(num_clusters, np.int64)
    if not num_clusters:
        return visits_K
    is_visited_K = np.zeros(num_clusters, np.bool_)
    here = int(generator.integers(num_clusters))
    for step in range(num_clusters):
        visits_K[step] = here
        is_visited_K[here] = True
        here = int(np.where(is_visited_K, -np.inf, centroids_KP @ centroids_KP[here]).argmax())
    return visits_K


def mean_cosine(vectors_NV: Float32[np.ndarray, "N V"]) -> float:
    """Return the mean cosine of two different rows; 0 for a single one."""
    unit_NV = vectors_NV / np.maximum(np.linalg.norm(vectors_NV, axis=1, keepdims=True), 1e-12)
    num_rows, sum_V = len(unit_NV), unit_NV.sum(axis=0)
    return float((sum_V @ sum_V - (unit_NV**2).sum()) / max(1, num_rows * (num_rows - 1)))


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
        self._phi, self._psi = (
            np.stack([side[list(unit)].mean(axis=0) for unit in self.units])
            for side in (vectors.document_NV, vectors.query_NV)
        )
        sources = ["" if config.batches == "mixed" else pairs.rows[unit[0]].source for unit in self.units]
        names, source_N = np.unique(np.array(sources), return_inverse=True)
        self._domains = [self._clustered(np.flatnonzero(source_N == place)) for place in range(len(names))]
        self._epoch, self._batches = -1, np.zeros((0, 0), np.int64)
        self._load(0)

    def _clustered(self, positions_n: Int64[np.ndarray, " n"]) -> Domain:
        """Cluster units into clusters of a batch on average; mixed batches are drawn from a single one."""
        is_mixed = self._config.batches == "mixed"
        num_clusters = 1 if is_mixed else max(1, round(len(positions_n) / self._batch_units))
        config = ClusterConfig(seed=self._config.seed, num_clusters=num_clusters)
        sample = positions_n[:: -(-len(positions_n) // MAX_TRAINING_POINTS)]
        # They are kept nowhere, so what made the vectors needs no name.
        clusters = train_clusters(self._phi[sample], self._psi[sample], config, surrogate_fingerprint="")
        cluster_n = assign(clusters, self._phi[positions_n], self._psi[positions_n])
        return Domain(positions_n, cluster_n, clusters.centroids_KP)

    def _load(self, epoch: int) -> None:
        """Draw the batches of an epoch in order."""
        if epoch == self._epoch:
            return
        generator, size = np.random.default_rng([self._config.seed, epoch]), self._batch_units
        whole, rests, centres = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        for place, cluster_n, centroids_KP in self._domains:
            batches_BN, left_over = pack(cluster_n, centroids_KP, size, generator)
            whole.append(place[batches_BN])
            rests.append(place[left_over])
            centres.append(first_order_points(self._phi[place], self._psi[place]).mean(0))
        rest = np.concatenate(rests)
        domain_of_rest = np.repeat(np.arange(len(rests), dtype=np.int32), [len(part) for part in rests])
        mixed, _ = pack(domain_of_rest, np.stack(centres), size, generator)
        batches_BN = np.concatenate([*whole, rest[mixed]])
        assert len(batches_BN), "there are as many pairs as a batch has"
        self._epoch, self._batches = epoch, batches_BN[generator.permutation(len(batches_BN))]

    def cosines(self) -> tuple[float, float]:
        """Return the mean cosine of two units of a batch, by the surrogate, and that of random batches."""
        self._load(0)
        drawn = np.random.default_rng(self._config.seed).permutation(len(self.units))
        random = drawn[: self._batches.size].reshape(self._batches.shape)
        batched, unbatched = (
            float(np.mean([mean_cosine(self._phi[batch]) for batch in batches]))
            for batches in (self._batches, random)
        )
        return batched, unbatched

    def at(self, step: int) -> list[tuple[int, ...]]:
        """Return the units of a step; every epoch has as many batches."""
        self._load(step // len(self._batches))
        return [self.units[unit] for unit in self._batches[step % len(self._batches)].tolist()]
