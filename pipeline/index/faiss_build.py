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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.faiss_library import faiss
from cairn.pipeline.index.faiss_index import REFINE_SUFFIX, choose_kind, faiss_kind, one_faiss_thread
from jaxtyping import Float32, Int64

VectorStream = Callable[[], Iterator[np.ndarray]]
"""Restartable: each call yields the same blocks ``[n, V]`` float32, in position order."""

VECTORS_A_LIST = 32
"""Training vectors a list; fewer would leave centroids to chance."""
MAX_LISTS = 2_048
"""Bounds the training sample: 65,536 vectors, 100 MB at 384 dimensions, whatever the size of the corpus."""
KMEANS_ITERATIONS = 10
SPILL_VECTORS = 16_384
"""Codes gathered in memory before they go to the spill file: 25 MB of vectors at 384 dimensions."""
ENCODE_SLICE_VECTORS = 2_048
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Codebook:
    """What the inverted files of a collection share, so that their lists can be joined: trained, and empty.

    ``index`` has the centroids and the ranges of the codes, ``refine`` those of a refined kind.
    ``description`` goes into that of every file that is written with it.
    """

    index: Any
    refine: Any | None
    description: Mapping[str, Any]


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


def train_codebook(
    vectors: VectorStream, num_vectors: int, vector_dim: int, config: IndexConfig
) -> Codebook | None:
    """Return what :func:`build_faiss_index` writes a stream with, None where vectors are kept as they are.

    The stream is read twice.
    """
    if faiss_kind(choose_kind(num_vectors, config)[0]).make_lists is None:
        return None
    codebook, exact = _train(vectors, num_vectors, vector_dim, config)
    for _ in exact.watch(vectors()):
        pass
    description = {**codebook.description, **_choose_nprobe(codebook.index, exact)}
    return replace(codebook, description=description)


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
    _write_lists(codebook.index, vectors(), num_vectors, path)
    refine = codebook.refine
    if refine is not None:
        blocks = (refine.sa_encode(np.ascontiguousarray(block, dtype=np.float32)) for block in vectors())
        write_refine(refine, blocks, num_vectors, path)
    return {**codebook.description, "num_vectors": num_vectors}


def write_refine(refine: Any, blocks: Iterator[np.ndarray], num_vectors: int, path: Path) -> None:
    """Write the second file of a refined kind from codes in the order of their positions."""
    _write_codes(refine, blocks, num_vectors, np.uint8, path.with_name(path.name + REFINE_SUFFIX))


def write_list_header(index: Any, sizes_K: Int64[np.ndarray, " K"], stream: IO[bytes]) -> None:
    """Write all of an inverted file that stands before its codes; ``sizes_K`` are those of its lists."""
    stream.write(_header(index, int(sizes_K.sum()), EMPTY_LISTS_BYTES))
    stream.write(b"ilar" + np.array([index.nlist, index.code_size], np.uint64).tobytes())
    stream.write(b"full" + np.uint64(index.nlist).tobytes() + sizes_K.astype(np.uint64).tobytes())


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
    index = make_lists(sample_NV.shape[1], _choose_num_lists(num_vectors))
    index.cp.niter, index.cp.seed, index.cp.spherical = KMEANS_ITERATIONS, seed, True
    index.cp.min_points_per_centroid = 1
    index.cp.max_points_per_centroid = len(sample_NV)
    index.train(sample_NV)
    return index


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


def _write_lists(index: Any, blocks: Iterator[np.ndarray], num_vectors: int, path: Path) -> None:
    """Encode every block, spill the codes sorted by list, and merge the spills into one inverted file."""
    with tempfile.TemporaryFile(dir=path.parent) as spill, path.open("wb") as stream:
        sizes_SK, starts = _spill_codes(index, blocks, spill)
        sizes_K = sizes_SK.sum(axis=0)
        assert int(sizes_K.sum()) == num_vectors, (int(sizes_K.sum()), num_vectors)
        write_list_header(index, sizes_K, stream)
        offsets_SK = np.cumsum(sizes_SK, axis=1) - sizes_SK
        for list_number in range(index.nlist):
            for width, skip in ((index.code_size, 0), (8, index.code_size)):
                for run_sizes_K, offsets_K, start in zip(sizes_SK, offsets_SK, starts, strict=True):
                    num_codes = int(run_sizes_K[list_number])
                    begin = start + int(run_sizes_K.sum()) * skip + int(offsets_K[list_number]) * width
                    stream.write(os.pread(spill.fileno(), num_codes * width, begin))


def _spill_codes(
    index: Any, blocks: Iterator[np.ndarray], spill: IO[bytes]
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
            encoded = list(workers.map(lambda part: encode_block(index, part), slices))
            lists = np.concatenate([lists for lists, _ in encoded])
            order = np.argsort(lists, kind="stable")
            starts.append(spill.tell())
            spill.write(np.concatenate([codes for _, codes in encoded])[order].data)
            spill.write((order + position).astype(np.int64).data)
            sizes.append(np.bincount(lists, minlength=index.nlist))
            position += len(block)
    spill.flush()
    return np.stack(sizes), starts


def encode_block(index: Any, block_NV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the list and the code of each vector."""
    vectors_NV = np.ascontiguousarray(block_NV, dtype=np.float32)
    lists = np.ascontiguousarray(index.quantizer.search(vectors_NV, 1)[1][:, 0])
    codes = np.zeros((len(vectors_NV), index.code_size), dtype=np.uint8)
    index.encode_vectors(
        len(vectors_NV), faiss.swig_ptr(vectors_NV), faiss.swig_ptr(lists), faiss.swig_ptr(codes)
    )
    return lists, codes


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
