"""The whole ranking against a brute-force re-implementation, and what a caller may rely on."""

import datetime as dt
import json
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pipeline.errors import ConfigError, FilterError, FingerprintMismatchError, ModelError, StorageError, UsageError
from pipeline.index.maintenance import compact_collection
from pipeline.manifest import Manifest
from pipeline.search.plan import Plan, ReadAhead, read_ahead
from pipeline.search.searcher import Searcher
from pipeline.types import Hit, SearchResult

QUERIES = ["granite slate", "stone17 chalk flint", "é quartz", "zebra unknown"]
FILTER = {"type": "and", "filters": [{"type": "gte", "key": "year", "value": 1992}, {"type": "eq", "key": "Odd name", "value": "o1"}]}
EVERYTHING = 1_000


def passes(row: dict[str, Any]) -> bool:
    return row["year"] is not None and row["year"] >= 1992 and row["Odd name"] == "o1"


def naive_passages(stones, index: int, vector: np.ndarray, size: int, limit: int) -> list[tuple[int, int, float]]:
    """Take the best windows of a document one by one, each time among those that touch no taken one: (start, end, score)."""
    vectors, spans = stones.chunk_vectors[index], stones.spans[index]
    scored = []
    for start in range(max(len(vectors) - size, 0) + 1):
        total = vectors[start : start + size].sum(axis=0)
        end = min(start + size, len(vectors))
        scored.append((float(total @ vector / np.linalg.norm(total)), spans[start][0], spans[end - 1][1]))
    taken: list[tuple[int, int, float]] = []
    for score, start_char, end_char in sorted(scored, key=lambda item: (-item[0], item[1])):
        if len(taken) < limit and all(end_char <= other[0] or start_char >= other[1] for other in taken):
            taken.append((start_char, end_char, score))
    return taken


def best_passage_bm25(searcher: Searcher, text: str) -> dict[str, float]:
    """Return the best BM25 of two neighbouring landmarks in each document."""
    generation = searcher.generation
    scores = generation.passage_bm25.scores(text, 2)
    bounds = zip(generation.chunk_offsets[:-1], generation.chunk_offsets[1:], strict=True)
    return {doc_id: float(scores[a:b].max()) for doc_id, (a, b) in zip(generation.doc_ids.to_pylist(), bounds, strict=True)}


def naive_ranking(
    stones, searcher: Searcher, text: str, vector: np.ndarray, granularity: str, *, hybrid: bool, filtered: bool
) -> list[tuple[str, float]]:
    """Rank every document by its definition; only BM25's numbers are the index's."""
    bm25: dict[str, float] = {}
    for column in ("title", "text"):
        found = searcher.generation.document_table.search(text, query_type="fts", fts_columns=column).select(["doc_id", "_score"])
        for row in found.limit(1000).to_list():
            bm25[row["doc_id"]] = bm25.get(row["doc_id"], 0.0) + row["_score"]
    pairs = best_passage_bm25(searcher, text)
    scored = []
    for row, document, chunks in zip(stones.rows, stones.document_vectors, stones.chunk_vectors, strict=True):
        if filtered and not passes(row):
            continue
        best_chunk = float((chunks @ vector).max())
        dense = {"document": float(document @ vector), "chunk": best_chunk, "both": 0.25 * float(document @ vector) + 0.75 * best_chunk}
        scored.append((row["doc_id"], dense[granularity], (bm25.get(row["doc_id"], 0.0), pairs[row["doc_id"]])))
    top, top_pair = (max(b[part] for _, _, b in scored) for part in (0, 1))
    if hybrid and top > 0:
        low, high = float(np.concatenate(stones.chunk_vectors).mean(axis=0) @ vector), max(d for _, d, _ in scored)
        scored = [(i, ((d - low) / (high - low) + (b[0] / top + b[1] / top_pair) / 2) / 2, b) for i, d, b in scored]
    return sorted([(i, d) for i, d, _ in scored], key=lambda pair: (-pair[1], pair[0]))


