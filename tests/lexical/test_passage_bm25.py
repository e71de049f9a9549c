import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.index.segments.segment import DeletedRows, JoinedWords
from cairn.pipeline.index.segments.words import write_passage_terms
from cairn.pipeline.lexical import bm25 as bm25_module
from cairn.pipeline.lexical.bm25 import KEPT_SIZES, MAX_STEPPED_SIZE, PassageBM25
from cairn.pipeline.lexical.tokenizer import Variants, terms_of_query

from tests.lexical.terms import terms_of

WORDS = ("stone", "path", "way", "mark", "rivers", "the", "old", "walking")
QUERIES = ("stone path", "old old river", "the mark of a stone", "zebra", "walks")


def words_of(query: str) -> Counter[Variants]:
    return Counter(terms_of_query(query, ["en"]))


class Corpus:
    """Texts of one to thirty chunks, and their BM25 by definition."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.chunks = [
            [" ".join(rng.choice(WORDS, rng.integers(1, 9))) + " " for _ in range(rng.integers(1, n))]
            for n in (2, 3, 6, 31, 5)
        ]
        self.offsets = np.cumsum([0, *map(len, self.chunks)])
        bounds = [np.cumsum([0, *map(len, own)]) for own in self.chunks]
        self.starts = np.concatenate([own[:-1] for own in bounds])
        self.ends = np.concatenate([own[1:] for own in bounds])

    def windows(self, size: int) -> dict[int, list[str]]:
        """Return the chunks of every window by its first chunk."""
        found = {}
        for own, offset in zip(self.chunks, self.offsets, strict=False):
            for start in range(max(len(own) - size, 0) + 1):
                found[int(offset) + start] = own[start : start + size]
        return found

    def naive(self, query: str, size: int) -> list[float]:
        every = [chunk for own in self.chunks for chunk in own]
        windows = self.windows(size)
        average = float(np.mean([len("".join(window)) for window in windows.values()]))
        scores = [0.0] * len(every)
        for first, window in windows.items():
            text = "".join(window)
            for term in terms_of(query):
                holders = sum(term in terms_of(chunk) for chunk in every)
                idf = math.log(1 + (len(every) - holders + 0.5) / (holders + 0.5))
                count = terms_of(text).count(term)
                scores[first] += idf * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(text) / average))
        return scores


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus()


@pytest.fixture(scope="module")
def bm25(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> PassageBM25:
    texts = ["".join(own) for own in corpus.chunks]
    terms = write_passage_terms(
        [texts],
        corpus.offsets,
        corpus.starts,
        corpus.ends,
        tmp_path_factory.mktemp("terms") / "passages.arrow",
    ).terms
    words = JoinedWords([(terms, DeletedRows(len(corpus.starts)))])
    return PassageBM25(words, corpus.offsets, corpus.starts, corpus.ends)


@pytest.mark.parametrize("size", [1, 2, 3, 4, MAX_STEPPED_SIZE, MAX_STEPPED_SIZE + 1, 20, 1_000])
@pytest.mark.parametrize("query", QUERIES)
def test_scores_equal_the_formula_for_every_window(
    corpus: Corpus, bm25: PassageBM25, query: str, size: int
) -> None:
    np.testing.assert_allclose(
        bm25.scores(words_of(query), size), corpus.naive(query, size), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1_000])
def test_scores_do_not_depend_on_how_windows_are_counted(
    bm25: PassageBM25, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(bm25_module, "MAX_STEPPED_SIZE", 1_000)
    found: list[list[np.ndarray]] = []
    for share in (0.0, 1e9):
        monkeypatch.setattr(bm25_module, "MAX_STEPPED_SHARE", share)
        found.append([bm25.scores(words_of(query), size) for query in QUERIES])
    np.testing.assert_array_equal(*found)
    assert found[0][0].max() > 0.0


def test_scores_do_not_depend_on_the_sizes_asked_for_before(bm25: PassageBM25) -> None:
    before = bm25.scores(words_of("stone path"), 2)
    for size in range(1, KEPT_SIZES + 4):
        bm25.scores(words_of("stone"), size)
    assert np.array_equal(bm25.scores(words_of("stone path"), 2), before)


def test_scores_of_an_empty_collection_are_empty(tmp_path: Path) -> None:
    none = np.empty(0, np.int64)
    terms = write_passage_terms([], np.zeros(1, np.int64), none, none, tmp_path / "passages.arrow").terms
    words = JoinedWords([(terms, DeletedRows(0))])
    assert len(PassageBM25(words, np.zeros(1, np.int64), none, none).scores(words_of("stone"), 2)) == 0
