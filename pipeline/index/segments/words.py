"""Words of chunks and titles as BM25 counts them: ``passages.arrow`` and ``titles.arrow``.

Texts are split by :mod:`cairn.pipeline.lexical.tokenizer`, each in its own language. A title is the one chunk
of its document, whose language it has.

    term ─▶ chunks that hold it (ascending), how often each does        one row a term, terms by code point

Postings are sorted in files: memory of its own grows with the vocabulary and :data:`BLOCK_POSTINGS`, not with
the corpus.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from cairn.pipeline.index.segments.segment import PASSAGE_TERMS_SCHEMA, open_positions
from cairn.pipeline.lexical.languages import AUTO, LANGUAGES, NO_LANGUAGE, language_of
from cairn.pipeline.lexical.tokenizer import pieces_of, runs_of, term_of
from cairn.pipeline.ragged import ranges
from cairn.pipeline.types import SPARSE_WEIGHT
from jaxtyping import Int64, UInt8

MAX_KEPT_RUN: Final = 64
"""Longer runs are not kept: hardly any comes back."""
STORED_LANGUAGES: Final = (*LANGUAGES, NO_LANGUAGE)
"""``lengths.arrow`` has the places of languages here."""
_PLACES: Final = {language: place for place, language in enumerate(STORED_LANGUAGES)}


class TermNumbers:
    """Terms numbered in the order in which they are met, and those of runs in each language."""

    def __init__(self) -> None:
        self.terms: list[str] = []
        self._numbers: dict[str, int] = {}
        self._of_language: dict[str, _RunNumbers] = {}

    def of(self, runs: Sequence[str], language: str) -> list[int]:
        """Return the numbers of the terms of a text."""
        known = self._of_language.get(language)
        if known is None:
            known = self._of_language[language] = _RunNumbers(self, language)
        return list(chain.from_iterable(map(known.__getitem__, runs)))

    def of_run(self, run: str, language: str) -> tuple[int, ...]:
        """Return the numbers of the terms of a run that was not met before."""
        terms = [term for piece in pieces_of(run) if (term := term_of(piece, language))]
        found: list[int] = []
        for term in terms:
            number = self._numbers.setdefault(term, len(self.terms))
            if number == len(self.terms):
                self.terms.append(term)
            found.append(number)
        return tuple(found)


class _RunNumbers(dict[str, tuple[int, ...]]):
    """Numbers of the terms of runs in texts of a language."""

    def __init__(self, numbers: TermNumbers, language: str) -> None:
        super().__init__()
        self._numbers, self._language = numbers, language

    def __missing__(self, run: str) -> tuple[int, ...]:
        found = self._numbers.of_run(run, self._language)
        if len(run) <= MAX_KEPT_RUN:
            self[run] = found
        return found


MAX_COUNT = 255
"""A word said more often in one chunk counts so often: BM25 is flat long before."""
BLOCK_WORDS = 1 << 20
"""Words counted at once: 50 MB."""
BLOCK_POSTINGS = 1 << 23
"""Postings sorted at once: 200 MB."""

_POSTING = np.dtype([("term", np.uint32), ("chunk", np.uint32), ("count", np.uint8)])


class CountedWords(NamedTuple):
    """A file, mapped, and the languages its N texts were read in, by their places among the stored ones."""

    terms: pa.RecordBatch
    languages_N: UInt8[np.ndarray, " N"]


def write_passage_terms(
    texts: Iterable[Sequence[str]],
    chunk_offsets: Int64[np.ndarray, " N_plus_1"],
    start_char: Int64[np.ndarray, " M"],
    end_char: Int64[np.ndarray, " M"],
    path: Path,
    language: str | UInt8[np.ndarray, " N"] = AUTO,
    lines: Iterable[str] | None = None,
) -> CountedWords:
    """Count the words of every chunk of N documents and write the file.

    ``texts`` come in batches, in the order of the documents; document n's chunks are ``chunk_offsets[n] :
    chunk_offsets[n + 1]``. ``language`` is that of all texts, of each, or :data:`AUTO`. ``lines`` describe
    the chunks, and are counted with them.
    """
    numbers = TermNumbers()
    if isinstance(language, str):
        fixed = 0 if language == AUTO else _PLACES[language]
        languages_N = np.full(len(chunk_offsets) - 1, fixed, np.uint8)
    else:
        languages_N = language
    is_told = isinstance(language, str) and language == AUTO
    counted = _count(texts, chunk_offsets, start_char, end_char, numbers, languages_N, lines, is_told=is_told)
    _write_sorted(counted, numbers.terms, path)
    return CountedWords(open_positions(path, PASSAGE_TERMS_SCHEMA), languages_N)


def write_sparse_terms(rows: Iterable[pa.RecordBatch], path: Path) -> None:
    """Write the file of a sparse encoder from a scan of its column: weights stand in the place of counts.

    Null is no weights.
    """
    tokens: dict[int, int] = {}
    terms: list[str] = []

    def postings() -> Iterator[np.ndarray]:
        first_chunk = 0
        for batch in rows:
            chunks = [each or b"" for each in batch.column(0).to_pylist()]
            sizes = [len(each) // SPARSE_WEIGHT.itemsize for each in chunks]
            stored = np.frombuffer(b"".join(chunks), SPARSE_WEIGHT)
            found, place_P = np.unique(stored["token"], return_inverse=True)
            for token in found.tolist():
                if tokens.setdefault(token, len(tokens)) == len(terms):
                    terms.append(sparse_term(token))
            block = np.empty(len(stored), _POSTING)
            block["term"] = np.array([tokens[token] for token in found.tolist()], np.uint32)[place_P]
            block["chunk"] = first_chunk + np.repeat(np.arange(len(batch)), sizes)
            block["count"] = stored["weight"]
            first_chunk += len(batch)
            yield block

    _write_sorted(postings(), terms, path)


def sparse_term(token: int) -> str:
    """Return the term that stands for a token of a sparse encoder's vocabulary."""
    return f"{token:07d}"


