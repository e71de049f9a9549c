"""A collection as a map: its documents in the plane, neighbours beside one another.

    document vectors ─▶ a first sample ─▶ t-SNE, from its first two principal components
                    └─▶ a sample ─▶ between its nearest neighbours of the first ─▶ some more steps of t-SNE
                    └─▶ all others ─▶ between their nearest neighbours of the sample ─▶ x, y in [-1, 1]

A cluster is named by two words that are frequent in the titles of its documents, else in the beginnings of a
few short texts, and rare in others'; where those are another's, by further ones.

Drawn on demand, from the documents that an API key sees, and kept while its generation is served; the same
documents give the same map.

Source: van der Maaten & Hinton 2008, with the Barnes-Hut tree of van der Maaten 2014, as openTSNE computes it
(Poličar et al. 2024). Beginning with principal components, and a small sample before all, keeps the large
picture (Kobak & Berens 2019). Differs: far documents are put together at twice openTSNE's angle.

    N documents of the map    S of the sample    F of the first sample    V dimensions
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from cairn.pipeline.errors import TryAgainError
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.lexical.languages import UNTOLD_WORDS
from cairn.pipeline.search.hits import read_rows
from cairn.pipeline.serve.problems import Kind
from jaxtyping import Float32, Int32, Int64

FIRST_SAMPLE: Final = 1_000
"""Documents that t-SNE lays out from principal components."""
MAX_SAMPLE: Final = 6_000
"""Documents that t-SNE lays out at all: some seconds of one thread."""
MAX_DOCUMENTS: Final = 10_000
"""Points of a map: about 1 MB to send, and more than a screen can tell apart."""
NUM_NEIGHBOURS: Final = 5
PERPLEXITY: Final = 30
MIN_SAMPLE: Final = 10
"""Below this there are no neighbourhoods to keep: principal components are the map."""
ALIKE: Final = 1e-5
"""Vectors that differ by less differ by rounding."""
MAX_TITLE_CHARACTERS: Final = 120
MAX_LABELLED: Final = 500
"""Documents of a cluster that say where its label stands; the square of it is compared."""
NEAR: Final = 0.5
"""Reach of a neighbourhood, as a share of the cluster's own spread."""
SEED: Final = 0
STEPS_AT_A_TIME: Final = 50
"""Between two reports: at most half a second."""
EXAGGERATED_STEPS: Final = 250
FIRST_STEPS: Final = 500
"""After those with exaggeration; both numbers are openTSNE's."""
REFINING_STEPS: Final = 100
"""With all of the sample. More of them bring it no nearer to its neighbours that can be seen."""
EXAGGERATION: Final = 12.0
ANGLE: Final = 1.0
"""Of Barnes and Hut: a cell that is seen at less is one point. openTSNE's 0.5 takes twice the time."""
Report = Callable[[float], None]
"""Takes the share of a layout that is done, 0 to 1, and may end the layout by raising."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A cluster's documents on the map: how many, and where they stand densest.

    The name is made of words of their titles or texts, and empty where there are none.
    """

    cluster: int
    documents: int
    name: str
    x: float
    y: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Points:
    """Documents on the map as columns of one length; long titles are cut.

    ``x`` and ``y`` are from -1 to 1, the latter upwards.
    """

    doc_id: list[str]
    title: list[str | None]
    x: list[float]
    y: list[float]
    cluster: list[int]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], places: np.ndarray, clusters: np.ndarray) -> Points:
        """Return the points of rows with ``doc_id`` and ``title``."""
        x, y = np.round(places.astype(np.float64), 4).T.tolist()
        titles = [None if row["title"] is None else row["title"][:MAX_TITLE_CHARACTERS] for row in rows]
        return cls(doc_id=[row["doc_id"] for row in rows], title=titles, x=x, y=y, cluster=clusters.tolist())


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class CorpusMap:
    """Where documents stand; ``sample_vectors_SV`` is what further ones are placed by."""

    positions_N: Int64[np.ndarray, " N"]
    places_N2: Float32[np.ndarray, "N 2"]
    points: Points
    clusters: Sequence[Cluster]
    sample_vectors_SV: Float32[np.ndarray, "S V"]
    sample_places_S2: Float32[np.ndarray, "S 2"]


