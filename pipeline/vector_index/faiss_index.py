"""FAISS files opened for reading: memory-mapped, searched by inner product, filtered by position.

``faiss_build`` writes them. No hash is checked here: a file reaches
:func:`open_faiss_index` only after its SHA-256 matched the manifest.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# SWIG's module has no types, and faiss adds keyword arguments to its classes at import time.

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.counted import counted
from cairn.pipeline.errors import DamageError
from cairn.pipeline.faiss_device import CardCopy, has_card
from cairn.pipeline.faiss_library import faiss
from cairn.pipeline.vector_index import REFINE_SUFFIX
from jaxtyping import Float32, Int64
from numpy.lib.stride_tricks import sliding_window_view

NO_POSITION = -1
"""Fills the answer where fewer than ``top_k`` vectors were found; its score is minus infinity."""


def best_first(
    scores_QF: Float32[np.ndarray, "Q F"], positions_QF: Int64[np.ndarray, "Q F"], top_k: int
) -> tuple[Float32[np.ndarray, "Q K"], Int64[np.ndarray, "Q K"]]:
    """Return the ``top_k`` best of each row by score, then position, padded where there are fewer.

    What is missing scores minus infinity.
    """
    num_found = scores_QF.shape[1]
    scores_QK = np.full((len(scores_QF), top_k), -np.inf, dtype=np.float32)
    positions_QK = np.full((len(scores_QF), top_k), NO_POSITION, dtype=np.int64)
    for row, (scores, positions) in enumerate(zip(scores_QF, positions_QF, strict=True)):
        if num_found > top_k:
            is_near = scores >= np.partition(scores, num_found - top_k)[num_found - top_k]
            scores, positions = scores[is_near], positions[is_near]
        order = np.lexsort((positions, -scores))[:top_k]
        scores_QK[row, : len(order)], positions_QK[row, : len(order)] = scores[order], positions[order]
    return scores_QK, positions_QK


MIN_LISTED_VECTORS = 256
"""Below this there is nothing to train lists on, and nothing to save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaissKind:
    """How an index of one kind stores vectors.

    ``make_lists`` makes an untrained inverted file from the vector dimension and the number of lists; None
    keeps the vectors as they are, in one flat list. A refined kind re-scores its candidates with the codes of
    a second file.
    """

    why: str
    make_lists: Callable[[int, int], Any] | None = None
    is_refined: bool = False


def _scalar_lists(vector_dim: int, num_lists: int) -> Any:
    quantizer, bits = faiss.IndexFlatIP(vector_dim), faiss.ScalarQuantizer.QT_8bit
    return faiss.IndexIVFScalarQuantizer(
        quantizer, vector_dim, num_lists, bits, faiss.METRIC_INNER_PRODUCT, True
    )


def _rabitq_lists(vector_dim: int, num_lists: int) -> Any:
    quantizer = faiss.IndexFlatIP(vector_dim)
    return faiss.IndexIVFRaBitQ(quantizer, vector_dim, num_lists, faiss.METRIC_INNER_PRODUCT)


FAISS_KINDS: Final = {
    "flat": FaissKind(why="exact search is fast enough"),
    "ivf_sq8": FaissKind(why="inverted lists with one byte a dimension", make_lists=_scalar_lists),
    "ivf_rabitq": FaissKind(
        why="one bit a dimension, refined by one byte a dimension", make_lists=_rabitq_lists, is_refined=True
    ),
}
"""Kind to its rule; ``why`` completes the sentence that says why ``auto`` chose it."""


def faiss_kind(name: str) -> FaissKind:
    """Return the rule of a kind that a generation's description names; another name is damage."""
    if name not in FAISS_KINDS:
        raise DamageError(f"the kind of a FAISS index must be one of {', '.join(FAISS_KINDS)}, got {name!r}")
    return FAISS_KINDS[name]


def choose_kind(num_vectors: int, config: IndexConfig) -> tuple[str, str]:
    """Return the kind of index for a number of vectors, and a sentence that says why."""
    if config.index_kind != "flat" and num_vectors < MIN_LISTED_VECTORS:
        return "flat", f"{counted(num_vectors, 'vector')}: too few for inverted lists"
    if config.index_kind != "auto":
        return config.index_kind, f"asked for by the setting index_kind = {config.index_kind}"
    if num_vectors <= config.flat_max_vectors:
        kind, limit = "flat", f"at most {config.flat_max_vectors:,}"
    elif num_vectors < config.rabitq_min_vectors:
        kind, limit = "ivf_sq8", f"more than {config.flat_max_vectors:,}"
    else:
        kind, limit = "ivf_rabitq", f"at least {config.rabitq_min_vectors:,}"
    return kind, f"{num_vectors:,} vectors are {limit}: {FAISS_KINDS[kind].why}"


