from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.lab.evaluate.retrieval_set import NO_SPAN, Judgements, read_retrieval_set, sample_set
from pyarrow import csv

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


def test_beir_layout_reads_as_parquet_does(tmp_path, write, judged):
    beir = tmp_path / "tiny"
    folder = write(tmp_path / "other" / "tiny")
    for name in ("corpus", "queries"):
        rows = pq.read_table(folder / f"{name}.parquet").rename_columns({"id": "_id"}).to_pylist()
        (beir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (beir / "qrels").mkdir()
    header = {"query_id": "query-id", "doc_id": "corpus-id"}
    qrels = pq.read_table(folder / "qrels.parquet").rename_columns(header)
    csv.write_csv(qrels, beir / "qrels/test.tsv", csv.WriteOptions(delimiter="\t"))
    for path in beir.glob("*.parquet"):
        path.unlink()

    read = read_retrieval_set(beir)
    for name in ("doc_ids", "titles", "texts", "query_ids", "queries"):
        assert getattr(read, name) == getattr(judged, name)
    for name in Judgements.__slots__:
        assert np.array_equal(getattr(read.judgements, name), getattr(judged.judgements, name))


def test_whole_number_ids_become_text(tmp_path, write):
    documents = [{"id": 1, "text": "stone"}]
    judged = read_retrieval_set(
        write(
            tmp_path / "s",
            documents,
            [{"id": 7, "text": "stone"}],
            [{"query_id": 7, "doc_id": 1, "score": 1}],
        )
    )

    assert (judged.doc_ids, judged.query_ids) == (("1",), ("7",))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"query_id": "nobody", "doc_id": "a", "score": 1}, "judgements of unknown queries"),
        ({"query_id": "q", "doc_id": "nowhere", "score": 1}, "judgements of unknown documents"),
    ],
)
def test_judgements_of_unknown_ids_are_counted_and_left_out(tmp_path, write, extra, reason):
    judged = read_retrieval_set(write(tmp_path / "s", DOCUMENTS, QUERIES, [*QRELS, extra]))

    assert judged.skipped == {reason: 1}
    assert len(judged.judgements.query_J) == 2


@pytest.mark.parametrize("span", [(-1, 3), (4, 4), (5, 2), (0, 11)])
def test_spans_outside_their_text_are_counted_and_the_judgement_kept(tmp_path, write, span):
    qrels = [{**QRELS[0], "start": span[0], "end": span[1]}, {**QRELS[1], "start": 0, "end": 5}]
    if span[0] == NO_SPAN:
        qrels[0]["start"] = -2
    judged = read_retrieval_set(write(tmp_path / "s", DOCUMENTS, QUERIES, qrels))

    assert judged.skipped == {"spans outside their text": 1}
    assert judged.judgements.start_J.tolist() == [NO_SPAN, 0]


def test_span_of_a_document_that_is_not_relevant_is_no_evidence(tmp_path, write):
    qrels = [
        {**QRELS[0], "start": 0, "end": 5},
        {**QRELS[1], "start": 0, "end": 5},
        {"query_id": "r", "doc_id": "a", "score": 0, "start": 0, "end": 5},
    ]
    judged = read_retrieval_set(write(tmp_path / "s", DOCUMENTS, QUERIES, qrels))

    assert judged.judgements.start_J.tolist() == [0, 0, NO_SPAN]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ({"id": "s", "text": " \n"}, "blank queries"),
        ({"id": "s", "text": "way"}, "queries without a relevant document"),
    ],
)
def test_queries_that_cannot_be_scored_are_counted_and_left_out(tmp_path, write, query, reason):
    qrels = [*QRELS, {"query_id": "s", "doc_id": "a", "score": 1 if reason == "blank queries" else 0}]
    judged = read_retrieval_set(write(tmp_path / "s", DOCUMENTS, [query, *QUERIES], qrels))

    assert judged.skipped == {reason: 1}
    assert judged.query_ids == ("q", "r")
    assert judged.judgements.query_J.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["corpus", "queries", "qrels"])
def test_missing_or_damaged_file_is_refused_by_name(tmp_path, write, name):
    folder = write(tmp_path / "s", DOCUMENTS, QUERIES, QRELS)
    (folder / f"{name}.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(SourceError, match=rf"{name}\.parquet must be a file that can be read whole"):
        read_retrieval_set(folder)
    (folder / f"{name}.parquet").unlink()
    with pytest.raises(SourceError, match=rf"must hold {name}\.parquet, \.arrow"):
        read_retrieval_set(folder)


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
def test_columns_that_cannot_be_evaluated_are_refused(tmp_path, write, documents, queries, qrels, sentence):
    with pytest.raises(SchemaError, match=sentence):
        read_retrieval_set(write(tmp_path / "s", documents, queries, qrels))


def test_set_without_a_usable_query_is_refused(tmp_path, write):
    with pytest.raises(SourceError, match=r"got none \(1 judgements of unknown queries.*check the ids"):
        read_retrieval_set(
            write(tmp_path / "s", DOCUMENTS, QUERIES, [{"query_id": "x", "doc_id": "y", "score": 1}])
        )


def test_sample_keeps_every_judged_document_of_its_queries(judged):
    for seed in range(5):
        sample = sample_set(judged, max_queries=2, max_documents=2, seed=seed)
        whole, kept = (
            {
                (own.query_ids[q], own.doc_ids[d])
                for q, d in zip(own.judgements.query_J, own.judgements.document_J, strict=True)
                if own.query_ids[q] in sample.query_ids
            }
            for own in (judged, sample)
        )

        assert len(sample.query_ids) == 2
        assert kept == whole


def test_sample_of_documents_holds_the_number_asked_for(judged):
    only_q3 = next(
        s
        for s in (sample_set(judged, max_queries=1, max_documents=2, seed=seed) for seed in range(50))
        if s.query_ids == ("q3",)
    )

    assert len(only_q3.doc_ids) == 2
    assert "stone" in only_q3.doc_ids
