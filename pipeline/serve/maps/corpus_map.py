"""A collection as a map: its documents in the plane, neighbours beside one another.

    document vectors ─▶ a sample ─▶ t-SNE, from its first two principal components ─▶ x, y in [-1, 1]
                    └─▶ all others: between their nearest neighbours of the sample

Drawn on demand, from the documents that an API key sees; the same documents give the same map. Where they
stand is kept over a restart (``map_files``).

Source: van der Maaten & Hinton 2008, as openTSNE computes it (Poličar et al. 2024, with FFT by Linderman et
al. 2019), whose settings are left as they are; beginning with principal components keeps the large picture
(Kobak & Berens 2019).

    N documents of the map    S of the sample    V dimensions
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from jaxtyping import Float32, Int32, Int64

from pipeline.index.generation import Generation
from pipeline.search.hits import read_rows
from pipeline.serve.maps.cluster_names import name_clusters, telling_texts
from pipeline.serve.maps.map_files import MapFiles

MAX_SAMPLE: Final = 3_000
"""Documents that t-SNE lays out: some seconds of one thread."""
MAX_DOCUMENTS: Final = 10_000
"""Points of a map: about 1 MB to send, and more than a screen can tell apart."""
NUM_NEIGHBOURS: Final = 5
PERPLEXITY: Final = 30
MIN_SAMPLE: Final = 10
"""Below this there are no neighbourhoods to keep: principal components are the map."""
ALIKE: Final = 1e-5
"""Vectors that differ by less differ by rounding."""
MAX_TITLE_CHARACTERS: Final = 120
SEED: Final = 0
STEPS_AT_A_TIME: Final = 50
"""Between two reports: about half a second."""
STEPS: Final = 750
"""openTSNE's: 250 with early exaggeration, then 500."""
Report = Callable[[float], None]
"""Takes the share of a layout that is done, 0 to 1, and may end the layout by raising."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A cluster on the map: the number of its documents shown, their median place, a name."""

    cluster_id: int
    documents: int
    name: str
    x: float
    y: float


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class CorpusMap:
    """Document ``positions`` and where they stand.

    ``sample_vectors_SV`` is what further documents are placed by.
    """

    positions_N: Int64[np.ndarray, " N"]
    places_N2: Float32[np.ndarray, "N 2"]
    titles: Sequence[str | None]
    doc_ids: Sequence[str]
    cluster_ids_N: Int32[np.ndarray, " N"]
    clusters: Sequence[Cluster]
    sample_vectors_SV: Float32[np.ndarray, "S V"]
    sample_places_S2: Float32[np.ndarray, "S 2"]


def draw_map(
    generation: Generation,
    visible: Int64[np.ndarray, " A"],
    files: MapFiles,
    report: Report = lambda _: None,
) -> CorpusMap:
    """Lay out the visible documents unless a file says where they stand.

    Of many, an evenly spread part with at least one document of every cluster.
    """
    positions_N = _with_every_cluster(_spread(visible, MAX_DOCUMENTS), visible, generation.cluster_ids)
    vectors_NV = generation.documents.reconstruct(positions_N)
    sample_S = _spread(np.arange(len(positions_N)), MAX_SAMPLE)
    places_N2 = files.find(generation, positions_N, len(sample_S))
    if places_N2 is None:
        places_S2 = lay_out(vectors_NV[sample_S], report)
        places_N2 = place(vectors_NV, vectors_NV[sample_S], places_S2)
        places_N2[sample_S] = places_S2
        files.keep(generation, positions_N, len(sample_S), places_N2)
    rows = read_rows(generation, positions_N, ["doc_id", "title"])
    titles = [row["title"] for row in rows]
    cluster_ids_N = generation.cluster_ids[positions_N]
    names = name_clusters(telling_texts(generation, positions_N, titles, cluster_ids_N), cluster_ids_N)
    return CorpusMap(
        positions_N=positions_N,
        places_N2=places_N2,
        titles=[None if title is None else title[:MAX_TITLE_CHARACTERS] for title in titles],
        doc_ids=[row["doc_id"] for row in rows],
        cluster_ids_N=cluster_ids_N,
        clusters=_clusters(cluster_ids_N, places_N2, names),
        sample_vectors_SV=vectors_NV[sample_S],
        sample_places_S2=places_N2[sample_S],
    )


