"""The whole ranking against a brute-force re-implementation, and what a caller may rely on."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.errors import ConfigError, FilterError, FingerprintMismatchError, UsageError
from cairn.pipeline.faiss_library import faiss
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.lexical.languages import language_of
from cairn.pipeline.lexical.tokenizer import terms_of_query
from cairn.pipeline.search.reader import LocalReader, words_asked
from cairn.pipeline.search.searcher import Searcher, check_queries, unit_vectors
from cairn.pipeline.search_options import Granularity, SearchOptions
from cairn.pipeline.types import Hit, SearchResult

from tests.lexical.terms import terms_of
from tests.search.conftest import METADATA, StoneEncoder, Stones, publish_given

QUERIES = ["granite slate", "stone17 chalk flint", "é quartz", "zebra unknown"]
FILTER = {
    "type": "and",
    "filters": [
        {"type": "gte", "key": "year", "value": 1992},
        {"type": "eq", "key": "Odd name", "value": "o1"},
    ],
}
EVERYTHING = 1_000


def passes(row: dict[str, Any]) -> bool:
    return row["year"] is not None and row["year"] >= 1992 and row["Odd name"] == "o1"


def best_passage_bm25(searcher: Searcher, text: str) -> dict[str, float]:
    """Return the best BM25 of two neighbouring landmarks in each document."""
    generation = searcher.generation
    assert generation.passage_bm25 is not None
    scores = generation.passage_bm25.scores(words_asked(text, generation.query_languages), 2)
    bounds = zip(generation.chunk_offsets[:-1], generation.chunk_offsets[1:], strict=True)
    return {
        doc_id: float(scores[a:b].max())
        for doc_id, (a, b) in zip(generation.doc_ids.to_pylist(), bounds, strict=True)
    }


def document_bm25(stones: Stones, searcher: Searcher, text: str) -> dict[str, float]:
    """Return the BM25 of title and text of every document, by its definition; chunks may cut words."""
    bm25 = dict.fromkeys((row["doc_id"] for row in stones.rows), 0.0)
    languages = {row["doc_id"]: language_of(row["text"]) for row in stones.rows}
    titles = {row["doc_id"]: terms_of(row["title"] or "", languages[row["doc_id"]]) for row in stones.rows}
    texts = {
        row["doc_id"]: [
            term
            for start, end in spans
            for term in terms_of(row["text"][start:end], languages[row["doc_id"]])
        ]
        for row, spans in zip(stones.rows, stones.spans, strict=True)
    }
    for terms in (titles, texts):
        average = float(np.mean([len(own) for own in terms.values()]))
        for variants in terms_of_query(text, searcher.generation.query_languages):
            holders = sum(term in own for own in terms.values() for term in variants)
            idf = math.log(1 + (len(terms) - holders + 0.5) / (holders + 0.5))
            for doc_id, own in terms.items():
                for count in map(own.count, variants):
                    bm25[doc_id] += idf * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(own) / average))
    return bm25


def naive_ranking(
    stones: Stones,
    searcher: Searcher,
    text: str,
    vector: np.ndarray,
    granularity: Granularity,
    *,
    hybrid: bool,
    filtered: bool,
    weights: dict[str, float],
) -> list[tuple[str, float]]:
    """Rank every document by its definition; only the passages' BM25 is the index's."""
    weigh = {"document": 0.25, "chunk": 0.75, **weights}
    of_dense = weigh["document"] + weigh["chunk"]
    bm25 = document_bm25(stones, searcher, text)
    pairs = best_passage_bm25(searcher, text)
    scored = []
    for row, document, chunks in zip(stones.rows, stones.document_vectors, stones.chunk_vectors, strict=True):
        if filtered and not passes(row):
            continue
        best_chunk = float((chunks @ vector).max())
        dense = {
            "document": float(document @ vector),
            "chunk": best_chunk,
            "both": (weigh["document"] * float(document @ vector) + weigh["chunk"] * best_chunk)
            / (of_dense or 1.0),
        }
        scored.append(
            (row["doc_id"], dense[granularity], (bm25.get(row["doc_id"], 0.0), pairs[row["doc_id"]]))
        )
    top, top_pair = (max(b[part] for _, _, b in scored) for part in (0, 1))
    if hybrid and top > 0:
        low, high = (
            float(np.concatenate(stones.chunk_vectors).mean(axis=0) @ vector),
            max(d for _, d, _ in scored),
        )
        scored = [
            (
                i,
                (of_dense * (d - low) / (high - low) + (b[0] / top + b[1] / top_pair) / 2) / (of_dense + 1),
                b,
            )
            for i, d, b in scored
        ]
    return sorted([(i, d) for i, d, _ in scored], key=lambda pair: (-pair[1], pair[0]))


@pytest.mark.parametrize(
    ("granularity", "hybrid", "filtered", "weights"),
    [
        *((*each, {}) for each in product(("document", "chunk", "both"), (False, True), (False, True))),
        ("both", False, False, {"document": 3, "chunk": 1}),
        ("document", True, False, {"document": 0, "chunk": 0}),
    ],
)
def test_search_equals_the_brute_force_ranking(
    stones: Stones,
    searcher: Searcher,
    encoder: StoneEncoder,
    granularity: Granularity,
    hybrid: bool,
    filtered: bool,
    weights: dict[str, float],
) -> None:
    options = {"granularity": granularity, "hybrid": hybrid, "filters": FILTER if filtered else None}
    for query in QUERIES:
        vector = encoder.encode_queries([query])[0]
        expected = naive_ranking(
            stones, searcher, query, vector, granularity, hybrid=hybrid, filtered=filtered, weights=weights
        )[:10]
        result = searcher.search(query, **options, weights=weights, max_candidates=EVERYTHING)
        assert [hit.doc_id for hit in result.hits] == [doc_id for doc_id, _ in expected]
        shown = [min(max(score, 0.0), 1.0) for _, score in expected]
        assert [hit.score for hit in result.hits] == pytest.approx(shown, abs=1e-5)


def flat(result: SearchResult) -> list[tuple[Any, ...]]:
    return [
        (hit.doc_id, tuple(hit.scores), tuple((p.start_char, p.end_char, p.text) for p in hit.passages))
        for hit in result.hits
    ]


@pytest.mark.parametrize("granularity", ["document", "chunk", "both"])
def test_batch_is_encoded_in_one_pass_and_equals_single_searches(
    searcher: Searcher, encoder: StoneEncoder, granularity: Granularity
) -> None:
    batch = searcher.answer(QUERIES, SearchOptions(granularity=granularity))
    assert encoder.calls == [QUERIES]
    singles = [searcher.search(query, granularity=granularity) for query in QUERIES]
    assert [flat(result) for result in batch] == [flat(result) for result in singles]
    assert [hit.score for result in batch for hit in result.hits] == pytest.approx(
        [h.score for r in singles for h in r.hits], abs=1e-6
    )


@pytest.mark.parametrize("options", [{}, {"group_by": "doc_id"}])
def test_documents_with_equal_scores_are_ordered_by_id(
    alike: Callable[..., CollectionLayout], encoder: StoneEncoder, options: dict[str, Any]
) -> None:
    ids = [f"doc-{place * 7 % 12:02d}" for place in range(12)]
    layout = alike(ids)
    found = Searcher(layout, encoder).search(QUERIES[0], top_k=12, **options).hits

    assert {hit.score for hit in found} == {found[0].score}
    assert [hit.doc_id for hit in found] == sorted(ids)
    shown = Searcher(layout, encoder).search(QUERIES[0], top_k=12, max_characters=4_000, **options).hits
    assert [hit.doc_id for hit in shown] == sorted(ids)[:1], "a budget shows one of copies"
    assert len(shown[0].passages) > 0


def test_threads_of_faiss_share_the_queries_of_a_batch_and_never_a_single_one(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    nominate, asked_with = LocalReader.nominate, list[tuple[int, int]]()

    def watched(self: LocalReader, vectors: np.ndarray, asked: Any) -> Any:
        asked_with.append((len(vectors), faiss.omp_get_max_threads()))
        return nominate(self, vectors, asked)

    monkeypatch.setattr(LocalReader, "nominate", watched)
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(2)
    try:
        options = SearchOptions(group_by="is_open", granularity="document", hybrid=False, max_candidates=10)
        searcher.answer(QUERIES, options)
        assert faiss.omp_get_max_threads() == 2
    finally:
        faiss.omp_set_num_threads(before)
    assert asked_with[0] == (len(QUERIES), 2)
    assert set(asked_with[1:]) == {(1, 1)}


def test_vectors_with_texts_equals_search(searcher: Searcher, encoder: StoneEncoder) -> None:
    vectors = encoder.encode_queries(QUERIES) * 3
    found = searcher.answer(QUERIES, SearchOptions(), encoded=vectors)
    assert [flat(result) for result in found] == [flat(searcher.search(query)) for query in QUERIES]
    (without, *_) = searcher.answer(None, SearchOptions(), encoded=vectors)
    assert without.query == ""
    assert flat(without) == flat(searcher.search(QUERIES[0], hybrid=False)), "without texts it is dense"


def test_a_budget_stays_within_the_filter(stones: Stones, searcher: Searcher) -> None:
    found = searcher.search(QUERIES[0], max_characters=100_000, filters=FILTER, top_k=200)
    assert {hit.doc_id for hit in found.hits} == {row["doc_id"] for row in stones.rows if passes(row)}


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"granularity": "document", "hybrid": False}, {"document"}),
        ({"granularity": "chunk", "hybrid": False}, {"chunk"}),
        ({"granularity": "both", "hybrid": False}, {"document", "chunk"}),
        ({"granularity": "both", "weights": {"bm25": 0}}, {"document", "chunk"}),
    ],
)
def test_scores_hold_the_parts_that_were_asked_for(
    searcher: Searcher, options: dict[str, Any], parts: set[str]
) -> None:
    assert {part for hit in searcher.search(QUERIES[0], **options).hits for part in hit.scores} == parts
    hits = searcher.search("17", top_k=50).hits  # a part of stone17
    for part in ("bm25", "passage_bm25"):
        assert [hit.doc_id for hit in hits if part in hit.scores] == ["doc-0-017"]


def test_hybrid_of_words_nobody_wrote_is_the_dense_answer(searcher: Searcher) -> None:
    assert searcher.search("zebra unknown") == searcher.search("zebra unknown", hybrid=False)


def test_top_k_beyond_the_collection_returns_all_documents_once(stones: Stones, searcher: Searcher) -> None:
    for granularity in ("document", "chunk", "both"):
        found = [hit.doc_id for hit in searcher.search("slate", granularity=granularity, top_k=200).hits]
        assert sorted(found) == [row["doc_id"] for row in stones.rows]


def test_metadata_has_the_other_columns_as_python_values(stones: Stones, searcher: Searcher) -> None:
    tree = {"type": "eq", "key": "doc_id", "value": "doc-0-033"}
    hit = searcher.search("slate", filters=tree).hits[0]
    row = stones.rows[33]
    assert set(hit.metadata) == {field.name for field in METADATA}
    assert hit.metadata["day"] == row["day"]
    assert hit.metadata["seen_at"] == row["seen_at"]
    assert hit.metadata["made_at"] == row["made_at"]
    assert type(hit.metadata["made_at"]) is dt.datetime
    assert hit.metadata["tags"] == row["tags"]
    result = searcher.search(QUERIES[1])
    found = result.to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    day = next(hit.metadata["day"] for hit in result.hits if hit.metadata["day"] is not None)
    assert day.isoformat() in [hit["metadata"]["day"] for hit in found["hits"]]


def test_another_encoder_or_one_that_returns_nan_is_refused(
    stones: Stones, encoder: StoneEncoder, make_encoder: type[StoneEncoder]
) -> None:
    with pytest.raises(FingerprintMismatchError, match="query encoder"):
        Searcher(stones.layout, make_encoder("f" * 64))
    encoder.encode_queries = lambda texts: np.full((len(texts), 16), np.nan, np.float32)
    with pytest.raises(UsageError, match="finite"):
        Searcher(stones.layout, encoder).search("slate")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda s: s.search("  "), UsageError),
        (lambda s: s.search("x", top_k=0), ConfigError),
        (lambda s: s.search("x", chunk_tokens=100), ConfigError),
        (lambda s: s.search("x", filters={"type": "eq", "key": "vector", "value": 1}), FilterError),
        (lambda s: s.answer([], SearchOptions()), UsageError),
        (lambda s: s.answer(None, SearchOptions(), encoded=np.ones((1, 3))), UsageError),
        (lambda s: s.answer(["one"], SearchOptions(), encoded=np.ones((2, 16))), UsageError),
    ],
)
def test_bad_call_is_refused_before_encoding(
    searcher: Searcher, encoder: StoneEncoder, call: Callable[[Searcher], object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        call(searcher)
    assert encoder.calls == []


@pytest.mark.parametrize("granularity", ["document", "chunk", "both"])
@pytest.mark.parametrize("hybrid", [True, False])
def test_scores_are_shown_from_0_to_1_though_windows_come_nearer_than_their_best_landmark(
    searcher: Searcher, granularity: Granularity, hybrid: bool
) -> None:
    results = searcher.answer(
        QUERIES, SearchOptions(granularity=granularity, hybrid=hybrid, top_k=60, chunk_tokens=256)
    )
    scores = [score for result in results for hit in result.hits for score in _all_scores(hit)]
    assert min(scores) >= 0.0
    assert max(scores) <= 1.0
    lowest = [hit for result in results for hit in result.hits if hit.score == 0.0]
    assert len(lowest) > 1
    assert [hit.score for hit in results[0].hits] == sorted(
        (hit.score for hit in results[0].hits), reverse=True
    )


def _all_scores(hit: Hit) -> list[float]:
    return [hit.score, *(passage.score for passage in hit.passages)]


@pytest.mark.parametrize("options", [{}, {"hybrid": False}, {"max_characters": 400}, {"mmr": 0.5}])
@pytest.mark.parametrize("doc_id", ["doc-0-007", " doc-0-041 "])
def test_query_that_is_an_id_finds_its_document_first(
    searcher: Searcher, doc_id: str, options: dict[str, Any]
) -> None:
    hits = searcher.search(doc_id, **options).hits
    assert (hits[0].doc_id, hits[0].score) == (doc_id.strip(), 1.0)
    others = {"type": "ne", "key": "doc_id", "value": doc_id.strip()}
    left = searcher.search(doc_id, filters=others, **options).hits
    assert doc_id.strip() not in {hit.doc_id for hit in left}


@pytest.mark.parametrize("filters", [None, {"type": "gte", "key": "year", "value": 1992}])
def test_hidden_statistics_are_those_of_a_collection_of_the_allowed_documents(
    stones: Stones,
    searcher: Searcher,
    encoder: StoneEncoder,
    layout: CollectionLayout,
    filters: dict[str, Any] | None,
) -> None:
    restriction = {"type": "eq", "key": "Odd name", "value": "o1"}
    own = [place for place, row in enumerate(stones.rows) if row["Odd name"] == "o1"]
    publish_given(
        replace(
            stones,
            layout=layout,
            rows=[stones.rows[place] for place in own],
            document_vectors=stones.document_vectors[own],
            chunk_vectors=[stones.chunk_vectors[place] for place in own],
            spans=[stones.spans[place] for place in own],
        )
    )
    alone = Searcher(layout, encoder)
    for query in QUERIES:
        hidden = searcher.search(query, restriction=restriction, hide_word_statistics=True, filters=filters)
        assert hidden.hits == alone.search(query, filters=filters).hits
    nobody = {"type": "eq", "key": "Odd name", "value": "nobody"}
    found = searcher.search("granite", restriction=nobody, hide_word_statistics=True, min_probability=0.5)
    assert found.hits == ()
    assert searcher.search("granite", filters=nobody).hits == ()


def test_vectors_that_are_none_are_refused_and_huge_ones_do_not_overflow() -> None:
    assert unit_vectors(np.array([[3e38, 0.0]], np.float32), 2).tolist() == [[1.0, 0.0]]
    bad: list[Any] = [np.zeros((1, 2)), np.ones((1, 3)), np.ones(2), np.ones((0, 2)), np.array([["a", "b"]])]
    for vectors in (*bad, *(np.array([[1.0, odd]], np.float32) for odd in (np.nan, np.inf, -np.inf))):
        with pytest.raises(UsageError):
            unit_vectors(vectors, 2)


def test_queries_of_more_than_8192_bytes_or_of_no_text_are_refused() -> None:
    check_queries(["é" * 4_096])
    bad: list[Any] = [[], "one text", ["q"] * 1_025]
    bad += [[query] for query in ("", "   \n\t ", "x" * 8_193, "é" * 4_097, "\ud800", 7, None)]
    for queries in bad:
        with pytest.raises(UsageError):
            check_queries(queries)