def draw_map(
    generation: Generation, visible: Int64[np.ndarray, " A"], report: Report = lambda _: None
) -> CorpusMap:
    """Lay out the visible documents; of many, an evenly spread part with at least one of every cluster."""
    positions_N = _with_every_cluster(_spread(visible, MAX_DOCUMENTS), visible, generation.cluster_ids)
    vectors_NV = generation.documents.reconstruct(positions_N)
    sample_S = _spread(np.arange(len(positions_N)), MAX_SAMPLE)
    places_S2 = lay_out(vectors_NV[sample_S], report)
    places_N2 = place(vectors_NV, vectors_NV[sample_S], places_S2)
    places_N2[sample_S] = places_S2
    rows = read_rows(generation, positions_N, ["doc_id", "title"])
    cluster_ids_N = generation.cluster_ids[positions_N]
    texts = telling_texts(generation, positions_N, [row["title"] for row in rows], cluster_ids_N)
    names = name_clusters(texts, cluster_ids_N, tuple(generation.manifest.languages))
    return CorpusMap(
        positions_N=positions_N,
        places_N2=places_N2,
        points=Points.of(rows, places_N2, cluster_ids_N),
        clusters=_clusters(cluster_ids_N, places_N2, names),
        sample_vectors_SV=vectors_NV[sample_S],
        sample_places_S2=places_N2[sample_S],
    )


def lay_out(
    vectors_SV: Float32[np.ndarray, "S V"], report: Report = lambda _: None
) -> Float32[np.ndarray, "S 2"]:
    """Return a place in [-1, 1]² for each vector; the same vectors give the same places, up to rounding."""
    components_S2 = _principal_components(vectors_SV)
    if np.abs(components_S2).max(initial=0.0) < ALIKE:
        return np.zeros((len(vectors_SV), 2), np.float32)
    if len(vectors_SV) < MIN_SAMPLE:
        return _within_unit_square(components_S2)
    first_F = _spread(np.arange(len(vectors_SV)), FIRST_SAMPLE)
    first_cost = len(first_F) * (EXAGGERATED_STEPS + FIRST_STEPS)
    cost = first_cost + (len(vectors_SV) * REFINING_STEPS if len(first_F) < len(vectors_SV) else 0)
    begun_F2 = 1e-4 * components_S2[first_F] / components_S2[first_F, 0].std()
    moved = _Moved(vectors_SV[first_F], begun_F2, lambda done: report(done / cost))
    moved.steps(EXAGGERATED_STEPS, EXAGGERATION)
    moved.steps(FIRST_STEPS)
    if len(first_F) < len(vectors_SV):
        # The area of a map grows with the number of its points.
        spread = (len(vectors_SV) / len(first_F)) ** 0.5
        begun_S2 = place(vectors_SV, vectors_SV[first_F], moved.places) * spread
        moved = _Moved(vectors_SV, begun_S2, lambda done: report((first_cost + done) / cost))
        moved.steps(REFINING_STEPS)
    return _within_unit_square(moved.places)


