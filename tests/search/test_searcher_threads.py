"""Words are read while the encoder works: what is begun, cancelled, failed and given back on threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cairn.pipeline.errors import ModelError, StorageError
from cairn.pipeline.search.prepared import PreparedSearch
from cairn.pipeline.search.searcher import Searcher, finish_search
from cairn.pipeline.search_options import Granularity, SearchOptions

if TYPE_CHECKING:
    from tests.search.conftest import StoneEncoder, Stones

QUERIES = ["granite slate", "stone17 chalk flint", "zebra unknown"]
FILTER = {"type": "gte", "key": "year", "value": 1992}


@pytest.mark.parametrize(
    "options", [{}, {"hybrid": False}, {"filters": FILTER}, {"chunk_tokens": 192}, {"max_characters": 500}]
)
@pytest.mark.parametrize("granularity", ["document", "chunk", "both"])
def test_search_begun_before_its_vectors_is_the_search(
    searcher: Searcher, encoder: StoneEncoder, granularity: Granularity, options: dict[str, Any]
) -> None:
    asked = SearchOptions(granularity=granularity, **options)
    vectors = Future[np.ndarray]()
    with ThreadPoolExecutor(1) as threads:
        begun = searcher.begin(QUERIES, asked, vectors, threads)
        vectors.set_result(encoder.encode_queries(QUERIES))
        found = finish_search(*begun.result())
    assert found == searcher.search_vectors(
        encoder.encode_queries(QUERIES), queries=QUERIES, granularity=granularity, **options
    )
    assert found == searcher.answer(QUERIES, asked)


def words_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("cairn-words")]


def test_words_are_read_while_the_encoder_works(
    searcher: Searcher, encoder: StoneEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    were_read = threading.Event()
    encode = encoder.encode_queries

    read_words = PreparedSearch.read

    def read(search: PreparedSearch) -> PreparedSearch:
        found = read_words(search)
        were_read.set()
        return found

    def wait(texts: Sequence[str]) -> np.ndarray:
        assert were_read.wait(600), "the encoder ended before the words were read"
        return encode(texts)

    expected = searcher.search(QUERIES[0])
    monkeypatch.setattr(PreparedSearch, "read", read)
    encoder.encode_queries = wait
    assert searcher.search(QUERIES[0]) == expected


@pytest.mark.parametrize("failing", [["encoder"], ["words"], ["encoder", "words"]])
def test_failure_of_either_half_is_raised_when_both_have_ended(
    searcher: Searcher, encoder: StoneEncoder, monkeypatch: pytest.MonkeyPatch, failing: list[str]
) -> None:
    ended: list[str] = []

    def end(half: str, result: Any) -> Any:
        ended.append(half)
        if half in failing:
            raise (ModelError if half == "encoder" else StorageError)("what failed")
        return result

    encode, read = encoder.encode_queries, PreparedSearch.read
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "encode_queries", lambda texts: end("encoder", encode(texts)))
        patch.setattr(PreparedSearch, "read", lambda search: end("words", read(search)))
        with pytest.raises(ModelError if "encoder" in failing else StorageError, match=r"^what failed$"):
            searcher.search(QUERIES[0])
    assert sorted(ended) == ["encoder", "words"]
    assert searcher.search(QUERIES[0]).hits


def test_threads_for_words_end_with_their_searcher(stones: Stones, encoder: StoneEncoder) -> None:
    before = set(words_threads())
    searcher = Searcher(stones.layout, encoder)
    searcher.search(QUERIES[0])
    own = set(words_threads()) - before
    assert len(own) == 1
    del searcher
    for thread in own:
        thread.join(600)
        assert not thread.is_alive()


def test_cancelled_search_cancels_its_vectors(searcher: Searcher) -> None:
    vectors = Future[np.ndarray]()
    with ThreadPoolExecutor(1) as threads:
        begun = searcher.begin(QUERIES, SearchOptions(), vectors, threads)
        assert begun.cancel()
    assert vectors.cancelled()
    with pytest.raises(CancelledError):
        begun.result()


def test_failing_words_cancel_the_vectors_that_wait(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: PreparedSearch) -> PreparedSearch:
        raise StorageError("what failed")

    monkeypatch.setattr(PreparedSearch, "read", fail)
    vectors = Future[np.ndarray]()
    with ThreadPoolExecutor(1) as threads:
        begun = searcher.begin(QUERIES, SearchOptions(), vectors, threads)
        with pytest.raises(StorageError, match=r"^what failed$"):
            begun.result()
    assert vectors.cancelled()
