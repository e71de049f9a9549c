"""``passages.arrow``: how often each chunk holds each word; written here, scored by ``passage_bm25``.

``titles.arrow`` has the same form: a title is the one chunk of its document. ``document_bm25`` scores both.

    term ─▶ chunks that hold it (ascending), how often each does        one row a term, terms by code point

The file is derived, as those of FAISS are: made whole for each generation, mapped into memory, hashed in the
manifest. It is sorted on disk: memory grows with the vocabulary and :data:`BLOCK_POSTINGS`, not with the
corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from io import SEEK_END
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
from cairn.pipeline.index.position_files import mapped, open_positions, unnamed_file
from cairn.pipeline.index.words import NO_TERM, TermNumbers, words_of
from jaxtyping import Int64

PASSAGE_TERMS_SCHEMA = pa.schema(
    [
        pa.field("term", pa.large_string(), nullable=False),
        pa.field("chunks", pa.large_list(pa.field("item", pa.uint32(), nullable=False)), nullable=False),
        pa.field("counts", pa.large_list(pa.field("item", pa.uint8(), nullable=False)), nullable=False),
    ]
)
MAX_COUNT = 255
"""A word said more often in one chunk counts so often: BM25 is flat long before."""
BLOCK_WORDS = 1 << 20
"""Words counted at once: 50 MB."""
BLOCK_POSTINGS = 1 << 23
"""Postings sorted at once: 200 MB."""

_POSTING = np.dtype([("term", np.uint32), ("chunk", np.uint32), ("count", np.uint8)])


def write_passage_terms(
    texts: Iterable[Sequence[str]],
    chunk_offsets: Int64[np.ndarray, " N_plus_1"],
    start_char: Int64[np.ndarray, " M"],
    end_char: Int64[np.ndarray, " M"],
    path: Path,
) -> pa.RecordBatch:
    """Count the words of every chunk of N documents and write the file; return it, mapped.

    ``texts`` come in batches, in the order of the documents; document n's chunks are ``chunk_offsets[n] :
    chunk_offsets[n + 1]``.
    """
    numbers = TermNumbers()
    with ExitStack() as spools:
        spool, spill, chunks, counts = (spools.enter_context(unnamed_file(path)) for _ in range(4))
        num_chunks_T = np.zeros(0, np.int64)
        for postings in _count(texts, chunk_offsets, start_char, end_char, numbers):
            spool.write(postings.data)
            if len(numbers.terms) > len(num_chunks_T):  # doubled, so that all copying together stays linear
                num_chunks_T = np.pad(num_chunks_T, (0, 2 * len(numbers.terms) - len(num_chunks_T)))
            seen, times = np.unique(postings["term"], return_counts=True)
            num_chunks_T[seen] += times
        num_chunks_T = num_chunks_T[: len(numbers.terms)]
        order = np.array(sorted(range(len(numbers.terms)), key=numbers.terms.__getitem__), np.int64)
        ends_T = np.cumsum(num_chunks_T[order])
        rank_T = np.empty(len(order), np.uint32)
        rank_T[order] = np.arange(len(order), dtype=np.uint32)
        for ordered in _by_rank(spool, spill, rank_T, ends_T):
            chunks.write(np.ascontiguousarray(ordered["chunk"]).data)
            counts.write(np.ascontiguousarray(ordered["count"]).data)
        terms = pa.array([numbers.terms[number] for number in order.tolist()], pa.large_string())
        write_postings(terms, ends_T, chunks, counts, path)
    return open_passage_terms(path)


def open_passage_terms(path: Path) -> pa.RecordBatch:
    """Map the file; another one raises :class:`DamageError`."""
    return open_positions(path, PASSAGE_TERMS_SCHEMA)


def num_words(terms: pa.RecordBatch, num_chunks: int) -> Int64[np.ndarray, " M"]:
    """Count the words of each chunk, by the postings of the file."""
    chunks = terms.column("chunks").values.to_numpy()
    counts = terms.column("counts").values.to_numpy()
    words_M = np.zeros(num_chunks, np.int64)
    for start in range(0, len(chunks), BLOCK_POSTINGS):
        own = slice(start, start + BLOCK_POSTINGS)
        words_M += np.bincount(chunks[own], counts[own], num_chunks).astype(np.int64)
    return words_M


def _count(
    texts: Iterable[Sequence[str]],
    chunk_offsets: Int64[np.ndarray, " N_plus_1"],
    start_char: Int64[np.ndarray, " M"],
    end_char: Int64[np.ndarray, " M"],
    numbers: TermNumbers,
) -> Iterator[np.ndarray]:
    """Yield the postings of stretches of the corpus, by chunk and term."""
    document = 0
    terms, sizes = list[int](), list[int]()
    for batch in texts:
        for text in batch:
            own = slice(int(chunk_offsets[document]), int(chunk_offsets[document + 1]))
            for start, end in zip(start_char[own].tolist(), end_char[own].tolist(), strict=True):
                words = words_of(text[start:end])
                terms += numbers.of(words)
                sizes.append(len(words))
            document += 1
            if len(terms) >= BLOCK_WORDS:
                yield _postings(terms, sizes, int(chunk_offsets[document]) - len(sizes))
                terms, sizes = [], []
    assert document == len(chunk_offsets) - 1, f"{document} texts of {len(chunk_offsets) - 1} documents"
    yield _postings(terms, sizes, int(chunk_offsets[document]) - len(sizes))


def _postings(terms: Sequence[int], sizes: Sequence[int], first_chunk: int) -> np.ndarray:
    term_W = np.array(terms, np.int64)
    chunk_W = np.repeat(np.arange(first_chunk, first_chunk + len(sizes)), np.array(sizes, np.int64))
    is_term_W = term_W != NO_TERM
    pairs, counts = np.unique(chunk_W[is_term_W] << 32 | term_W[is_term_W], return_counts=True)
    postings = np.empty(len(pairs), _POSTING)
    postings["term"], postings["chunk"] = pairs & 0xFFFF_FFFF, pairs >> 32
    postings["count"] = np.minimum(counts, MAX_COUNT)
    return postings


def _by_rank(
    spool: IO[bytes], spill: IO[bytes], rank_T: np.ndarray, ends_T: Int64[np.ndarray, " T"]
) -> Iterator[np.ndarray]:
    """Yield all postings by their term's rank, then by chunk, a block of whole terms at a time.

    The spool is read once: what belongs to a block is gathered in the block's own region of the spill file,
    whose place is known.
    """
    postings = np.frombuffer(mapped(spool), _POSTING)
    bounds = block_bounds(ends_T)
    begins = np.append(0, ends_T)[bounds]
    if len(bounds) > 2:
        _gather(postings, spill, rank_T, bounds, begins[:-1].copy())
        postings = np.frombuffer(mapped(spill), _POSTING)
    for begin, end in pairwise(begins.tolist()):
        block = postings[begin:end]
        yield block[np.argsort(rank_T[block["term"]], kind="stable")]


def block_bounds(ends_T: Int64[np.ndarray, " T"]) -> list[int]:
    """Return the ranks at which blocks of whole terms begin, and T.

    Each of :data:`BLOCK_POSTINGS` at most, or of one term.
    """
    bounds, done = [0], 0
    while bounds[-1] < len(ends_T):
        bounds.append(max(int(np.searchsorted(ends_T, done + BLOCK_POSTINGS, side="right")), bounds[-1] + 1))
        done = int(ends_T[bounds[-1] - 1])
    return bounds


def _gather(
    postings: np.ndarray,
    spill: IO[bytes],
    rank_T: np.ndarray,
    bounds: Sequence[int],
    cursors: Int64[np.ndarray, " B"],
) -> None:
    """Write each posting behind the last one of its block; ``cursors`` say where blocks begin, in postings.

    Keeps the order in a block.
    """
    for start in range(0, len(postings), BLOCK_POSTINGS):
        part = postings[start : start + BLOCK_POSTINGS]
        block_of = np.searchsorted(bounds, rank_T[part["term"]], side="right") - 1
        sizes = np.bincount(block_of, minlength=len(cursors))
        for block, run in enumerate(
            np.split(part[np.argsort(block_of, kind="stable")], np.cumsum(sizes)[:-1])
        ):
            if len(run):
                spill.seek(int(cursors[block]) * _POSTING.itemsize)
                spill.write(run.data)
        cursors += sizes
    spill.seek(0, SEEK_END)


def write_postings(
    terms: pa.Array,
    ends_T: Int64[np.ndarray, " T"],
    chunks: IO[bytes],
    counts: IO[bytes],
    path: Path,
) -> None:
    """Write the file from terms in order, where the postings of each end, and all postings in two files."""
    offsets = pa.array(np.append(0, ends_T))
    num_postings = int(ends_T[-1]) if len(ends_T) else 0
    columns = [terms]
    for field, stream in zip(
        (PASSAGE_TERMS_SCHEMA.field("chunks"), PASSAGE_TERMS_SCHEMA.field("counts")),
        (chunks, counts),
        strict=True,
    ):
        values = pa.Array.from_buffers(field.type.value_type, num_postings, [None, mapped(stream)])
        columns.append(pa.LargeListArray.from_arrays(offsets, values, type=field.type))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, PASSAGE_TERMS_SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=PASSAGE_TERMS_SCHEMA))