BRUTE_FORCE_POSITIONS = 2_048
"""Up to this many allowed positions are decoded and scored one by one: an IVF probe could miss them all."""

BORROWED_PROBES = 1.25
"""How many times the lists a file probes whose vectors are not those that its codebook was trained for.

Other vectors lie farther from the centroids: with as many lists recall@10 was .006 lower than with a codebook
of their own, with a quarter more it was equal.
"""

_read_lock = threading.Lock()
"""FAISS keeps its byte limit in one global; two readers of different files must not race on it."""


def open_faiss_index(
    path: Path, description: Mapping[str, Any], deleted: Int64[np.ndarray, " D"] | None = None
) -> FaissIndex:
    """Map a FAISS file whose hash has been checked.

    ``description`` is what ``build_faiss_index`` returned for it. ``deleted`` positions are never found.
    """
    kind, refine = faiss_kind(description["kind"]), None
    if kind.make_lists is None:
        index = read_faiss_file(path, faiss.IO_FLAG_MMAP_IFC)
    else:
        index = read_faiss_file(path, faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        # By default 32 threads a query fetch lists that are in the page cache anyway.
        faiss.downcast_InvertedLists(index.invlists).prefetch_nthread = 0
    if kind.is_refined:
        refine = read_faiss_file(path.with_name(path.name + REFINE_SUFFIX), faiss.IO_FLAG_MMAP_IFC)
    opened = FaissIndex(index=index, refine=refine, description=description, deleted=deleted)
    if (opened.num_vectors, opened.vector_dim) != (description["num_vectors"], description["vector_dim"]):
        raise DamageError(
            f"{path.name} must hold {description['num_vectors']} vectors of {description['vector_dim']} "
            "dimensions, "
            f"got {opened.num_vectors} of {opened.vector_dim}"
        )
    return opened


def read_faiss_file(path: Path, flags: int) -> Any:
    """Read or map a FAISS file as FAISS has it."""
    with _read_lock:
        # No vector in a file can be larger than the file.
        faiss.set_deserialization_vector_byte_limit(max(path.stat().st_size, 1 << 20))
        try:
            return faiss.read_index(str(path), flags)
        except RuntimeError as error:
            raise DamageError(f"{path.name} cannot be read as a FAISS index") from error


@contextlib.contextmanager
def one_faiss_thread() -> Generator[None]:
    """Let what this thread asks of FAISS run on one thread during the block."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NearestLists:
    """The inverted lists nearest to each query, nearest first, and the products with their centroids."""

    lists_QL: Int64[np.ndarray, "Q L"]
    products_QL: Float32[np.ndarray, "Q L"]


class FaissIndex:
    """N vectors of V dimensions in one FAISS file; safe to share between threads."""

    def __init__(
        self,
        *,
        index: Any,
        refine: Any | None,
        description: Mapping[str, Any],
        deleted: Int64[np.ndarray, " D"] | None = None,
    ) -> None:
        self.description = description
        self._index = index
        self._refine = refine
        self._search_index = index if refine is None else faiss.IndexRefine(index, refine)
        # FAISS has no RaBitQ on a card.
        self._on_card = CardCopy(index, searches_before=1) if refine is None and has_card() else None
        self.is_flat = faiss_kind(description["kind"]).make_lists is None
        self.nprobe = 1 if self.is_flat else _num_probed(description)
        self._codes_lock = threading.Lock()
        self._live = None
        if deleted is not None and len(deleted):
            is_live = np.ones(index.ntotal, np.bool_)
            is_live[deleted] = False
            self._live = _bitmap_selector(is_live)

    @property
    def num_vectors(self) -> int:
        """Count the vectors."""
        return self._index.ntotal

    @property
    def vector_dim(self) -> int:
        """Return V."""
        return self._index.d

    def search(
        self,
        queries_QV: Float32[np.ndarray, "Q V"],
        top_k: int,
        allowed: Int64[np.ndarray, " A"] | None = None,
    ) -> tuple[Float32[np.ndarray, "Q K"], Int64[np.ndarray, "Q K"]]:
        """Return the scores and positions of the ``top_k`` best vectors of each query, best first.

        Ties go to the lower position. ``allowed`` restricts the answer to these positions (any order, no
        repeats needed); None allows all. Missing answers are position -1 with score -inf, at the end of the
        row.
        """
        return best_first(*self.find(queries_QV, top_k, allowed), top_k)

    def find(
        self,
        queries_QV: Float32[np.ndarray, "Q V"],
        top_k: int,
        allowed: Int64[np.ndarray, " A"] | None = None,
        nearest: NearestLists | None = None,
    ) -> tuple[Float32[np.ndarray, "Q F"], Int64[np.ndarray, "Q F"]]:
        """Return what :meth:`search` does, in no order of ties, and not padded to ``top_k``.

        ``nearest`` are what an index that shares its centroids has found for these queries; it saves
        comparing them again where all positions are allowed.
        """
        queries_QV = np.ascontiguousarray(queries_QV, dtype=np.float32)
        if allowed is None:
            return self._find(queries_QV, top_k, self.nprobe, None, nearest)
        allowed = np.unique(allowed)
        if len(allowed) <= BRUTE_FORCE_POSITIONS:
            scores_QA = queries_QV @ self.reconstruct(allowed).T
            return best_first(scores_QA, np.broadcast_to(allowed, scores_QA.shape), top_k)
        # A filter thins every list evenly at best: probe as many more lists as the filter leaves out, so that
        # as many candidates are seen.
        nprobe = min(self.num_lists, -(-self.nprobe * self.num_vectors // len(allowed)))
        return self._find(queries_QV, top_k, nprobe, allowed)

    def nearest_lists(self, queries_QV: Float32[np.ndarray, "Q V"], num_lists: int) -> NearestLists:
        """Return the lists whose centroids are nearest to each query, nearest first, and their products."""
        products_QL, lists_QL = self._index.quantizer.search(queries_QV, num_lists)
        return NearestLists(lists_QL=lists_QL, products_QL=products_QL)

    @property
    def shared_centroids(self) -> Float32[np.ndarray, "L V"] | None:
        """A copy of the lists' centroids, None in a kind that cannot search lists found by another index."""
        # FAISS refines only what it has found itself.
        return None if self.is_flat or self._refine is not None else self._index.quantizer.reconstruct_n()

    @property
    def num_lists(self) -> int:
        """Count the inverted lists; 1 for Flat."""
        return 1 if self.is_flat else self._index.nlist

    def _find(
        self,
        queries_QV: Float32[np.ndarray, "Q V"],
        top_k: int,
        nprobe: int,
        allowed: Int64[np.ndarray, " A"] | None,
        nearest: NearestLists | None = None,
    ) -> tuple[Float32[np.ndarray, "Q F"], Int64[np.ndarray, "Q F"]]:
        num_found = min(top_k, self.num_vectors)
        if num_found == 0 or len(queries_QV) == 0:
            return np.empty((len(queries_QV), 0), np.float32), np.empty((len(queries_QV), 0), np.int64)
        parameters = self._unfiltered if allowed is None else self._parameters(nprobe, allowed)
        found = None
        if self._on_card is not None and self._live is None and allowed is None:
            found = self._on_card.search(queries_QV, num_found, parameters)
        if found is not None:
            found_QF, positions_QF = found
        elif nearest is None:
            found_QF, positions_QF = self._search_index.search(queries_QV, num_found, params=parameters)
        else:
            found_QF, positions_QF = self._search_lists(queries_QV, num_found, nprobe, nearest, parameters)
        found_QF[positions_QF == NO_POSITION] = -np.inf
        return found_QF, positions_QF

    def _search_lists(
        self,
        queries_QV: Float32[np.ndarray, "Q V"],
        num_found: int,
        nprobe: int,
        nearest: NearestLists,
        parameters: Any,
    ) -> tuple[Float32[np.ndarray, "Q F"], Int64[np.ndarray, "Q F"]]:
        """Search the first ``nprobe`` lists; FAISS's own wrapper of this call takes no parameters."""
        found_QF = np.empty((len(queries_QV), num_found), np.float32)
        positions_QF = np.empty((len(queries_QV), num_found), np.int64)
        lists_QL = np.ascontiguousarray(nearest.lists_QL[:, :nprobe])
        products_QL = np.ascontiguousarray(nearest.products_QL[:, :nprobe])
        arrays = (lists_QL, products_QL, found_QF, positions_QF)
        self._index.search_preassigned_c(
            len(queries_QV),
            faiss.swig_ptr(queries_QV),
            num_found,
            *map(faiss.swig_ptr, arrays),
            False,
            parameters,
        )
        return found_QF, positions_QF

    def reconstruct(self, positions: Int64[np.ndarray, " A"]) -> Float32[np.ndarray, "A V"]:
        """Return the vectors at these positions, in their order, decoded from what the file holds."""
        if not len(positions):
            return np.empty((0, self.vector_dim), np.float32)
        if self.is_flat:
            return self._index.reconstruct_batch(positions)
        return self._codes.decode(positions)

    @cached_property
    def _codes(self) -> _RefineCodes | _ListedCodes:
        """The stored codes by position.

        Inverted lists need a map of 8 bytes a vector for it, made when first asked for.
        """
        if self._refine is not None:
            return _RefineCodes(self._refine)
        with self._codes_lock:
            return _ListedCodes(self._index)

    @cached_property
    def _unfiltered(self) -> Any:
        """The parameters of searches among all positions, made once."""
        return self._parameters(self.nprobe, None)

    def _parameters(self, nprobe: int, allowed: Int64[np.ndarray, " A"] | None) -> Any:
        selector = self._live
        if allowed is not None:
            is_allowed = np.zeros(self.num_vectors, np.bool_)
            is_allowed[allowed] = True
            selector = _bitmap_selector(is_allowed)
        if self.is_flat:
            return None if selector is None else faiss.SearchParameters(sel=selector)
        if self._refine is None:
            return faiss.SearchParametersIVF(nprobe=nprobe, sel=selector)
        base = faiss.IVFRaBitQSearchParameters(nprobe=nprobe, sel=selector, qb=self._index.qb)
        return faiss.IndexRefineSearchParameters(
            k_factor=float(self.description["refine_factor"]), base_index_params=base
        )


class _RefineCodes:
    """8-bit codes that lie in the file by position, decoded many at once."""

    def __init__(self, index: Any) -> None:
        self._index = index
        codes = faiss.rev_swig_ptr(index.codes.data(), index.ntotal * index.code_size)
        self._codes_NC = codes.reshape(index.ntotal, index.code_size)

    def decode(self, positions: Int64[np.ndarray, " A"]) -> Float32[np.ndarray, "A V"]:
        """Return the vectors at these positions."""
        return self._index.sa_decode(self._codes_NC[positions])


class _ListedCodes:
    """8-bit codes that lie in inverted lists, found by position and decoded many at once.

    FAISS's ``reconstruct_batch`` gives the same vectors in four times the time: it prepares a decoder for
    each.
    """

    def __init__(self, index: Any) -> None:
        if index.direct_map.type == faiss.DirectMap.NoMap:
            index.make_direct_map(True)
        lists = faiss.downcast_InvertedLists(index.invlists)
        self._index = index
        self._places_N: Int64[np.ndarray, " N"] = faiss.rev_swig_ptr(
            index.direct_map.array.data(), index.ntotal
        )
        self._begins_L = np.array([lists.lists.at(number).offset for number in range(index.nlist)], np.int64)
        # Row b is the code that begins at byte b of the file.
        self._codes_BC = sliding_window_view(faiss.rev_swig_ptr(lists.ptr, lists.totsize), index.code_size)

    def decode(self, positions: Int64[np.ndarray, " A"]) -> Float32[np.ndarray, "A V"]:
        """Return the vectors at these positions."""
        places_A = self._places_N[positions]  # FAISS packs a list's number above 32 bits of the place in it
        lists_A = places_A >> 32
        codes_AC = self._codes_BC[self._begins_L[lists_A] + (places_A & 0xFFFF_FFFF) * self._index.code_size]
        vectors_AV = np.empty((len(positions), self._index.d), np.float32)
        self._index.decode_vectors(
            len(positions), faiss.swig_ptr(codes_AC), faiss.swig_ptr(lists_A), faiss.swig_ptr(vectors_AV)
        )
        return vectors_AV


def _num_probed(description: Mapping[str, Any]) -> int:
    """Return how many inverted lists a search reads, given a file's description."""
    nprobe = int(description["nprobe"])
    if description["trained_for"] == description["num_vectors"]:
        return nprobe
    return min(math.ceil(BORROWED_PROBES * nprobe), int(description["nlist"]))


def _bitmap_selector(is_allowed: np.ndarray) -> Any:
    return faiss.IDSelectorBitmap(np.packbits(is_allowed, bitorder="little"))
