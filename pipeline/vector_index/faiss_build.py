"""Write a FAISS file from a stream of vectors without ever holding them all.

What is trained sees a bounded, seeded sample; codes go to spill files block by block and are merged list by
list with plain reads, so that memory does not grow with the number of vectors. The file is FAISS's own
format, spliced: the header comes from ``serialize_index`` of the empty trained index, the codes from the
spill. FAISS's ``contrib.ondisk`` merges through memory maps instead, which counts the whole index as
resident; we don't use it.

Inner product; same vectors and settings, same bytes: one BLAS thread trains, and each slice is encoded by one
thread.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.faiss_device import CardCopy, train_kmeans
from cairn.pipeline.faiss_library import faiss
from cairn.pipeline.vector_index import REFINE_SUFFIX
from cairn.pipeline.vector_index.faiss_index import choose_kind, faiss_kind, one_faiss_thread
from jaxtyping import Float32, Int64, UInt8

VectorStream = Callable[[], Iterator[np.ndarray]]
"""Restartable: each call yields the same blocks ``[n, V]`` float32, in position order."""

VECTORS_A_LIST = 32
"""Training vectors a list; fewer would leave centroids to chance."""
MAX_LISTS = 8_192
"""Bounds the training sample: 262,144 vectors, 400 MB at 384 dimensions, whatever the size of the corpus.

A query is compared with all centroids; with more of them that would take longer than reading their lists.
"""
ONE_LEVEL_LISTS = 2_048
"""More centroids are trained in two levels."""
KMEANS_ITERATIONS = 10
SPILL_VECTORS = 16_384
"""Codes gathered in memory before they go to the spill file: 25 MB of vectors at 384 dimensions."""
ENCODE_SLICE_VECTORS = 2_048
FITTING_DISTANCE = 1.2
"""How far vectors may lie from their centroids, next to those that these were trained for.

Those of the same subjects lie as far, those of subjects that are half new 1.3 to 1.6 times.
"""
MEASURED_QUERIES = 128
MEASURED_TOP_K = 10
TARGET_RECALL = 0.985
"""Share of true neighbours whose list is probed.

