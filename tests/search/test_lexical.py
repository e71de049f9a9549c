from typing import Any

import numpy as np
import pytest
from cairn.pipeline.errors import StorageError
from cairn.pipeline.index.generation import Generation, open_generation
from cairn.pipeline.lexical import bm25 as bm25_module
from cairn.pipeline.search import candidates
from cairn.pipeline.search.candidates import (
    MAX_WORDS,
    best_documents,
    bm25_documents,
    bm25_passages,
    bounded_words,
    few_documents,
    words_asked,
)
from cairn.pipeline.search.filters import allowed_documents, compile_filter, table_errors


@pytest.fixture(scope="module")
def generation(stones: Any) -> Generation:
    return open_generation(stones.layout)


def words_of(generation: Generation, query: str) -> Any:
    return words_asked(query, generation.query_languages)


def found_ids(generation: Generation, query: str, where: Any = None, limit: int = 60) -> list[str]:
    allowed = None if where is None else allowed_documents(generation, where, None)
    few = few_documents(generation, allowed)
    bm25 = bm25_documents(generation, words_of(generation, query), few)
    positions, scores = best_documents(generation, bm25, allowed, limit)
    assert sorted(scores, reverse=True) == scores.tolist()
    return [generation.doc_ids[position].as_py() for position in positions]


@pytest.mark.parametrize("query", ["the of and", "???", "AND", "unknownword", "日本語", "\x00", "()", '"'])
def test_bm25_of_no_indexed_word_is_empty(generation: Generation, query: str) -> None:
    assert found_ids(generation, query) == []


@pytest.mark.parametrize(
    "query",
    [
        'stone17"',
        "stone17 AND (",
        "stone17 OR OR NOT",
        "+stone17 -",
        "stone17^9~",
        "text:stone17",
        "'stone17' --",
        "stone17*",
    ],
)
def test_bm25_operators_in_the_text_are_not_syntax(generation: Generation, query: str) -> None:
    assert found_ids(generation, query)[0] == "doc-0-017"


def test_bm25_filter_comes_before_the_limit(generation: Generation, stones: Any) -> None:
    tree = {"type": "eq", "key": "cluster_id", "value": 3}
    where = compile_filter(tree, generation.document_schema)
    expected = {row["doc_id"] for row in stones.rows if row["cluster_id"] == 3}
    found = found_ids(generation, "granite basalt slate marble", where, limit=10)
    assert len(found) == 10
    assert set(found) <= expected


def test_bounded_words_keep_order_and_at_most_three_repeats() -> None:
    assert bounded_words("a b A c a a b") == "a b A c a b"


def test_bounded_words_are_bounded() -> None:
    assert len(bounded_words(" ".join(f"w{i}" for i in range(1000))).split()) == MAX_WORDS


def test_table_errors_hide_the_text_of_the_error() -> None:
    with pytest.raises(StorageError, match="reading failed") as caught, table_errors("reading"):
        raise RuntimeError("lance error: /root/secret/path.lance:17")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("allowed", [[2, 3, 17, 40, 59], [17]])
@pytest.mark.parametrize("query", ["granite basalt stone17 title", "stone3 17", "unknownword"])
def test_bm25_of_few_allowed_documents_is_that_of_a_look_at_all(
    generation: Generation, monkeypatch: pytest.MonkeyPatch, query: str, allowed: Any
) -> None:
    allowed, firsts = np.array(allowed), generation.chunk_offsets[:-1]
    found: list[list[list[float]]] = []
    words = words_of(generation, query)
    for share, counts in ((1, 1 << 22), (1, 1), (1_000, 1)):  # those alone, a word at a time, then all
        monkeypatch.setattr(candidates, "FEW_SHARE", share)
        monkeypatch.setattr(bm25_module, "BLOCK_COUNTS", counts)
        few = few_documents(generation, allowed)
        assert (few is None) == (share > 1)
        documents = best_documents(generation, bm25_documents(generation, words, few), allowed, 4)
        passages = [bm25_passages(generation, words, size, allowed, few) for size in (1, 2, 50)]
        scores = [np.zeros(60) if each is None else each.of(firsts) for each in passages]
        found.append([each.tolist() for each in (*documents, *scores)])
    assert found[0] == found[1] == found[2]
