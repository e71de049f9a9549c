"""What every framework gets: passages by their own score, with the place they were cut from."""

from __future__ import annotations

from pathlib import Path

import pytest
from cairn.pipeline.collection import Collection
from cairn.pipeline.errors import CollectionNotFoundError, ConfigError
from cairn.pipeline.frameworks.source import Searchable, find_passages, open_source
from cairn.pipeline.search.ranking import BY_VECTORS_ALONE

QUERY = "granite and slate"


def test_passages_are_cut_from_their_documents_best_first(stones: Searchable) -> None:
    found = find_passages(stones, QUERY, 5, {"passages": 2})
    assert len(found) == 5
    assert [passage.score for passage in found] == sorted((passage.score for passage in found), reverse=True)
    for passage in found:
        document = stones.read_document(passage.doc_id)
        assert document is not None
        assert document.text[passage.start_char : passage.end_char] == passage.text
        assert passage.metadata["year"] == document.metadata["year"]
        assert passage.metadata["collection"] == "stones"
        assert {"document", "chunk"} <= set(passage.metadata["scores"])
    assert len({passage.passage_id for passage in found}) == 5


def test_passages_carry_highlights_and_warnings(late_stones: Collection) -> None:
    found = find_passages(late_stones, "granite", 9, {})
    words = [
        passage.text[word["start_char"] - passage.start_char : word["end_char"] - passage.start_char]
        for passage in found
        for word in passage.metadata["highlights"]
    ]
    assert words
    assert all(word.isalpha() for word in words)
    for passage in found:
        for word in passage.metadata["title_highlights"]:
            assert passage.metadata["title"][word["start_char"] : word["end_char"]].isalnum()
    assert found[0].metadata["warnings"] == []
    assert find_passages(late_stones, "?!", 1, {})[0].metadata["warnings"] == [BY_VECTORS_ALONE]


def test_parameters_are_those_of_the_search(stones: Searchable) -> None:
    only = {"type": "eq", "key": "year", "value": 2003}
    assert {passage.metadata["year"] for passage in find_passages(stones, QUERY, 5, {"filters": only})} == {
        2003
    }
    within = find_passages(stones, QUERY, 10, {"max_characters": 150})
    assert 0 < sum(len(passage.text) for passage in within) <= 150


def test_passages_of_diverse_documents_keep_their_order(stones: Searchable) -> None:
    hits = stones.search(QUERY, top_k=4, passages=1, mmr=0.1).hits
    found = find_passages(stones, QUERY, 4, {"passages": 1, "mmr": 0.1})
    assert [passage.doc_id for passage in found] == [hit.doc_id for hit in hits]
    scores = [passage.score for passage in found]
    assert scores != sorted(scores, reverse=True)


def test_numbers_that_cannot_be_answered_are_refused(stones: Searchable) -> None:
    for number in (0, 201):
        with pytest.raises(ConfigError, match="from 1 to 200"):
            find_passages(stones, QUERY, number, {})
    with pytest.raises(ConfigError, match="top_k must be left out"):
        find_passages(stones, QUERY, 3, {"top_k": 5})


def test_source_is_here_or_behind_a_url(stones_root: Path, stones_address: str) -> None:
    here, there = open_source("stones", root=stones_root), open_source("stones", url=stones_address)
    assert here.read_document("stones/slate/2").text == there.read_document("stones/slate/2").text  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="got both"):
        open_source("stones", root=stones_root, url=stones_address)
    with pytest.raises(CollectionNotFoundError):
        open_source("pebbles", root=stones_root)