What 8-bit codes lose on top is below 0.01 and no probe brings it back.
"""
MIN_NPROBE, MAX_NPROBE = 8, 512
REFINE_FACTOR = 10
"""RaBitQ hands ten candidates an answer to its refinement."""

EMPTY_LISTS_BYTES = 32
"""``ilar``, nlist, code size, ``sprs``, 0: what FAISS writes for inverted lists without a vector."""
EMPTY_CODES_BYTES = 8
"""The zero length that ends an index of codes without a vector."""


@dataclass(frozen=True, kw_only=True)
class Codebook:
    """What the inverted files of a collection share, so that their lists can be joined: trained, and empty.

    ``index`` has the centroids and the ranges of the codes, ``refine`` those of a refined kind.
    ``description`` goes into that of every file that is written with it.
    """

    index: Any
    refine: Any | None
    description: Mapping[str, Any]

    @cached_property
    def _on_card(self) -> CardCopy:
        return CardCopy(self.index.quantizer)

    def fits(self, vectors_NV: Float32[np.ndarray, "N V"]) -> bool:
        """Tell whether vectors lie about as near to the centroids as those that these were trained for.

        Others, of subjects that are new to the collection, are spread over more lists than a search probes.
        """
        distance = 1.0 - self.description["nearest_similarity"]
        return 1.0 - _nearest_similarity(self.index, vectors_NV) <= FITTING_DISTANCE * distance

    def encode(self, block_NV: np.ndarray) -> tuple[Int64[np.ndarray, " N"], UInt8[np.ndarray, "N code"]]:
        """Return the list and the code of each vector."""
        vectors_NV = np.ascontiguousarray(block_NV, dtype=np.float32)
        _, lists_N1 = self._on_card.search(vectors_NV, 1) or self.index.quantizer.search(vectors_NV, 1)
        lists = np.ascontiguousarray(lists_N1[:, 0])
        codes = np.zeros((len(vectors_NV), self.index.code_size), dtype=np.uint8)
        self.index.encode_vectors(
            len(vectors_NV), faiss.swig_ptr(vectors_NV), faiss.swig_ptr(lists), faiss.swig_ptr(codes)
        )
        return lists, codes


def build_faiss_index(
    vectors: VectorStream, num_vectors: int, vector_dim: int, config: IndexConfig, path: Path
) -> dict[str, Any]:
    """Write the index of a vector stream to ``path`` and return its description.

    The manifest keeps the description; :func:`open_faiss_index` needs it. RaBitQ writes a second file,
    ``path`` + ``.refine``. The stream is read twice for an inverted file, once for Flat.
    """
    name, why = choose_kind(num_vectors, config)
    if faiss_kind(name).make_lists is None:
        return write_flat(vectors(), num_vectors, vector_dim, path, why)
    codebook, exact = _train(vectors, num_vectors, vector_dim, config)
    written = write_coded(codebook, lambda: exact.watch(vectors()), num_vectors, path)
    return written | _choose_nprobe(codebook.index, exact)


def _train(
    vectors: VectorStream, num_vectors: int, vector_dim: int, config: IndexConfig
) -> tuple[Codebook, _ExactTop]:
    """Train a codebook on a sample, and draw the queries that it is measured with."""
    name, why = choose_kind(num_vectors, config)
    kind = faiss_kind(name)
    assert kind.make_lists is not None, "vectors that are kept as they are need no codebook"
    sample_NV, queries_QV, query_positions = _draw_samples(vectors, num_vectors, vector_dim, config.seed)
    # Sums split over threads differ in the last bit, and so would the file.
    with one_faiss_thread():
        index = _train_lists(kind.make_lists, sample_NV, num_vectors, config.seed)
        refine = _train_codes(sample_NV, vector_dim) if kind.is_refined else None
        similarity = round(_nearest_similarity(index, queries_QV), 4)
    description = {
        "kind": name,
        "why": why,
        "metric": "inner_product",
        "vector_dim": vector_dim,
        "nlist": index.nlist,
        "trained_on": len(sample_NV),
        "trained_for": num_vectors,
        "seed": config.seed,
        "refine_factor": REFINE_FACTOR,
        "nearest_similarity": similarity,
    }
    codebook = Codebook(index=index, refine=refine, description=description)
    return codebook, _ExactTop(queries_QV, query_positions)


def write_flat(
    blocks: Iterator[np.ndarray], num_vectors: int, vector_dim: int, path: Path, why: str
) -> dict[str, Any]:
    """Write vectors as they are; return the description of the file."""
    floats = (block.astype(np.float32, copy=False) for block in blocks)
    _write_codes(faiss.IndexFlatIP(vector_dim), floats, num_vectors, np.float32, path)
    return {
        "kind": "flat",
        "why": why,
        "metric": "inner_product",
        "num_vectors": num_vectors,
        "vector_dim": vector_dim,
        "probed_recall_at_10": 1.0,
    }


def write_coded(codebook: Codebook, vectors: VectorStream, num_vectors: int, path: Path) -> dict[str, Any]:
    """Write vectors by a codebook; return the description of the file."""
    _write_lists(codebook, vectors(), num_vectors, path)
    refine = codebook.refine
    if refine is not None:
        blocks = (refine.sa_encode(np.ascontiguousarray(block, dtype=np.float32)) for block in vectors())
        _write_codes(refine, blocks, num_vectors, np.uint8, path.with_name(path.name + REFINE_SUFFIX))
    return {**codebook.description, "num_vectors": num_vectors}


def _draw_samples(
    vectors: VectorStream, num_vectors: int, vector_dim: int, seed: int
) -> tuple[Float32[np.ndarray, "N V"], Float32[np.ndarray, "Q V"], Int64[np.ndarray, " Q"]]:
    """Gather training vectors and, apart from them, the queries that recall is measured with."""
    generator = np.random.default_rng(seed)
    num_queries = min(MEASURED_QUERIES, num_vectors // 2)
    num_training = min(VECTORS_A_LIST * _choose_num_lists(num_vectors), num_vectors - num_queries)
    chosen = generator.choice(num_vectors, size=num_training + num_queries, replace=False)
    positions = (np.sort(chosen[:num_training]), np.sort(chosen[num_training:]))
    samples = tuple(np.empty((len(drawn), vector_dim), np.float32) for drawn in positions)
    start = 0
    for block in vectors():
        for drawn, sample in zip(positions, samples, strict=True):
            low, high = np.searchsorted(drawn, (start, start + len(block)))
            sample[low:high] = block[drawn[low:high] - start]
        start += len(block)
    assert start == num_vectors, (start, num_vectors)
    return samples[0], samples[1], positions[1]


def _choose_num_lists(num_vectors: int) -> int:
    """Return the power of two below four times the square root of N, at most an eighth of N."""
    return int(2 ** np.floor(np.log2(max(1.0, min(4.0 * num_vectors**0.5, MAX_LISTS, num_vectors / 8)))))


def _train_lists(
    make_lists: Callable[[int, int], Any], sample_NV: Float32[np.ndarray, "N V"], num_vectors: int, seed: int
) -> Any:
    num_lists = _choose_num_lists(num_vectors)
    train = _train_centroids if num_lists <= ONE_LEVEL_LISTS else _train_in_two_levels
    index = make_lists(sample_NV.shape[1], num_lists)
    index.quantizer.add(train(sample_NV, num_lists, seed))
    index.train(sample_NV)
    return index


def _nearest_similarity(index: Any, vectors_NV: Float32[np.ndarray, "N V"]) -> float:
    """Return the mean similarity of vectors to the centroid next to each."""
    return float(index.quantizer.search(np.ascontiguousarray(vectors_NV, np.float32), 1)[0].mean())


def _train_in_two_levels(
    sample_NV: Float32[np.ndarray, "N V"], num_lists: int, seed: int
) -> Float32[np.ndarray, "K V"]:
    """Cut the sample into cells, and train the centroids of each on its own vectors, as many as its share.

    A vector is compared with some hundred centroids in place of all. Source: ``two_level_clustering`` of
    FAISS's ``contrib``; differs: spherical.
    """
    num_cells = int(2 ** np.round(np.log2(num_lists) / 2))
    cells = faiss.IndexFlatIP(sample_NV.shape[1])
    cells.add(_train_centroids(sample_NV, num_cells, seed))
    cell_N = cells.search(sample_NV, 1)[1][:, 0]
    ends = np.cumsum(np.bincount(cell_N, minlength=num_cells)) * num_lists // len(sample_NV)
    sizes = np.diff(ends, prepend=0).tolist()
    return np.concatenate(
        [_train_centroids(sample_NV[cell_N == cell], size, seed) for cell, size in enumerate(sizes) if size]
    )


def _train_centroids(
    sample_NV: Float32[np.ndarray, "N V"], num_clusters: int, seed: int
) -> Float32[np.ndarray, "K V"]:
    parameters = {
        "niter": KMEANS_ITERATIONS,
        "seed": seed,
        "spherical": True,
        "min_points_per_centroid": 1,
        "max_points_per_centroid": len(sample_NV),
    }
    return train_kmeans(sample_NV, num_clusters, parameters).centroids


def _train_codes(sample_NV: Float32[np.ndarray, "N V"], vector_dim: int) -> Any:
    refine = faiss.IndexScalarQuantizer(vector_dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
    refine.train(sample_NV)
    return refine


def _header(index: Any, num_vectors: int, tail_bytes: int) -> bytes:
    index.ntotal = num_vectors
    try:
        return faiss.serialize_index(index).tobytes()[:-tail_bytes]
    finally:
        index.ntotal = 0


def _write_codes(
    index: Any, blocks: Iterator[np.ndarray], num_vectors: int, code_type: Any, path: Path
) -> None:
    """Write an index whose last field is its codes in position order: Flat and scalar codes."""
    with path.open("wb") as stream:
        stream.write(_header(index, num_vectors, EMPTY_CODES_BYTES))
        # FAISS counts a Flat file's floats and a code file's bytes: one item a dimension either way.
        stream.write(np.uint64(num_vectors * index.d).tobytes())
        written = 0
        for block in blocks:
            stream.write(np.ascontiguousarray(block, dtype=code_type).data)
            written += len(block)
    assert written == num_vectors, (written, num_vectors)


def _write_lists(codebook: Codebook, blocks: Iterator[np.ndarray], num_vectors: int, path: Path) -> None:
    """Encode every block, spill the codes sorted by list, and merge the spills into one inverted file."""
    index = codebook.index
    with tempfile.TemporaryFile(dir=path.parent) as spill, path.open("wb") as stream:
        sizes_SK, starts = _spill_codes(codebook, blocks, spill)
        sizes_K = sizes_SK.sum(axis=0)
        assert int(sizes_K.sum()) == num_vectors, (int(sizes_K.sum()), num_vectors)
        stream.write(_header(index, num_vectors, EMPTY_LISTS_BYTES))
        stream.write(b"ilar" + np.array([index.nlist, index.code_size], np.uint64).tobytes())
        stream.write(b"full" + np.uint64(index.nlist).tobytes() + sizes_K.astype(np.uint64).tobytes())
        offsets_SK = np.cumsum(sizes_SK, axis=1) - sizes_SK
        for list_number in range(index.nlist):
            for width, skip in ((index.code_size, 0), (8, index.code_size)):
                for run_sizes_K, offsets_K, start in zip(sizes_SK, offsets_SK, starts, strict=True):
                    num_codes = int(run_sizes_K[list_number])
                    begin = start + int(run_sizes_K.sum()) * skip + int(offsets_K[list_number]) * width
                    stream.write(os.pread(spill.fileno(), num_codes * width, begin))


def _spill_codes(
    codebook: Codebook, blocks: Iterator[np.ndarray], spill: IO[bytes]
) -> tuple[Int64[np.ndarray, "S K"], list[int]]:
    """Append one run for every ``SPILL_VECTORS``; return the list sizes and the start of each run.

    A run is all its codes, then all its positions, both sorted by list.
    """
    sizes, starts, position = [], [], 0
    with ThreadPoolExecutor(
        max_workers=faiss.omp_get_max_threads(), initializer=faiss.omp_set_num_threads, initargs=(1,)
    ) as workers:
        for block in _regroup(blocks, SPILL_VECTORS):
            slices = [
                block[start : start + ENCODE_SLICE_VECTORS]
                for start in range(0, len(block), ENCODE_SLICE_VECTORS)
            ]
            encoded = list(workers.map(codebook.encode, slices))
            lists = np.concatenate([lists for lists, _ in encoded])
            order = np.argsort(lists, kind="stable")
            starts.append(spill.tell())
            spill.write(np.concatenate([codes for _, codes in encoded])[order].data)
            spill.write((order + position).astype(np.int64).data)
            sizes.append(np.bincount(lists, minlength=codebook.index.nlist))
            position += len(block)
    spill.flush()
    return np.stack(sizes), starts


def _regroup(blocks: Iterator[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yield blocks of ``size`` rows, the last one shorter, whatever the sizes of those that come in."""
    waiting: list[np.ndarray] = []
    num_waiting = 0
    for block in blocks:
        while num_waiting + len(block) >= size:
            head, block = block[: size - num_waiting], block[size - num_waiting :]
            yield np.concatenate([*waiting, head])
            waiting, num_waiting = [], 0
        if len(block):
            waiting.append(block)
            num_waiting += len(block)
    if waiting:
        yield np.concatenate(waiting)


