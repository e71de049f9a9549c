from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.lab.evaluate.known_items import known_item_set, split_first_sentence

REST = "Stones mark it every hundred paces. " * 8


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rows = [
        {
            "id": f"d{index}",
            "title": f"Path {index}",
            "text": f"This is the path  number {index} over the hill.\n{REST}",
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
    for query, document in zip(made.queries, made.judgements.document_J.tolist(), strict=True):
        number = made.doc_ids[document].removeprefix("d")
        assert query == f"This is the path number {number} over the hill."
        assert made.texts[document] == REST
    for position in set(range(6)) - set(made.judgements.document_J.tolist()):
        assert made.texts[position].startswith("This is the path")
    every = known_item_set(corpus, 100, seed=0)
    drawn = {every.doc_ids[document] for document in every.judgements.document_J.tolist()}
    assert drawn - {"name"} == {f"d{index}" for index in range(6)}


def test_repeated_ids_are_counted_and_the_first_is_kept(corpus):
    made = known_item_set(corpus, 3, seed=0)

    assert made.skipped == {"documents that repeat an id": 1}
    assert len(set(made.doc_ids)) == len(made.doc_ids) == 9


def test_corpus_of_json_lines_gives_the_same_items(corpus):
    parquet = known_item_set(corpus, 3, seed=0)
    rows = [row for path in sorted(corpus.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    for path in corpus.glob("*.parquet"):
        path.unlink()
    (corpus / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert known_item_set(corpus, 3, seed=0).queries == parquet.queries


def test_split_keeps_every_word():
    sentence, rest = split_first_sentence("  The first\n sentence stands here.  And the rest.")

    assert (sentence, rest) == ("The first sentence stands here.", "And the rest.")


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