class _Moved:
    """Points on their way. ``report`` takes the number of points moved so far, in each step."""

    def __init__(self, vectors_SV: Float32[np.ndarray, "S V"], begun_S2: np.ndarray, report: Report) -> None:
        # scikit-learn and SciPy come in here, with the first map
        from openTSNE import TSNEEmbedding
        from openTSNE.affinity import PerplexityBasedNN

        num_points = len(vectors_SV)
        done = itertools.count(num_points * STEPS_AT_A_TIME, num_points * STEPS_AT_A_TIME)
        # To infer what these return, pyright would read SciPy: most of the time it needs for this file.
        self._embedding: Any = cast(Any, TSNEEmbedding)(
            begun_S2.astype(np.float64),
            cast(Any, PerplexityBasedNN)(
                vectors_SV.astype(np.float64),
                perplexity=min(PERPLEXITY, (num_points - 1) // 3),
                method="exact",
                n_jobs=1,
                random_state=SEED,
            ),
            negative_gradient_method="bh",
            theta=ANGLE,
            n_jobs=1,
            random_state=SEED,
            callbacks=[lambda *_: report(next(done))],
            callbacks_every_iters=STEPS_AT_A_TIME,
        )

    @property
    def places(self) -> np.ndarray:
        return np.asarray(self._embedding)

    def steps(self, count: int, exaggeration: float | None = None) -> None:
        self._embedding.optimize(n_iter=count, exaggeration=exaggeration, momentum=0.8, inplace=True)


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


def densest_place(places_M2: Float32[np.ndarray, "M 2"]) -> Float32[np.ndarray, " 2"]:
    """Return where the places are densest, so that the label of a ring or of two islands stands among them.

    That is the mean of a neighbourhood: that of the place with the most others within ``NEAR`` of the median
    distance from the median place; ties go to the one nearest to it. Many places are thinned evenly.
    """
    thinned_m2 = places_M2[_spread(np.arange(len(places_M2)), MAX_LABELLED)].astype(np.float64)
    distance_m = np.linalg.norm(thinned_m2 - np.median(thinned_m2, axis=0), axis=1)
    reach = NEAR * float(np.median(distance_m))
    is_near_mm = np.linalg.norm(thinned_m2[:, None] - thinned_m2[None], axis=2) <= reach
    best = np.lexsort((distance_m, -is_near_mm.sum(axis=1)))[0]
    return thinned_m2[is_near_mm[best]].mean(axis=0).astype(np.float32)


def _clusters(
    cluster_ids_N: Int32[np.ndarray, " N"], places_N2: Float32[np.ndarray, "N 2"], names: Mapping[int, str]
) -> list[Cluster]:
    found: list[Cluster] = []
    for cluster, name in sorted(names.items()):
        members = cluster_ids_N == cluster
        x, y = densest_place(places_N2[members]).tolist()
        x, y = round(x, 4), round(y, 4)
        found.append(Cluster(cluster=cluster, documents=int(members.sum()), name=name, x=x, y=y))
    return found


WORDS_A_NAME: Final = 2
MAX_WORDS_A_NAME: Final = 4
"""Of a cluster that shares its first words with another."""
TEXTS_A_CLUSTER: Final = 12
MAX_TEXT_TOKENS: Final = 2_000
"""Longer texts are not read for a name."""
MAX_TEXT_CHARACTERS: Final = 600
SAME_STEM_LETTERS: Final = 4

_FURTHER_WORDS: Final = {
    *("using", "use", "used", "via", "per", "within", "without", "one", "two", "many", "much"),
}
"""Say nothing of a subject, as function words do."""
_WORD: Final = re.compile(r"(?<![^\W\d_])[^\W\d_]{3,24}(?![^\W\d_])")


def name_clusters(
    texts: Sequence[str | None], cluster_ids_N: Int32[np.ndarray, " N"], languages: Sequence[str] = ()
) -> dict[int, str]:
    """Name each cluster by the words of its documents' texts; empty where they have none.

    Left out are function words of English and of these languages.
    """
    untold = _FURTHER_WORDS.union(*(UNTOLD_WORDS.get(language, ()) for language in ("en", *languages)))
    words: dict[int, Counter[str]] = {cluster: Counter() for cluster in np.unique(cluster_ids_N).tolist()}
    for text, cluster in zip(texts, cluster_ids_N.tolist(), strict=True):
        words[cluster].update({word for word in _WORD.findall((text or "").lower()) if word not in untold})
    spread = Counter(word for counted in words.values() for word in counted)
    names: dict[int, str] = {}
    taken: set[frozenset[str]] = set()
    for cluster, counted in words.items():
        best = _best_words(counted, spread, len(words))
        lengths = range(WORDS_A_NAME, max(WORDS_A_NAME, len(best)) + 1)
        length = next((each for each in lengths if frozenset(best[:each]) not in taken), WORDS_A_NAME)
        taken.add(frozenset(best[:length]))
        names[cluster] = " ".join(best[:length])
    return names


def telling_texts(
    generation: Generation,
    positions_N: Int64[np.ndarray, " N"],
    titles: Sequence[str | None],
    cluster_ids_N: Int32[np.ndarray, " N"],
) -> list[str | None]:
    """Return each document's title; of some without, spread over clusters, the text's beginning."""
    texts = list(titles)
    untitled_U = np.array([n for n, title in enumerate(titles) if not title], np.int64)
    untitled_U = untitled_U[generation.num_tokens[positions_N[untitled_U]] <= MAX_TEXT_TOKENS]
    chosen: list[int] = []
    for cluster in np.unique(cluster_ids_N[untitled_U]).tolist():
        members = untitled_U[cluster_ids_N[untitled_U] == cluster]
        chosen += members[
            np.linspace(0, len(members) - 1, min(len(members), TEXTS_A_CLUSTER)).astype(np.int64)
        ].tolist()
    if chosen:
        rows = read_rows(generation, positions_N[np.array(chosen)], ["text"])
        for n, row in zip(chosen, rows, strict=True):
            texts[n] = row["text"][:MAX_TEXT_CHARACTERS]
    return texts


def _best_words(counted: Mapping[str, int], spread: Mapping[str, int], num_clusters: int) -> list[str]:
    """Return the words with the highest tf-idf over clusters, none nearly alike, ties by the alphabet."""
    weight = {word: count * math.log(1 + num_clusters / spread[word]) for word, count in counted.items()}
    name: list[str] = []
    for word in sorted(weight, key=lambda word: (-weight[word], word)):
        if not any(_are_alike(word, other) for other in name):
            name.append(word)
        if len(name) == MAX_WORDS_A_NAME:
            break
    return name


def _are_alike(word: str, other: str) -> bool:
    return word in other or other in word or word[:SAME_STEM_LETTERS] == other[:SAME_STEM_LETTERS]


NICENESS: Final = 10
MAX_ENTRIES: Final = 32
MAX_PENDING: Final = 8
"""Entries that may be computed or wait for it; a request for one more is told to try again."""

CacheKey = tuple[str, int, str, str]


def cache_key(generation: Generation, restriction: Mapping[str, Any] | None) -> CacheKey:
    """Return collection, generation, the run that made it, and the restriction of the API key."""
    manifest = generation.manifest
    return (
        generation.layout.name,
        manifest.generation,
        manifest.run_id,
        json.dumps(restriction, sort_keys=True),
    )


class MapCache:
    """Maps drawn once for a generation and then kept; used from one event loop.

    An entry holds only documents that an API key sees, since the key's restriction is part of the cache key.
    The number of entries is bounded; the least recently used go first.

    An entry whose request was cancelled is still computed for the others that wait. One of a generation that
    is no longer asked for is not: writes would leave more and more of them.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="cairn-map", initializer=_lower_thread_priority
        )
        self._entries: OrderedDict[CacheKey, asyncio.Future[CorpusMap]] = OrderedDict()
        self._progress: dict[CacheKey, float] = {}
        self._asked: dict[str, int] = {}
        """The generation of each collection that was last asked for."""
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """Let what is being computed end soon: a server that stops waits for its threads."""
        self._is_stopped.set()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def progress(self, key: CacheKey) -> float:
        """Return the share of an entry that has been computed so far, 0 to 1."""
        return self._progress.get(key, 0.0)

    def report(self, key: CacheKey, share: float) -> None:
        """Note how much has been computed; raises :class:`TryAgainError` once stopped or out of date."""
        if self._is_stopped.is_set() or self._asked[key[0]] != key[1]:
            raise TryAgainError("a map must be of the generation that is served, got an older one; ask again")
        self._progress[key] = share

    async def get(
        self, key: CacheKey, compute: Callable[[], CorpusMap], timeout_seconds: float | None = None
    ) -> CorpusMap | None:
        """Return an entry, None where it is not ready in time or out of date; a failed one is made again."""
        entry = self._entries.get(key)
        if entry is None or (entry.done() and (entry.cancelled() or entry.exception() is not None)):
            self._make_room(key)
            entry = self._entries[key] = asyncio.get_running_loop().run_in_executor(self._executor, compute)
            entry.add_done_callback(_retrieve_exception)
            entry.add_done_callback(lambda _: self._progress.pop(key, None))
        self._entries.move_to_end(key)
        done, _ = await asyncio.wait({entry}, timeout=timeout_seconds)
        return entry.result() if done and not entry.cancelled() else None

    def _make_room(self, key: CacheKey) -> None:
        collection, generation, *_ = key
        self._asked[collection] = generation
        for other in [other for other in self._entries if other[0] == collection and other[1] != generation]:
            self._entries.pop(other).cancel()
        while len(self._entries) >= MAX_ENTRIES:
            self._entries.popitem(last=False)
        if sum(not entry.done() for entry in self._entries.values()) >= MAX_PENDING:
            raise Kind.OVERLOADED("too many maps are being drawn")


def _lower_thread_priority() -> None:
    """Let this thread yield to all others of the machine: searches come before maps."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _retrieve_exception(entry: asyncio.Future[Any]) -> None:
    """Mark an error as seen where no request waits for it any more; the next one computes the entry again."""
    if not entry.cancelled():
        entry.exception()