class _ExactTop:
    """The true neighbours of the measured queries, found while the blocks stream into the index."""

    def __init__(
        self, queries_QV: Float32[np.ndarray, "Q V"], own_positions: Int64[np.ndarray, " Q"]
    ) -> None:
        num_queries, vector_dim = queries_QV.shape
        self.queries_QV = queries_QV
        self.neighbours_QKV = np.zeros((num_queries, MEASURED_TOP_K, vector_dim), dtype=np.float32)
        self._own_positions = own_positions
        self._scores_QK = np.full((num_queries, MEASURED_TOP_K), -np.inf, dtype=np.float32)
        self._num_seen = 0

    def watch(self, blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Pass the blocks on, looking at each that was not seen before: a stream may be read again."""
        start = 0
        for block in blocks:
            if start == self._num_seen:
                self._offer(block, start)
                self._num_seen += len(block)
            start += len(block)
            yield block

    def _offer(self, block_NV: np.ndarray, start: int) -> None:
        scores_QN = self.queries_QV @ block_NV.T
        is_here = (self._own_positions >= start) & (self._own_positions < start + len(block_NV))
        # A query that finds itself says nothing.
        scores_QN[np.flatnonzero(is_here), self._own_positions[is_here] - start] = -np.inf
        best = np.argsort(-scores_QN, axis=1, kind="stable")[:, :MEASURED_TOP_K]
        scores = np.concatenate([self._scores_QK, np.take_along_axis(scores_QN, best, axis=1)], axis=1)
        vectors = np.concatenate([self.neighbours_QKV, block_NV[best]], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :MEASURED_TOP_K]
        self._scores_QK = np.take_along_axis(scores, order, axis=1)
        self.neighbours_QKV = np.take_along_axis(vectors, order[:, :, None], axis=1)


def _choose_nprobe(index: Any, exact: _ExactTop) -> dict[str, Any]:
    """Return the fewest lists that hold the target share of true neighbours, and the share measured.

    Asks the coarse quantizer alone: searching the file itself would make all of it resident.
    """
    num_queries, num_neighbours, vector_dim = exact.neighbours_QKV.shape
    max_nprobe = min(MAX_NPROBE, index.nlist)
    with one_faiss_thread():
        _, lists = index.quantizer.search(exact.neighbours_QKV.reshape(-1, vector_dim), 1)
        _, probed = index.quantizer.search(exact.queries_QV, max_nprobe)
    is_list = probed[:, None, :] == lists.reshape(num_queries, num_neighbours, 1)
    share_found = np.cumsum(is_list.mean(axis=(0, 1)))
    nprobe = min(max(int(np.searchsorted(share_found, TARGET_RECALL)) + 1, MIN_NPROBE), max_nprobe)
    return {
        "nprobe": nprobe,
        "probed_recall_at_10": round(float(share_found[nprobe - 1]), 4),
        "recall_queries": num_queries,
    }