@pytest.mark.parametrize("granularity", ["document", "chunk", "both"])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
def test_search_equals_the_brute_force_ranking(stones, searcher: Searcher, encoder, granularity, hybrid, filtered) -> None:
    filters = FILTER if filtered else None
    for query in QUERIES:
        vector = encoder.encode_queries([query])[0]
        expected = naive_ranking(stones, searcher, query, vector, granularity, hybrid=hybrid, filtered=filtered)[:10]
        result = searcher.search(query, granularity=granularity, hybrid=hybrid, filters=filters, max_candidates=EVERYTHING)
        assert [hit.doc_id for hit in result.hits] == [doc_id for doc_id, _ in expected]
        assert [hit.score for hit in result.hits] == pytest.approx([score for _, score in expected], abs=1e-5)


def flat(result: SearchResult) -> list[tuple[Any, ...]]:
    return [(hit.doc_id, tuple(hit.scores), tuple((p.start_char, p.end_char, p.text) for p in hit.passages)) for hit in result.hits]


@pytest.mark.parametrize("granularity", ["document", "chunk", "both"])
def test_search_batch_equals_single_searches(searcher: Searcher, granularity) -> None:
    batch = searcher.search_batch(QUERIES, granularity=granularity)
    singles = [searcher.search(query, granularity=granularity) for query in QUERIES]
    assert [flat(result) for result in batch] == [flat(result) for result in singles]
    assert [hit.score for result in batch for hit in result.hits] == pytest.approx([h.score for r in singles for h in r.hits], abs=1e-6)


def test_search_batch_encodes_in_one_pass(searcher: Searcher, encoder) -> None:
    searcher.search_batch(QUERIES)
    assert encoder.calls == [QUERIES]


def test_search_vectors_with_texts_equals_search(searcher: Searcher, encoder) -> None:
    vectors = encoder.encode_queries(QUERIES) * 3
    found = searcher.search_vectors(vectors, queries=QUERIES)
    assert [flat(result) for result in found] == [flat(searcher.search(query)) for query in QUERIES]


def test_search_vectors_without_texts_is_dense(searcher: Searcher, encoder) -> None:
    found = searcher.search_vectors(encoder.encode_queries(QUERIES[:1]))[0]
    assert found.query == ""
    assert flat(found) == flat(searcher.search(QUERIES[0], hybrid=False))


@pytest.mark.parametrize("options", [{}, {"hybrid": False}, {"filters": FILTER}, {"chunk_tokens": 192}, {"max_characters": 500}])
@pytest.mark.parametrize("granularity", ["document", "chunk", "both"])
def test_search_begun_before_its_vectors_is_the_search(searcher: Searcher, encoder, granularity, options) -> None:
    begun = searcher.begin(QUERIES, granularity=granularity, **options)
    found = begun.finish(encoder.encode_queries(QUERIES))
    assert found == searcher.search_vectors(encoder.encode_queries(QUERIES), queries=QUERIES, granularity=granularity, **options)
    assert found == searcher.search_batch(QUERIES, granularity=granularity, **options)


def words_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("cairn-words")]


