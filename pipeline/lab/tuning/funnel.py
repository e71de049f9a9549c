"""Funnel search, measured: the first dimensions answer first, all dimensions judge what is left (m³BERT).

    query[:d] ─▶ every vector[:d], normalised again ─▶ the best K ─▶ whole vectors ─▶ the best k

The first step reads d / V of the bytes of an exact search, and needs them stored a second time, by
themselves. What it may miss is a vector that the first d dimensions do not rank among the best K: recall is
measured against exact search over whole vectors, with the collection's own queries. The index that the
collection has stands in the same table, as it is what a funnel would replace.

Source: m³BERT (Matryoshka in layers and dimensions); Kusupati et al. 2022, funnel retrieval. Differs: one
narrowing step; dimensions only, since a step by layers needs a second encoding of every document.

    N vectors    V their dimensions    d first dimensions    K candidates    k results
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import faiss
import numpy as np
from cairn.pipeline.errors import SourceError
from cairn.pipeline.index.exact_index import NO_POSITION, VectorIndex, top_k_of
from cairn.pipeline.index.faiss_index import one_faiss_thread
from cairn.pipeline.model.pooling import first_dims, require_dims
from jaxtyping import Float32, Int64

TOP_K: Final = 50
"""Chunks a search of ten documents nominates."""
CANDIDATES: Final = (100, 400, 1_600)
SHARES: Final = (8, 4, 2)
"""A funnel begins with so many parts of the dimensions: an eighth, a quarter, a half."""
MIN_RECALL: Final = 0.98
"""What a funnel must find of an exact search to be named."""
MAX_VECTORS: Final = 200_000
MAX_QUERIES: Final = 200
Found = Callable[[Float32[np.ndarray, "1 V"]], Int64[np.ndarray, " k"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class FunnelRow:
    """One way to search: share of the exact top k it finds, median milliseconds a query, bytes beside V."""

    name: str
    recall: float
    milliseconds: float
    more_bytes: int = 0
    dims: int | None = None
    candidates: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FunnelReport:
    """The table: exact search, the collection's index, every funnel; ``advice`` says what follows."""

    collection: str
    kind: str
    vectors: int
    dims: int
    queries: int
    rows: Sequence[FunnelRow]
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return asdict(self)


class FunnelIndex:
    """Two steps over vectors held in memory: all by their first ``dims``, the best by all dimensions."""

    def __init__(self, vectors_NV: Float32[np.ndarray, "N V"], dims: int) -> None:
        self._vectors_NV = vectors_NV
        self._first = faiss.IndexFlatIP(dims)
        self._first.add(np.ascontiguousarray(first_dims(vectors_NV, dims)))
        self.dims = dims

    @property
    def more_bytes(self) -> int:
        """Count the bytes of the first dimensions, which are kept beside the vectors."""
        return 4 * self.dims * self._first.ntotal

    def search(
        self, queries_QV: Float32[np.ndarray, "Q V"], top_k: int, num_candidates: int
    ) -> tuple[Float32[np.ndarray, "Q K"], Int64[np.ndarray, "Q K"]]:
        """Return the exact scores and positions of the best that are among ``num_candidates``."""
        limit = min(max(num_candidates, top_k), self._first.ntotal)
        _, positions_QK = self._first.search(first_dims(queries_QV, self.dims), limit)
        found = [
            top_k_of(query_V[None] @ self._vectors_NV[own := np.sort(positions_K)].T, own, top_k)
            for query_V, positions_K in zip(queries_QV, positions_QK, strict=True)
        ]
        return np.concatenate([scores for scores, _ in found]), np.concatenate(
            [places for _, places in found]
        )


