from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.lab.evaluate.retrieval_set import (
    NO_SPAN,
    Judgements,
    RetrievalSet,
    known_item_set,
    read_retrieval_set,
    sample_set,
)

from tests.lab.evaluate.conftest import write_set

DOCUMENTS = [{"id": "a", "text": "stone path"}, {"id": "b", "text": "river"}]
QUERIES = [{"id": "q", "text": "stone"}, {"id": "r", "text": "river"}]
QRELS = [{"query_id": "q", "doc_id": "a", "score": 1}, {"query_id": "r", "doc_id": "b", "score": 1}]


def test_set_read_back_has_positions_gains_and_spans(judged):
    judgements = judged.judgements
    columns = [getattr(judgements, name).tolist() for name in Judgements.__slots__]
    read = [(judged.query_ids[q], judged.doc_ids[d], *rest) for q, d, *rest in zip(*columns, strict=True)]

    assert read == [
        ("q1", "cat", 2, 0, 23),
        ("q1", "stone", 1, 23, 51),
        ("q2", "river", 1, 35, 57),
        ("q2", "way", 0, NO_SPAN, NO_SPAN),
        ("q3", "stone", 1, NO_SPAN, NO_SPAN),
    ]


@pytest.mark.parametrize(
    ("queries", "judgement", "reason"),
    [
        (QUERIES, {"query_id": "nobody", "doc_id": "a", "score": 1}, "judgements of unknown queries"),
        (QUERIES, {"query_id": "q", "doc_id": "nowhere", "score": 1}, "judgements of unknown documents"),
        (
            [{"id": "s", "text": " \n"}, *QUERIES],
            {"query_id": "s", "doc_id": "a", "score": 1},
            "blank queries",
        ),
        (
            [{"id": "s", "text": "way"}, *QUERIES],
            {"query_id": "s", "doc_id": "a", "score": 0},
            "queries without a relevant document",
        ),
    ],
)
def test_what_cannot_be_scored_is_counted_and_left_out(tmp_path, queries, judgement, reason):
    judged = read_retrieval_set(write_set(tmp_path / "s", DOCUMENTS, queries, [*QRELS, judgement]))

    assert judged.skipped == {reason: 1}
    assert judged.query_ids == ("q", "r")
    assert judged.judgements.query_J.tolist() == [0, 1]


def test_ids_may_be_whole_numbers_and_only_relevant_spans_are_evidence(tmp_path):
    documents = [{**row, "id": place} for place, row in enumerate(DOCUMENTS)]
    span = {"start": 0, "end": 5}
    qrels = [{"query_id": "q", "doc_id": place, "score": 1 - place, **span} for place in (0, 1)]
    judged = read_retrieval_set(write_set(tmp_path / "s", documents, QUERIES[:1], qrels))
    assert (judged.doc_ids, judged.judgements.start_J.tolist()) == (("0", "1"), [0, NO_SPAN])
    with pytest.raises(SourceError, match=r"got none \(2 judgements of unknown queries.*check the ids"):
        read_retrieval_set(write_set(tmp_path / "s", documents, QUERIES[1:], qrels))


@pytest.mark.parametrize("span", [(-2, 3), (4, 4), (5, 2), (0, 11)])
def test_spans_outside_their_text_are_counted_and_the_judgement_kept(tmp_path, span):
    qrels = [{**QRELS[0], "start": span[0], "end": span[1]}, {**QRELS[1], "start": 0, "end": 5}]
    judged = read_retrieval_set(write_set(tmp_path / "s", DOCUMENTS, QUERIES, qrels))

    assert judged.skipped == {"spans outside their text": 1}
    assert judged.judgements.start_J.tolist() == [NO_SPAN, 0]