def test_words_are_read_while_the_encoder_works(searcher: Searcher, encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    were_read = threading.Event()
    encode = encoder.encode_queries

    def read(plan: Plan) -> ReadAhead:
        ahead = read_ahead(plan)
        were_read.set()
        return ahead

    def wait(texts: list[str]) -> np.ndarray:
        assert were_read.wait(60), "the encoder ended before the words were read"
        return encode(texts)

    expected = searcher.search(QUERIES[0])
    monkeypatch.setattr("pipeline.search.searcher.read_ahead", read)
    encoder.encode_queries = wait
    assert searcher.search(QUERIES[0]) == expected


@pytest.mark.parametrize("failing", [["encoder"], ["words"], ["encoder", "words"]])
def test_failure_of_either_half_is_raised_when_both_have_ended(
    searcher: Searcher, encoder, monkeypatch: pytest.MonkeyPatch, failing
) -> None:
    ended: list[str] = []

    def end(half: str, result: Any) -> Any:
        ended.append(half)
        if half in failing:
            raise (ModelError if half == "encoder" else StorageError)("what failed")
        return result

    encode = encoder.encode_queries
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "encode_queries", lambda texts: end("encoder", encode(texts)))
        patch.setattr("pipeline.search.searcher.read_ahead", lambda plan: end("words", read_ahead(plan)))
        with pytest.raises(ModelError if "encoder" in failing else StorageError, match=r"^what failed$"):
            searcher.search(QUERIES[0])
    assert sorted(ended) == ["encoder", "words"]
    assert searcher.search(QUERIES[0]).hits


def test_threads_for_words_end_with_their_searcher(stones, encoder) -> None:
    before = set(words_threads())
    searcher = Searcher(stones.layout, encoder)
    searcher.search(QUERIES[0])
    own = set(words_threads()) - before
    assert len(own) == 1
    del searcher
    for thread in own:
        thread.join(60)
        assert not thread.is_alive()


def test_search_is_deterministic(searcher: Searcher) -> None:
    assert searcher.search(QUERIES[0]) == searcher.search(QUERIES[0])


def by_id(stones, hit: Hit) -> int:
    return [row["doc_id"] for row in stones.rows].index(hit.doc_id)


@pytest.mark.parametrize("granularity", ["document", "chunk", "both"])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_passages_are_the_best_windows_that_do_not_overlap(stones, searcher: Searcher, encoder, granularity, size) -> None:
    vector = encoder.encode_queries([QUERIES[0]])[0]
    for hit in searcher.search(QUERIES[0], granularity=granularity, passages=3, chunk_tokens=64 * size, hybrid=False).hits:
        expected = naive_passages(stones, by_id(stones, hit), vector, size, 3)
        assert [(p.start_char, p.end_char) for p in hit.passages] == [(start, end) for start, end, _ in expected]
        assert [p.scores["chunk"] for p in hit.passages] == pytest.approx([score for _, _, score in expected], abs=1e-6)


def test_passages_are_spans_of_the_text(stones, searcher: Searcher) -> None:
    for hit in searcher.search(QUERIES[0], passages=50).hits:
        text = stones.rows[by_id(stones, hit)]["text"]
        assert [p.text for p in hit.passages] == [text[p.start_char : p.end_char] for p in hit.passages]


def test_passages_of_single_landmarks_cover_the_document(stones, searcher: Searcher) -> None:
    for hit in searcher.search(QUERIES[0], chunk_tokens=64, passages=50).hits:
        assert sorted((p.start_char, p.end_char) for p in hit.passages) == stones.spans[by_id(stones, hit)]


def test_passages_by_default_have_128_tokens(searcher: Searcher) -> None:
    assert searcher.search(QUERIES[0]) == searcher.search(QUERIES[0], chunk_tokens=128)


def test_chunk_tokens_moves_no_document(searcher: Searcher) -> None:
    rankings = [searcher.search(QUERIES[0], chunk_tokens=chunk_tokens).hits for chunk_tokens in (64, 128, 640)]
    assert [[(hit.doc_id, hit.score) for hit in hits] for hits in rankings[1:]] == [[(h.doc_id, h.score) for h in rankings[0]]] * 2


def test_passages_zero_returns_none(searcher: Searcher) -> None:
    assert all(hit.passages == () for hit in searcher.search(QUERIES[0], passages=0).hits)


def test_first_passage_of_one_landmark_scores_what_the_chunk_part_says(searcher: Searcher) -> None:
    for hit in searcher.search(QUERIES[0], granularity="chunk", chunk_tokens=64, hybrid=False).hits:
        assert hit.passages[0].score == hit.passages[0].scores["chunk"] == hit.scores["chunk"]


