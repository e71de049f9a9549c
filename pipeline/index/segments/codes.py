"""FAISS files of segments: a new one written by the collection's codebook, several joined into one.

Inverted files of one codebook have the same lists, so that their codes are copied from list to list and never
decoded. A segment of few vectors keeps them as they are, and gets codes when it is joined to a larger one.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# SWIG's module has no types.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.faiss_library import faiss
from cairn.pipeline.index.faiss_build import (
    SPILL_VECTORS,
    Codebook,
    VectorStream,
    build_faiss_index,
    encode_block,
    write_coded,
    write_flat,
    write_list_header,
    write_refine,
)
from cairn.pipeline.index.faiss_index import (
    REFINE_SUFFIX,
    FaissIndex,
    choose_kind,
    faiss_kind,
    read_faiss_file,
)
from cairn.pipeline.index.segments.segment import DeletedRows
from cairn.pipeline.manifest import SegmentRecord
from jaxtyping import Int64, UInt8

EXACT_VECTORS: Final = 2_048
"""A segment of so few vectors keeps them as they are: 3 MB at 384 dimensions, read in .3 ms."""
RETRAINED_GROWTH: Final = 4
"""How many times the vectors a codebook was trained for make it too small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexPart:
    """The index of a segment that is to be joined, and its deleted rows."""

    index: FaissIndex
    deleted: DeletedRows


def largest(segments: Sequence[SegmentRecord], table: str) -> SegmentRecord:
    """Return the segment whose index of a table has most vectors: it has the codebook, if there is one."""
    return max(segments, key=lambda segment: segment.indexes[table]["num_vectors"])


def needs_training(
    segments: Sequence[SegmentRecord], table: str, num_vectors: int, config: IndexConfig
) -> bool:
    """Tell whether so many vectors ask for another codebook than the segments have."""
    wanted, _ = choose_kind(num_vectors, config)
    coded = [each.indexes[table] for each in segments if each.indexes[table]["kind"] != "flat"]
    if wanted == "flat":
        return bool(coded)
    if not coded:
        return True
    return coded[0]["kind"] != wanted or num_vectors >= RETRAINED_GROWTH * coded[0]["trained_for"]


def read_codebook(path: Path, description: Mapping[str, Any]) -> Codebook | None:
    """Return what a FAISS file was written with, None where its vectors are kept as they are."""
    kind = faiss_kind(description["kind"])
    if kind.make_lists is None:
        return None
    index, refine = read_faiss_file(path, faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY), None
    lists = faiss.ArrayInvertedLists(index.nlist, index.code_size)
    lists.this.disown()
    index.replace_invlists(lists, True)
    index.ntotal = 0
    if kind.is_refined:
        full = read_faiss_file(path.with_name(path.name + REFINE_SUFFIX), faiss.IO_FLAG_MMAP_IFC)
        refine = faiss.IndexScalarQuantizer(full.d, full.sq.qtype, full.metric_type)
        refine.sq, refine.is_trained = full.sq, True
    shared = {name: value for name, value in description.items() if name != "num_vectors"}
    return Codebook(index=index, refine=refine, description=shared)


def write_index(
    vectors: VectorStream,
    num_vectors: int,
    vector_dim: int,
    codebook: Codebook | None,
    config: IndexConfig,
    path: Path,
) -> dict[str, Any]:
    """Write the index of a segment and return its description; None trains a codebook where one is due."""
    if codebook is None:
        return build_faiss_index(vectors, num_vectors, vector_dim, config, path)
    if _are_few(num_vectors, codebook):
        return write_flat(vectors(), num_vectors, vector_dim, path, few_sentence(num_vectors))
    return write_coded(codebook, vectors, num_vectors, path)


def _are_few(num_vectors: int, codebook: Codebook) -> bool:
    """Tell whether vectors are kept as they are; all that a codebook was trained for are coded."""
    return num_vectors <= EXACT_VECTORS and num_vectors != codebook.description["trained_for"]


def few_sentence(num_vectors: int) -> str:
    """Say why a segment of a collection with inverted lists has none."""
    return f"a segment of {num_vectors:,} vectors is small enough for exact search"


def join_indexes(
    parts: Sequence[IndexPart], vector_dim: int, codebook: Codebook | None, path: Path
) -> dict[str, Any]:
    """Write the vectors that are left of several segments as one index; return its description."""
    num_vectors = sum(part.deleted.num_live for part in parts)
    if codebook is None or _are_few(num_vectors, codebook):
        blocks = (block for part in parts for block in _live_vectors(part))
        why = parts[0].index.description["why"] if codebook is None else few_sentence(num_vectors)
        return write_flat(blocks, num_vectors, vector_dim, path, why)
    begins = np.cumsum([0, *(part.deleted.num_live for part in parts)]).tolist()
    runs = [_Lists(part, begin, codebook) for part, begin in zip(parts, begins, strict=False)]
    with path.open("wb") as stream:
        write_list_header(codebook.index, np.sum([run.sizes_K for run in runs], axis=0), stream)
        for number in range(codebook.index.nlist):
            lists = [run.read(number) for run in runs]
            for codes, _ in lists:
                stream.write(np.ascontiguousarray(codes).data)
            for _, positions in lists:
                stream.write(np.ascontiguousarray(positions, np.int64).data)
    if codebook.refine is not None:
        blocks = (block for part in parts for block in _refine_codes(part, codebook.refine))
        write_refine(codebook.refine, blocks, num_vectors, path)
    return {**codebook.description, "num_vectors": num_vectors}


class _Lists:
    """The codes of one segment by list, with their positions in the joined one."""

    def __init__(self, part: IndexPart, begin: int, codebook: Codebook) -> None:
        self._part, self._begin = part, begin
        self._is_live = part.deleted.is_live()
        self._codes: UInt8[np.ndarray, "N code"] | None = None
        if not part.index.is_flat:
            ids = (part.index.list_codes(number)[1] for number in range(codebook.index.nlist))
            self.sizes_K = np.array([int(self._is_live[each].sum()) for each in ids], np.int64)
            return
        live = np.flatnonzero(self._is_live)
        lists, codes = encode_block(codebook.index, part.index.reconstruct(live))
        order = np.argsort(lists, kind="stable")
        self.sizes_K = np.bincount(lists, minlength=codebook.index.nlist)
        self._ends = np.cumsum(self.sizes_K)
        self._codes, self._order = codes[order], order

    def read(self, number: int) -> tuple[UInt8[np.ndarray, "n code"], Int64[np.ndarray, " n"]]:
        if self._codes is not None:
            own = slice(int(self._ends[number] - self.sizes_K[number]), int(self._ends[number]))
            return self._codes[own], self._order[own] + self._begin
        codes, ids = self._part.index.list_codes(number)
        is_live = self._is_live[ids]
        return codes[is_live], self._part.deleted.live_of(ids[is_live]) + self._begin


def _live_blocks(part: IndexPart) -> Iterator[Int64[np.ndarray, " n"]]:
    for start in range(0, part.deleted.num_live, SPILL_VECTORS):
        yield part.deleted.stored_of(np.arange(start, min(start + SPILL_VECTORS, part.deleted.num_live)))


def _live_vectors(part: IndexPart) -> Iterator[np.ndarray]:
    for stored in _live_blocks(part):
        yield part.index.reconstruct(stored)


def _refine_codes(part: IndexPart, refine: Any) -> Iterator[np.ndarray]:
    for stored in _live_blocks(part):
        found = part.index.refine_codes(stored)
        yield refine.sa_encode(part.index.reconstruct(stored)) if found is None else found