def lay_out(
    vectors_SV: Float32[np.ndarray, "S V"], report: Report = lambda _: None
) -> Float32[np.ndarray, "S 2"]:
    """Return a place in [-1, 1]² for each vector; the same vectors give the same places, up to rounding."""
    from openTSNE import TSNE  # scikit-learn and SciPy come in here, with the first map

    components_S2 = _principal_components(vectors_SV)
    if np.abs(components_S2).max(initial=0.0) < ALIKE:
        return np.zeros((len(vectors_SV), 2), np.float32)
    if len(vectors_SV) < MIN_SAMPLE:
        return _within_unit_square(components_S2)
    steps = itertools.count(STEPS_AT_A_TIME, STEPS_AT_A_TIME)
    tsne = TSNE(
        perplexity=min(PERPLEXITY, (len(vectors_SV) - 1) // 3),
        initialization=1e-4 * components_S2 / components_S2[:, 0].std(),
        neighbors="exact",
        n_jobs=1,
        callbacks=[lambda *_: report(next(steps) / STEPS)],
        callbacks_every_iters=STEPS_AT_A_TIME,
        random_state=SEED,
    )
    # To infer what `fit` returns, pyright would read SciPy: most of the time it needs for this file.
    return _within_unit_square(np.asarray(cast(Any, tsne).fit(vectors_SV.astype(np.float64))))


def place(
    vectors_NV: Float32[np.ndarray, "N V"],
    sample_SV: Float32[np.ndarray, "S V"],
    places_S2: Float32[np.ndarray, "S 2"],
) -> Float32[np.ndarray, "N 2"]:
    """Return for each vector the mean place of its nearest neighbours in the sample, weighted by nearness."""
    if not len(sample_SV):
        return np.zeros((len(vectors_NV), 2), np.float32)
    found: list[np.ndarray] = [np.zeros((0, 2), np.float32)]
    for start in range(0, len(vectors_NV), 1_024):
        cosines_BS = vectors_NV[start : start + 1_024] @ sample_SV.T
        nearest_BK = np.argpartition(-cosines_BS, min(NUM_NEIGHBOURS, len(sample_SV)) - 1, axis=1)[
            :, :NUM_NEIGHBOURS
        ]
        nearness_BK = np.take_along_axis(cosines_BS, nearest_BK, axis=1)
        weights_BK = np.exp(20.0 * (nearness_BK - nearness_BK.max(axis=1, keepdims=True)))
        found.append(
            (places_S2[nearest_BK] * (weights_BK / weights_BK.sum(axis=1, keepdims=True))[:, :, None]).sum(
                axis=1
            )
        )
    return np.concatenate(found).astype(np.float32)


def _with_every_cluster(
    positions_N: Int64[np.ndarray, " N"], visible: Int64[np.ndarray, " A"], cluster_ids: np.ndarray
) -> Int64[np.ndarray, " M"]:
    """Add the first visible document of each cluster that has none among the positions, in order."""
    clusters, firsts = np.unique(cluster_ids[visible], return_index=True)
    missing = visible[firsts[~np.isin(clusters, cluster_ids[positions_N])]]
    return np.sort(np.concatenate([positions_N, missing]))


def _spread(values_A: Int64[np.ndarray, " A"], limit: int) -> Int64[np.ndarray, " B"]:
    """Return at most ``limit`` of the values, evenly spread and in their order."""
    if len(values_A) <= limit:
        return values_A
    return values_A[np.linspace(0, len(values_A) - 1, limit).astype(np.int64)]


def _principal_components(vectors_SV: Float32[np.ndarray, "S V"]) -> Float32[np.ndarray, "S 2"]:
    """Return the first two principal components, with signs that depend on the vectors alone."""
    if len(vectors_SV) < 2:
        return np.zeros((len(vectors_SV), 2))
    centred_SV = vectors_SV.astype(np.float64) - vectors_SV.mean(axis=0)
    _, axes_VV = np.linalg.eigh(centred_SV.T @ centred_SV)
    axes_V2 = axes_VV[:, [-1, -2]] if axes_VV.shape[1] > 1 else np.repeat(axes_VV, 2, axis=1)
    axes_V2 = axes_V2 * np.sign(axes_V2[np.abs(axes_V2).argmax(axis=0), np.arange(2)])
    return centred_SV @ axes_V2


def _within_unit_square(places_S2: np.ndarray) -> Float32[np.ndarray, "S 2"]:
    """Centre the places and scale both axes alike, so that the farthest touches the square."""
    if not len(places_S2):
        return places_S2.astype(np.float32)
    low, high = places_S2.min(axis=0), places_S2.max(axis=0)
    reach = float((high - low).max()) / 2
    return ((places_S2 - (low + high) / 2) / (reach or 1.0)).astype(np.float32)


def _clusters(
    cluster_ids_N: Int32[np.ndarray, " N"], places_N2: Float32[np.ndarray, "N 2"], names: Mapping[int, str]
) -> list[Cluster]:
    found: list[Cluster] = []
    for cluster, name in sorted(names.items()):
        members = cluster_ids_N == cluster
        x, y = np.median(places_N2[members], axis=0).tolist()
        found.append(Cluster(cluster_id=cluster, documents=int(members.sum()), name=name, x=x, y=y))
    return found