def _write_sorted(blocks: Iterable[np.ndarray], terms: Sequence[str], path: Path) -> None:
    """Write the file from postings by chunk, whose terms are numbers of ``terms``, which may still grow.

    Postings wait in a spool until all terms are known. Then the place of each in the file is known, too, and
    block after block is laid out there.
    """
    with ExitStack() as files:
        spool, *columns = (files.enter_context(unnamed_file(path)) for _ in range(3))
        num_chunks_T = np.zeros(0, np.int64)
        for postings in blocks:
            spool.write(postings.data)
            if len(terms) > len(num_chunks_T):  # doubled, so that all copying together stays linear
                num_chunks_T = np.pad(num_chunks_T, (0, 2 * len(terms) - len(num_chunks_T)))
            seen, times = np.unique(postings["term"], return_counts=True)
            num_chunks_T[seen] += times
        order = np.array(sorted(range(len(terms)), key=terms.__getitem__), np.int64)
        offsets_T = np.append(0, np.cumsum(num_chunks_T[order]))
        next_T = np.empty(len(order), np.int64)
        next_T[order] = offsets_T[:-1]
        postings = np.frombuffer(mapped(spool), _POSTING)
        chunks_P, counts_P = (
            _mapped_column(file, _POSTING[name], len(postings)) if len(postings) else postings[name]
            for file, name in zip(columns, ("chunk", "count"), strict=True)
        )
        for start in range(0, len(postings), BLOCK_POSTINGS):
            block = postings[start : start + BLOCK_POSTINGS]
            block = block[np.argsort(next_T[block["term"]], kind="stable")]
            seen, sizes = np.unique(next_T[block["term"]], return_counts=True)
            place_P = ranges(seen, sizes)
            chunks_P[place_P], counts_P[place_P] = block["chunk"], block["count"]
            firsts = block["term"][np.cumsum(sizes) - sizes]
            next_T[firsts] += sizes
        lists = [
            pa.LargeListArray.from_arrays(
                pa.array(offsets_T),
                pa.Array.from_buffers(field.type.value_type, len(column), [None, pa.py_buffer(column)]),
                type=field.type,
            )
            for field, column in zip(list(PASSAGE_TERMS_SCHEMA)[1:], (chunks_P, counts_P), strict=True)
        ]
        ordered_terms = pa.array([terms[number] for number in order.tolist()], pa.large_string())
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, PASSAGE_TERMS_SCHEMA) as writer:
            rows = pa.RecordBatch.from_arrays([ordered_terms, *lists], schema=PASSAGE_TERMS_SCHEMA)
            writer.write_batch(rows)


