"""The words of texts, and the file that counts them by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.durable import storage_errors
from cairn.pipeline.errors import DamageError
from cairn.pipeline.index.segments import words as words_module
from cairn.pipeline.index.segments.segment import open_positions
from cairn.pipeline.index.segments.words import (
    PASSAGE_TERMS_SCHEMA,
    STORED_LANGUAGES,
    write_passage_terms,
    write_sparse_terms,
)
from cairn.pipeline.types import SPARSE_WEIGHT

from tests.lexical.terms import terms_of
from tests.nightly.forks import forked

DISK_BYTES = 1 << 20

WORDS = ("stone", "path", "way", "mark", "rivers", "the", "old", "walking", "GitHub", "E1042")


def make_texts(count: int, seed: int = 0) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """Return texts of one to five chunks cut between words: texts, chunk offsets, starts and ends."""
    rng = np.random.default_rng(seed)
    texts, offsets, starts, ends = [], [0], [], []
    for _ in range(count):
        chunks = [" ".join(rng.choice(WORDS, rng.integers(1, 9))) + " " for _ in range(rng.integers(1, 6))]
        bounds = np.cumsum([0, *map(len, chunks)]).tolist()
        texts.append("".join(chunks))
        starts += bounds[:-1]
        ends += bounds[1:]
        offsets.append(len(starts))
    return texts, np.array(offsets), np.array(starts), np.array(ends)


def naive_counts(texts, offsets, starts, ends) -> dict[str, dict[int, int]]:
    counts: dict[str, dict[int, int]] = {}
    for document, text in enumerate(texts):
        for chunk in range(offsets[document], offsets[document + 1]):
            for term in terms_of(text[starts[chunk] : ends[chunk]]):
                own = counts.setdefault(term, {})
                own[chunk] = own.get(chunk, 0) + 1
    return counts


def as_counts(batch: pa.RecordBatch) -> dict[str, dict[int, int]]:
    return {row["term"]: dict(zip(row["chunks"], row["counts"], strict=True)) for row in batch.to_pylist()}


@pytest.mark.parametrize("batch", [1, 7, 100])
@pytest.mark.parametrize(("words", "postings"), [(1, 1), (20, 10), (1 << 20, 1 << 23)])
def test_counts_equal_a_naive_count_whatever_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, words: int, postings: int
) -> None:
    monkeypatch.setattr(words_module, "BLOCK_WORDS", words)
    monkeypatch.setattr(words_module, "BLOCK_POSTINGS", postings)
    texts, offsets, starts, ends = make_texts(30)
    batches = [texts[start : start + batch] for start in range(0, len(texts), batch)]
    written = write_passage_terms(batches, offsets, starts, ends, tmp_path / "passages.arrow").terms
    assert as_counts(written) == naive_counts(texts, offsets, starts, ends)
    assert written.column("term").to_pylist() == sorted(written.column("term").to_pylist())
    assert all(row["chunks"] == sorted(row["chunks"]) for row in written.to_pylist())
    assert [path.name for path in tmp_path.iterdir()] == ["passages.arrow"], "no other file is left behind"


def test_a_word_said_too_often_counts_as_often_as_a_byte_holds(tmp_path: Path) -> None:
    text, path = "stone " * 300, tmp_path / "passages.arrow"
    places = (np.array([0, 1]), np.array([0]), np.array([len(text)]))
    assert as_counts(write_passage_terms([[text]], *places, path).terms) == {"stone": {0: 255}}
    path.write_bytes(b"no Arrow file")
    with pytest.raises(DamageError, match=r"passages\.arrow cannot be read"):
        open_positions(path, PASSAGE_TERMS_SCHEMA)


@pytest.mark.parametrize("texts", [[], ["...", "the"]])
def test_a_collection_without_words_is_written_and_opened(tmp_path: Path, texts: list[str]) -> None:
    offsets = np.arange(len(texts) + 1)
    ends = np.array([len(text) for text in texts], np.int64)
    write_passage_terms([texts], offsets, np.zeros(len(texts), np.int64), ends, tmp_path / "passages.arrow")
    assert open_positions(tmp_path / "passages.arrow", PASSAGE_TERMS_SCHEMA).num_rows == 0


TEXTS = ("The rivers were walking to the sea", "Die Flüsse wanderten nicht zu den Meeren", "河流走向大海")


def languages_of(texts: Sequence[str], path: Path, language: Any) -> tuple[list[str], list[str]]:
    """Return the terms of texts, and the language each was read in."""
    ends = np.array([len(text) for text in texts])
    offsets = np.arange(len(texts) + 1)
    written = write_passage_terms([texts], offsets, np.zeros_like(ends), ends, path, language)
    return written.terms.column("term").to_pylist(), [STORED_LANGUAGES[own] for own in written.languages_N]


@pytest.mark.parametrize(
    ("texts", "language", "languages", "expected"),
    [
        (TEXTS, "auto", ["en", "de", "zh"], {"river", "walk", "fluss", "wandert", "meer", "河流"}),
        (TEXTS, "none", ["none"] * 3, {"rivers", "the"}),
        (TEXTS, "en", ["en"] * 3, {"river", "die"}),
        (["Flüsse"], np.array([STORED_LANGUAGES.index("de")], np.uint8), ["de"], {"fluss"}),  # titles
    ],
    ids=["its own", "none", "en", "given"],
)
def test_each_text_is_read_in_its_own_language_or_in_the_one_given(
    tmp_path: Path, texts: Sequence[str], language: Any, languages: list[str], expected: set[str]
) -> None:
    terms, found = languages_of(texts, tmp_path / "passages.arrow", language)
    assert found == languages
    assert expected <= set(terms)


def write_many_postings(folder: Path) -> None:
    """Write a file of 100,000 postings, which wait in 900 kB and take 500 kB more, twice."""
    weights = np.ones(1_000, SPARSE_WEIGHT)
    weights["token"] = np.arange(1_000)
    column = pa.array([weights.tobytes()] * 100, pa.large_binary())
    with storage_errors("writing words"):
        write_sparse_terms([pa.record_batch([column], names=["weights"])], folder / "sparse.arrow")


def test_disk_that_fills_up_while_postings_are_sorted_is_told_and_left_empty(disk: Path) -> None:
    outcome = forked(write_many_postings, disk)
    assert (outcome.signal, outcome.exit_code) == (None, 75)
    assert outcome.refusal is not None
    assert "no space left while writing words" in outcome.refusal
    assert list(disk.iterdir()) == []