def test_passages_score_half_by_themselves_and_half_by_their_document(searcher: Searcher) -> None:
    for hit in searcher.search(QUERIES[0], hybrid=False).hits:
        assert [p.score for p in hit.passages] == pytest.approx([(p.scores["chunk"] + hit.score) / 2 for p in hit.passages])


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_hybrid_passages_score_by_cosine_and_bm25_and_document(searcher: Searcher, size) -> None:
    generation = searcher.generation
    scores = generation.passage_bm25.scores(QUERIES[0], size)
    result = searcher.search(QUERIES[0], chunk_tokens=64 * size, max_candidates=EVERYTHING, top_k=200)
    best_dense = max(hit.scores["document"] / 4 + hit.scores["chunk"] * 3 / 4 for hit in result.hits)
    low = float(generation.mean_chunk_vector @ searcher._encoder.encode_queries([QUERIES[0]])[0])
    for hit in result.hits:
        position = generation.doc_ids.to_pylist().index(hit.doc_id)
        starts = generation.chunk_starts[generation.chunk_offsets[position] : generation.chunk_offsets[position + 1]].tolist()
        for passage in hit.passages:
            bm25 = float(scores[generation.chunk_offsets[position] + starts.index(passage.start_char)])
            own = ((passage.scores["chunk"] - low) / (best_dense - low) + bm25 / scores.max()) / 2
            assert passage.score == pytest.approx((own + hit.score) / 2, abs=1e-5)
            assert passage.scores.get("bm25", 0.0) == pytest.approx(bm25)


def test_bm25_moves_the_passages_of_a_document(searcher: Searcher) -> None:
    dense, hybrid = (searcher.search("granite slate", hybrid=hybrid, chunk_tokens=64, passages=1).hits for hybrid in (False, True))
    dense_of = {hit.doc_id: hit.passages[0].start_char for hit in dense}
    assert any(dense_of.get(hit.doc_id, hit.passages[0].start_char) != hit.passages[0].start_char for hit in hybrid)


def naive_reading(stones, result: SearchResult, vector: np.ndarray, max_characters: int) -> dict[str, set[int]]:
    """Read pairs of landmarks of the ranked documents, best first, until the next would pass the budget: characters by document."""
    scored = []
    for hit in result.hits:
        index = by_id(stones, hit)
        vectors, spans = stones.chunk_vectors[index], stones.spans[index]
        for start in range(max(len(vectors) - 2, 0) + 1):
            total = vectors[start : start + 2].sum(axis=0)
            end = min(start + 2, len(vectors))
            score = float(total @ vector / np.linalg.norm(total)) / 2 + hit.score / 2
            scored.append((score, hit.doc_id, set(range(spans[start][0], spans[end - 1][1]))))
    read: dict[str, set[int]] = {}
    for _, doc_id, characters in sorted(scored, key=lambda item: -item[0]):
        if sum(map(len, read.values())) + len(characters - read.get(doc_id, set())) > max_characters:
            break
        read.setdefault(doc_id, set()).update(characters)
    return read


@pytest.mark.parametrize("max_characters", [1, 60, 150, 1_000, 100_000])
def test_a_budget_is_filled_with_the_best_passages_of_all_documents(stones, searcher: Searcher, encoder, max_characters) -> None:
    every = searcher.search(QUERIES[0], hybrid=False, top_k=200)
    found = searcher.search(QUERIES[0], hybrid=False, top_k=200, max_characters=max_characters)
    expected = naive_reading(stones, every, encoder.encode_queries([QUERIES[0]])[0], max_characters)
    assert {hit.doc_id: {c for p in hit.passages for c in range(p.start_char, p.end_char)} for hit in found.hits} == expected
    assert [(hit.doc_id, hit.score) for hit in found.hits] == [(h.doc_id, h.score) for h in every.hits if h.doc_id in expected]