def unnamed_file(path: Path) -> IO[bytes]:
    """Open a file that is gone when it is closed, on the disk of ``path``."""
    return tempfile.TemporaryFile(dir=path.parent)


def mapped(stream: IO[bytes]) -> pa.Buffer:
    """View what was written to a file without reading it into memory."""
    stream.flush()
    size = stream.tell()
    return (
        pa.py_buffer(np.memmap(stream, dtype=np.uint8, mode="r", shape=(size,)))
        if size
        else pa.py_buffer(b"")
    )


def _mapped_column(file: IO[bytes], dtype: np.dtype[Any], num_rows: int) -> np.ndarray:
    """Map a file for writing; a full disk fails here, where a page without a place would end the process."""
    os.posix_fallocate(file.fileno(), 0, num_rows * dtype.itemsize)
    return np.memmap(file, dtype, "r+", shape=num_rows)


def count_languages(languages_N: UInt8[np.ndarray, " N"]) -> dict[str, int]:
    """Return how many documents are in each language, of those that some are in."""
    counts = np.bincount(languages_N, minlength=len(STORED_LANGUAGES)).tolist()
    return {each: count for each, count in zip(STORED_LANGUAGES, counts, strict=True) if count}


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
    languages_N: UInt8[np.ndarray, " N"],
    lines: Iterable[str] | None,
    *,
    is_told: bool,
) -> Iterator[np.ndarray]:
    """Yield the postings of stretches of the corpus, by chunk and term.

    Where they are to be told, the languages of texts are written down in ``languages_N``.
    """
    document = 0
    own_lines = None if lines is None else iter(lines)
    terms, sizes = list[int](), list[int]()
    for batch in texts:
        for text in batch:
            if is_told:
                languages_N[document] = _PLACES[language_of(text)]
            language = STORED_LANGUAGES[languages_N[document]]
            own = slice(int(chunk_offsets[document]), int(chunk_offsets[document + 1]))
            for start, end in zip(start_char[own].tolist(), end_char[own].tolist(), strict=True):
                chunk = text[start:end] if own_lines is None else f"{next(own_lines)}\n{text[start:end]}"
                found = numbers.of(runs_of(chunk), language)
                terms += found
                sizes.append(len(found))
            document += 1
            if len(terms) >= BLOCK_WORDS:
                yield _postings(terms, sizes, int(chunk_offsets[document]) - len(sizes))
                terms, sizes = [], []
    assert document == len(chunk_offsets) - 1, f"{document} texts of {len(chunk_offsets) - 1} documents"
    yield _postings(terms, sizes, int(chunk_offsets[document]) - len(sizes))


def _postings(terms: Sequence[int], sizes: Sequence[int], first_chunk: int) -> np.ndarray:
    chunk_W = np.repeat(np.arange(first_chunk, first_chunk + len(sizes)), np.array(sizes, np.int64))
    pairs, counts = np.unique(chunk_W << 32 | np.array(terms, np.int64), return_counts=True)
    postings = np.empty(len(pairs), _POSTING)
    postings["term"], postings["chunk"] = pairs & 0xFFFF_FFFF, pairs >> 32
    postings["count"] = np.minimum(counts, MAX_COUNT)
    return postings
