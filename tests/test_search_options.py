import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from cairn.pipeline.collection import Collection
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search_options import SearchKeywords, SearchOptions


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    return Collection(CollectionLayout(tmp_path, "c"))


def test_unknown_keyword_of_a_search_is_refused_with_what_was_meant(collection: Collection) -> None:
    options: Any = {"topk": 3}
    with pytest.raises(ConfigError, match=r"^a search has no option 'topk'; did you mean 'top_k'\?$"):
        collection.search("stone", **options)
    rerank: Any = True
    with pytest.raises(ConfigError, match=r"rerank must be the name or folder .*, got True"):
        collection.search("stone", rerank=rerank)


def test_search_keywords_are_the_fields_of_the_options() -> None:
    assert set(get_type_hints(SearchKeywords)) == {field.name for field in dataclasses.fields(SearchOptions)}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": 201}, "top_k"),
        ({"top_k": 1.0}, "top_k"),
        ({"passages": -1}, "passages"),
        ({"passages": 51}, "passages"),
        ({"granularity": "word"}, "document, chunk, both"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"max_candidates": 5}, "max_candidates"),
        ({"max_candidates": 1_001}, "max_candidates"),
        ({"max_characters": 0}, "max_characters"),
        ({"max_characters": 1_000_001}, "max_characters"),
        ({"max_characters": 2_000, "passages": 0}, "passages = 0"),
        ({"weights": {"title": 1.0}}, "document, chunk, bm25"),
        ({"weights": {"chunk": float("nan")}}, "chunk"),
        ({"weights": {"chunk": -1.0}}, "chunk"),
        ({"weights": [1, 2]}, "mapping"),
        ({"weights": {"document": 0, "chunk": 0, "bm25": 0}}, "weights"),
        ({"weights": {"document": 0, "chunk": 0}}, "document and chunk"),
    ],
)
def test_search_options_out_of_bounds_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        SearchOptions(**options)


def test_search_options_weights_override_only_what_they_name() -> None:
    options = SearchOptions(weights={"bm25": 2})
    assert [options.weight(part) for part in ("document", "chunk", "bm25")] == [0.25, 0.75, 2.0]
    assert [SearchOptions(top_k=top_k).num_candidates for top_k in (1, 50, 200)] == [50, 100, 400]