def test_passages_within_a_budget_never_touch(searcher: Searcher) -> None:
    for hit in searcher.search(QUERIES[0], max_characters=3_000).hits:
        spans = sorted((p.start_char, p.end_char) for p in hit.passages)
        assert all(end < start for (_, end), (start, _) in pairwise(spans))
        assert all(p.text for p in hit.passages)


def test_a_budget_is_spent_on_top_k_documents_at_most(searcher: Searcher) -> None:
    assert len(searcher.search(QUERIES[0], max_characters=100_000, top_k=3).hits) == 3


def test_a_budget_stays_within_the_filter(stones, searcher: Searcher) -> None:
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
def test_scores_hold_the_parts_that_were_asked_for(searcher: Searcher, options, parts) -> None:
    assert {part for hit in searcher.search(QUERIES[0], **options).hits for part in hit.scores} == parts


@pytest.mark.parametrize("part", ["bm25", "passage_bm25"])
def test_scores_hold_bm25_only_where_it_found_the_document(searcher: Searcher, part) -> None:
    hits = searcher.search("stone17", top_k=50).hits
    assert [hit.doc_id for hit in hits if part in hit.scores] == ["doc-0-017"]


def test_hybrid_of_words_nobody_wrote_is_the_dense_answer(searcher: Searcher) -> None:
    assert searcher.search("zebra unknown") == searcher.search("zebra unknown", hybrid=False)


def test_weights_move_the_ranking(stones, searcher: Searcher, encoder) -> None:
    vector = encoder.encode_queries([QUERIES[0]])[0]
    found = searcher.search(QUERIES[0], hybrid=False, weights={"document": 3, "chunk": 1}, max_candidates=EVERYTHING)
    naive = [0.75 * d @ vector + 0.25 * (c @ vector).max() for d, c in zip(stones.document_vectors, stones.chunk_vectors, strict=True)]
    assert [by_id(stones, hit) for hit in found.hits] == np.argsort(-np.array(naive), kind="stable")[:10].tolist()


def test_bm25_weight_alone_ranks_by_bm25(searcher: Searcher) -> None:
    hits = searcher.search(QUERIES[0], granularity="document", weights={"document": 0, "chunk": 0}).hits
    top, top_pair = (max(hit.scores[part] for hit in hits) for part in ("bm25", "passage_bm25"))
    assert [h.score for h in hits] == pytest.approx([(h.scores["bm25"] / top + h.scores["passage_bm25"] / top_pair) / 2 for h in hits])
    assert [h.score for h in hits] == sorted((h.score for h in hits), reverse=True)


def test_a_collection_without_bm25_of_passages_is_searched_with_that_of_documents(layout, publish, make_encoder) -> None:
    publish(layout)
    folder = layout.generation_folder(1)
    manifest = Manifest.read(folder)
    (folder / "passages.arrow").unlink()
    replace(manifest, files={name: record for name, record in manifest.files.items() if name != "passages.arrow"}).write(folder)
    searcher = Searcher(layout, make_encoder())
    hits = searcher.search(QUERIES[0]).hits
    assert {part for hit in hits for part in hit.scores} == {"document", "chunk", "bm25"}
    assert {part for hit in hits for passage in hit.passages for part in passage.scores} == {"chunk"}
    assert searcher.search(QUERIES[0], max_characters=500).hits
    compact_collection(layout)
    assert {part for hit in searcher.search(QUERIES[0]).hits for part in hit.scores} == {"document", "chunk", "bm25", "passage_bm25"}


def test_filter_that_matches_nothing_gives_no_hits(searcher: Searcher) -> None:
    found = searcher.search_batch(QUERIES, filters={"type": "eq", "key": "year", "value": 1})
    assert [result.hits for result in found] == [()] * len(QUERIES)


