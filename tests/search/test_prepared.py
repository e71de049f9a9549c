"""What is read of a call before its vectors are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cairn.pipeline.search import reader as reading
from cairn.pipeline.search.prepared import PreparedSearch
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.search_options import SearchOptions

QUERY = "granite slate"
ONE_YEAR = {"type": "eq", "key": "year", "value": 1992}


def prepared(searcher: Searcher, queries: list[str] | None = [QUERY], **options: Any) -> PreparedSearch:  # noqa: B006 - never changed
    return searcher._prepare(searcher._served.take(), queries, SearchOptions(**options))


def test_words_are_read_as_they_rank_and_as_they_are_shown(searcher: Searcher) -> None:
    words = prepared(searcher, chunk_tokens=192).read().first_words
    assert words is not None
    bm25 = searcher.generation.passage_bm25
    assert np.array_equal(words.passages, bm25.scores(QUERY, 2))
    assert np.array_equal(words.windows, bm25.scores(QUERY, 3))
    assert np.array_equal(words.nominees[0], words.documents)
    best = searcher.generation.chunk_documents[np.argmax(words.passages)]
    assert words.nominees[1][0] == best


@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 192, "passages": 0}])
def test_words_are_scored_once_where_one_size_of_passages_is_enough(
    searcher: Searcher, options: dict[str, Any]
) -> None:
    words = prepared(searcher, **options).read().first_words
    assert words is not None
    assert words.windows is words.passages


@pytest.mark.parametrize("options", [{"hybrid": False}, {"weights": {"bm25": 0}}])
def test_no_word_is_read_where_bm25_has_no_say(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(reading, "bm25_documents", lambda *_: pytest.fail("asked"))
    assert prepared(searcher, **options).read().first_words is None
    assert prepared(searcher, None).read().first_words is None


def test_filter_is_read_once_and_holds_for_words(searcher: Searcher, stones: Any) -> None:
    ahead = prepared(searcher, filters=ONE_YEAR).read()
    expected = [position for position, row in enumerate(stones.rows) if row["year"] == 1992]
    assert ahead.allowed.tolist() == expected
    for nominees in ahead.first_words.nominees:
        assert set(nominees.tolist()) <= set(expected)


@pytest.mark.parametrize("hybrid", [False, True])
def test_filter_that_lets_nothing_through_leaves_no_word_to_read(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch, hybrid: bool
) -> None:
    monkeypatch.setattr(reading, "bm25_documents", lambda *_: pytest.fail("asked"))
    ahead = prepared(searcher, hybrid=hybrid, filters=ONE_YEAR | {"value": 1}).read()
    assert (ahead.allowed.tolist(), ahead.first_words) == ([], None)


def test_words_nobody_wrote_nominate_nothing(searcher: Searcher) -> None:
    words = prepared(searcher, ["zebra unknown"]).read().first_words
    assert words is not None
    assert (words.passages, words.windows, len(words.documents)) == (None, None, 0)


def test_search_has_checked_options(searcher: Searcher) -> None:
    assert prepared(searcher).options == SearchOptions()
