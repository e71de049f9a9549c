"""Reranking as pure reordering: what is asked for, in the model's order, whatever the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.search.rerank import RERANK_DOCUMENTS, reranked, widened
from cairn.pipeline.search_options import SearchOptions
from cairn.pipeline.types import Hit, Passage, SearchResult


class ByNumber:
    """Scores a text by the number it is."""

    def score(self, query: str, texts: Sequence[str]) -> np.ndarray:
        return np.array([float(text) for text in texts], dtype=np.float64)


class Fixed:
    def __init__(self, scores: Sequence[float]) -> None:
        self.scores = scores

    def score(self, query: str, texts: Sequence[str]) -> np.ndarray:
        return np.array(self.scores, dtype=np.float64)


def answer(*documents: Sequence[str], size: int = 10) -> SearchResult:
    """An answer whose passages are numbers, each ``size`` characters long, all with the same first score."""
    hits = [
        Hit(
            doc_id=f"d{place}",
            title=None,
            score=1.0,
            scores={"document": 0.5},
            metadata={},
            passages=[
                Passage(
                    start_char=size * index,
                    end_char=size * (index + 1),
                    text=text,
                    score=1.0,
                    scores={"chunk": 0.4},
                )
                for index, text in enumerate(texts)
            ],
        )
        for place, texts in enumerate(documents)
    ]
    return SearchResult(query="q", generation=4, hits=hits)


def test_every_option_is_kept_or_lifted_before_reranking() -> None:
    kept = {"granularity", "chunk_tokens", "hybrid", "late", "weights", "filters", "restriction"}
    kept |= {"group_by", "group_size", "min_probability", "hide_word_statistics", "partial"}
    lifted = {"top_k", "passages", "max_candidates", "max_characters"}
    refused = {"offset", "mmr"}
    assert {item.name for item in fields(SearchOptions)} == kept | lifted | refused, "does `widened` lift it?"


def shown(result: SearchResult) -> list[tuple[str, list[str]]]:
    return [(hit.doc_id, [passage.text for passage in hit.passages]) for hit in result.hits]


def test_documents_follow_their_best_passage() -> None:
    found = reranked(
        answer([".2", ".1"], [".3", ".9", ".4"], [".8"]), ByNumber(), SearchOptions(top_k=2, passages=2)
    )
    assert shown(found) == [("d1", [".9", ".4"]), ("d2", [".8"])]
    first = found.hits[0]
    assert (first.score, first.scores) == (0.9, {"document": 0.5, "rerank": 0.9})
    assert first.passages[1].scores == {"chunk": 0.4, "rerank": 0.4}
    assert found.generation == 4


def test_budget_takes_the_best_passages_of_all() -> None:
    found = reranked(
        answer([".2", ".7"], [".6", ".9"], [".8"]), ByNumber(), SearchOptions(top_k=2, max_characters=30)
    )
    assert shown(found) == [("d1", [".9", ".6"]), ("d2", [".8"])]
    assert shown(reranked(answer([".2"]), ByNumber(), SearchOptions(max_characters=9))) == []


@pytest.mark.parametrize(
    ("documents", "passages", "expected"),
    [
        ([[".5"], [".5"], [".5"]], 3, [("d0", [".5"]), ("d1", [".5"]), ("d2", [".5"])]),
        ([[".2"], [".3"]], 0, [("d1", []), ("d0", [])]),
        ([], 3, []),
    ],
    ids=["ties", "spans alone", "nothing"],
)
def test_ties_keep_their_order_and_no_passages_are_shown_where_none_are_asked_for(
    documents: list[list[str]], passages: int, expected: list[tuple[str, list[str]]]
) -> None:
    options = SearchOptions(passages=passages)
    assert shown(reranked(answer(*documents), ByNumber(), options)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"top_k": RERANK_DOCUMENTS, "passages": 3}),
        ({"top_k": 50, "passages": 0}, {"top_k": 50, "passages": 1}),
        (
            {"top_k": 5, "max_characters": 100, "max_candidates": 6},
            {"top_k": RERANK_DOCUMENTS, "max_characters": None, "max_candidates": 30},
        ),
    ],
)
def test_search_looks_wider_than_it_answers(options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert expected.items() <= asdict(widened(SearchOptions(**options))).items()


@pytest.mark.parametrize("wrong", [{"offset": 2, "max_candidates": 50}, {"mmr": 0.5}])
def test_options_that_a_reranker_would_undo_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="reranking must come without"):
        widened(SearchOptions(**wrong))


@pytest.mark.parametrize("scores", [[float("nan"), 0.1], [float("inf"), 0.1], [0.1], []])
def test_scores_that_are_no_scores_are_refused(scores: list[float]) -> None:
    with pytest.raises(ModelError, match="one finite score a passage"):
        reranked(answer([".2", ".3"]), Fixed(scores), SearchOptions())