@pytest.mark.parametrize(
    ("documents", "queries", "qrels", "sentence"),
    [
        ([{"id": "a"}], QUERIES, QRELS, "missing: text"),
        ([*DOCUMENTS, DOCUMENTS[0]], QUERIES, QRELS, "got 'a' 2 times"),
        (DOCUMENTS, [{"id": None, "text": "x"}, *QUERIES], QRELS, "a row without"),
        (DOCUMENTS, [{"id": "two words", "text": "x"}, *QUERIES], QRELS, "without white space"),
        (DOCUMENTS, [{"id": 0.5, "text": "x"}], QRELS, "whole numbers, got double"),
        ([{"id": "a", "text": 1}], QUERIES, QRELS, "must hold text, got int64"),
        (DOCUMENTS, QUERIES, [{**QRELS[0], "score": 0.5}], "whole number in every row"),
        (DOCUMENTS, QUERIES, [QRELS[0], {**QRELS[1], "score": None}], "whole number in every row"),
        (DOCUMENTS, QUERIES, [{**QRELS[0], "start": 0}], "got only start"),
        (DOCUMENTS, QUERIES, [{**QRELS[0], "start": "x", "end": "y"}], "whole numbers or null"),
    ],
)
def test_columns_that_cannot_be_evaluated_are_refused(tmp_path, documents, queries, qrels, sentence):
    with pytest.raises(SchemaError, match=sentence):
        read_retrieval_set(write_set(tmp_path / "s", documents, queries, qrels))


def test_sample_keeps_every_judged_document_of_its_queries(judged):
    def pairs(own: RetrievalSet) -> set[tuple[str, str]]:
        judgements = zip(own.judgements.query_J, own.judgements.document_J, strict=True)
        return {(own.query_ids[query], own.doc_ids[document]) for query, document in judgements}

    for seed in range(5):
        sample = sample_set(judged, max_queries=2, max_documents=2, seed=seed)
        assert len(sample.query_ids) == 2
        assert pairs(sample) == {pair for pair in pairs(judged) if pair[0] in sample.query_ids}
        assert len(sample_set(judged, max_queries=1, max_documents=3, seed=seed).doc_ids) == 3


REST = "Stones mark it every hundred paces. " * 8


@pytest.fixture
def corpus(tmp_path):
    rows = [
        {
            "id": f"d{index}",
            "title": f"Path {index}",
            "text": f" This is\nthe path  number {index} over the hill.\n{REST}",
        }
        for index in range(6)
    ]
    rows += [
        {"id": "short", "title": None, "text": "A path over the hill and away. No more."},
        {"id": "name", "title": None, "text": f"Path.\n\n{REST}"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    pq.write_table(
        pa.Table.from_pylist([{"id": "d0", "text": "again"}, {"id": "e", "text": "other"}]),
        tmp_path / "b.parquet",
    )
    return tmp_path


def test_query_is_the_first_sentence_cut_out_of_its_document(corpus):
    made = known_item_set(corpus, 3, seed=0)

    assert len(made.queries) == 3
    assert made.skipped == {"documents that repeat an id": 1}
    assert len(set(made.doc_ids)) == len(made.doc_ids) == 9
    for query, document in zip(made.queries, made.judgements.document_J.tolist(), strict=True):
        number = made.doc_ids[document].removeprefix("d")
        assert query == f"This is the path number {number} over the hill."
        assert made.texts[document] == REST
    for position in set(range(6)) - set(made.judgements.document_J.tolist()):
        assert made.texts[position].startswith(" This is\nthe path")
    every = known_item_set(corpus, 100, seed=0)
    drawn = {every.doc_ids[document] for document in every.judgements.document_J.tolist()}
    assert drawn - {"name"} == {f"d{index}" for index in range(6)}
    rows = [row for path in sorted(corpus.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    (corpus / "lines").mkdir()
    (corpus / "lines" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert known_item_set(corpus / "lines", 3, seed=0).queries == made.queries


@pytest.mark.parametrize(
    ("rows", "error", "sentence"),
    [
        ([{"id": "a", "body": "x"}], SchemaError, "columns id, text, missing: text"),
        ([{"id": "a", "text": "short"}], SourceError, "longer texts"),
    ],
)
def test_corpora_that_give_no_query_are_refused(tmp_path, rows, error, sentence):
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")

    with pytest.raises(error, match=sentence):
        known_item_set(tmp_path, 3, seed=0)