def test_filter_of_one_document_finds_it_in_every_granularity(searcher: Searcher) -> None:
    tree = {"type": "eq", "key": "doc_id", "value": "doc-0-031"}
    for granularity in ("document", "chunk", "both"):
        assert [hit.doc_id for hit in searcher.search("slate", granularity=granularity, filters=tree).hits] == ["doc-0-031"]


def test_top_k_beyond_the_collection_returns_all_documents_once(stones, searcher: Searcher) -> None:
    for granularity in ("document", "chunk", "both"):
        found = [hit.doc_id for hit in searcher.search("slate", granularity=granularity, top_k=200).hits]
        assert sorted(found) == [row["doc_id"] for row in stones.rows]


def test_metadata_has_the_other_columns_as_python_values(stones, searcher: Searcher) -> None:
    tree = {"type": "eq", "key": "doc_id", "value": "doc-0-033"}
    hit = searcher.search("slate", filters=tree).hits[0]
    row = stones.rows[33]
    assert set(hit.metadata) == {"year", "price", "lang", "is_open", "day", "seen_at", "made_at", "Odd name", "tags"}
    assert hit.metadata["day"] == row["day"]
    assert hit.metadata["seen_at"] == row["seen_at"]
    assert hit.metadata["made_at"] == row["made_at"]
    assert type(hit.metadata["made_at"]) is dt.datetime
    assert hit.metadata["tags"] == ["a", "b"]


def test_result_turns_into_json_with_str_for_dates(searcher: Searcher) -> None:
    result = searcher.search(QUERIES[1]).to_dict()
    assert json.loads(json.dumps(result, default=str, allow_nan=False))["hits"][0]["doc_id"] == result["hits"][0]["doc_id"]


def test_another_encoder_is_refused(stones, make_encoder) -> None:
    with pytest.raises(FingerprintMismatchError, match="query encoder"):
        Searcher(stones.layout, make_encoder("f" * 64))


def test_encoder_that_returns_nan_is_refused(stones, encoder) -> None:
    searcher = Searcher(stones.layout, encoder)
    encoder.encode_queries = lambda texts: np.full((len(texts), 16), np.nan, np.float32)
    with pytest.raises(UsageError, match="finite"):
        searcher.search("slate")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda s: s.search("  "), UsageError),
        (lambda s: s.search("x", top_k=0), ConfigError),
        (lambda s: s.search("x", chunk_tokens=100), ConfigError),
        (lambda s: s.search("x", filters={"type": "eq", "key": "vector", "value": 1}), FilterError),
        (lambda s: s.search_batch([]), UsageError),
        (lambda s: s.search_vectors(np.ones((1, 3))), UsageError),
        (lambda s: s.search_vectors(np.ones((2, 16)), queries=["one"]), UsageError),
    ],
)
def test_bad_call_is_refused_before_encoding(searcher: Searcher, encoder, call, error) -> None:
    with pytest.raises(error):
        call(searcher)
    assert encoder.calls == []


def test_search_on_inverted_lists_finds_nearly_what_exact_search_finds(layout, publish, encoder) -> None:
    from pipeline.config import IndexConfig

    stones = publish(layout, 3_000, config=IndexConfig(kind="ivf_sq8"))
    searcher = Searcher(layout, encoder)
    queries = [f"query {i}" for i in range(40)]
    vectors = encoder.encode_queries(queries)
    found = searcher.search_vectors(vectors, granularity="document", passages=0)
    exact = np.argsort(-(vectors @ stones.document_vectors.T), axis=1)[:, :10]
    overlap = [len({h.doc_id for h in r.hits} & {stones.rows[i]["doc_id"] for i in row}) / 10 for r, row in zip(found, exact, strict=True)]
    assert np.mean(overlap) >= 0.9


def test_search_imports_neither_torch_nor_transformers() -> None:
    heavy = ("torch", "transformers", "pipeline.encode", "pipeline.model")
    code = f"import sys, pipeline.search; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