def measure_funnel(
    collection: str,
    kind: str,
    index: VectorIndex,
    queries_QV: Float32[np.ndarray, "Q V"],
    *,
    dims: Sequence[int] = (),
    candidates: Sequence[int] = CANDIDATES,
    top_k: int = TOP_K,
) -> FunnelReport:
    """Compare exact search, the index and funnels on one thread; none of them changes the collection.

    Raises :class:`SourceError` for too few vectors to narrow, :class:`ConfigError` for too many dimensions.
    """
    if index.num_vectors <= top_k:
        raise SourceError(
            f"a funnel must narrow more than {top_k} vectors, got {index.num_vectors}; take a larger "
            "collection"
        )
    for each in dims:
        require_dims(each, index.vector_dim)
    is_whole = index.num_vectors <= MAX_VECTORS
    drawn = np.arange(index.num_vectors)
    if not is_whole:
        drawn = np.sort(np.random.default_rng(0).permutation(index.num_vectors)[:MAX_VECTORS])
    vectors_NV = index.reconstruct(drawn)
    queries_QV = np.ascontiguousarray(queries_QV[:MAX_QUERIES])
    width = vectors_NV.shape[1]
    exact = faiss.IndexFlatIP(width)
    exact.add(vectors_NV)
    with one_faiss_thread():
        truth_QK = exact.search(queries_QV, top_k)[1]
        rows = [_measured("exact", lambda query: exact.search(query, top_k)[1][0], queries_QV, truth_QK)]
        if is_whole:
            name = f"the index ({kind})"
            rows.append(_measured(name, lambda query: index.search(query, top_k)[1][0], queries_QV, truth_QK))
        ways = _ways(vectors_NV, dims or tuple(width // part for part in SHARES), candidates, top_k)
        for funnel, count, find in ways:
            row = _measured(f"{funnel.dims} dimensions, {count} candidates", find, queries_QV, truth_QK)
            rows.append(replace(row, more_bytes=funnel.more_bytes, dims=funnel.dims, candidates=count))
    return FunnelReport(
        collection=collection,
        kind=kind,
        vectors=len(vectors_NV),
        dims=width,
        queries=len(queries_QV),
        rows=rows,
        advice=_advice(rows),
    )


def _ways(
    vectors_NV: Float32[np.ndarray, "N V"], dims: Sequence[int], candidates: Sequence[int], top_k: int
) -> Iterator[tuple[FunnelIndex, int, Found]]:
    for width in dims:
        funnel = FunnelIndex(vectors_NV, width)
        for count in candidates:
            if top_k <= count < len(vectors_NV):
                yield funnel, count, lambda query, own=funnel, num=count: own.search(query, top_k, num)[1][0]


def _measured(
    name: str, find: Found, queries_QV: Float32[np.ndarray, "Q V"], truth_QK: Int64[np.ndarray, "Q K"]
) -> FunnelRow:
    find(queries_QV[:1])  # the first touches memory for all
    seconds, recalls = list[float](), list[float]()
    for number, truth_K in enumerate(truth_QK):
        began = time.perf_counter()
        found_K = find(queries_QV[number : number + 1])
        seconds.append(time.perf_counter() - began)
        wanted = truth_K[truth_K != NO_POSITION]
        recalls.append(float(np.isin(wanted, found_K).mean()))
    return FunnelRow(
        name=name,
        recall=float(np.mean(recalls)),
        milliseconds=1_000 * float(np.median(seconds)),
    )


def _advice(rows: Sequence[FunnelRow]) -> str:
    """Say whether a funnel beats what the collection has, by recall and time."""
    own = rows[1] if len(rows) > 1 and rows[1].dims is None else rows[0]
    good = [row for row in rows if row.dims is not None and row.recall >= min(MIN_RECALL, own.recall)]
    if not good:
        return (
            f"nothing, because no funnel finds {MIN_RECALL:.0%} of what an exact search finds. Funnels need "
            "a model that was trained for fewer dimensions (Matryoshka)"
        )
    best = min(good, key=lambda row: row.milliseconds)
    if best.milliseconds >= own.milliseconds:
        return f"nothing, because the fastest good funnel ({best.name}) takes no less time than {own.name}"
    saved = own.milliseconds - best.milliseconds
    return (
        f"{best.name} would save {saved:.2f} ms a query of {own.milliseconds:.2f} and finds "
        f"{best.recall:.1%}; inverted lists (--index-kind ivf_sq8) are the way Cairn saves it"
    )
