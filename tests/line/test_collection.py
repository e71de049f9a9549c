"""A collection written from Python: what is taken, what is refused, and that it is an ingest."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from pathlib import Path
from typing import Any, get_type_hints

import cairn
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.collection import ColumnKeywords
from cairn.pipeline.config import CorpusConfig, IngestConfig
from cairn.pipeline.errors import (
    CairnError,
    ConfigError,
    FilterError,
    SchemaError,
    SourceError,
    UsageError,
)
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.options import options_of

from tests.small_ingests import stopped_at

ROWS = [{"id": str(i), "text": f"the cat sat on mat {i}", "year": 2000 + i} for i in range(6)]


@pytest.fixture
def settings(config: IngestConfig) -> dict[str, Any]:
    stages = config.to_dict()
    return {name: stages[name] for name in ("encoder", "cluster", "context")}


@pytest.fixture
def notes(root: Path, settings: dict[str, Any]) -> cairn.Collection:
    return cairn.Collection.create("notes", root=root, settings=settings)


def test_column_keywords_are_the_options_of_a_corpus() -> None:
    named = {name for name, each in options_of(CorpusConfig).items() if each.about.help}
    assert set(get_type_hints(ColumnKeywords)) == named


@pytest.mark.parametrize(
    "given",
    [
        ROWS,
        iter(ROWS),
        pa.Table.from_pylist(ROWS),
        pa.Table.from_pylist(ROWS).to_batches(max_chunksize=4),
        pa.Table.from_pylist(ROWS).to_reader(),
        pd.DataFrame(ROWS, index=range(3, 9)),
        pl.DataFrame(ROWS),
    ],
    ids=["list", "iterator", "table", "batches", "reader", "pandas", "polars"],
)
def test_add_of_any_table_stores_the_same_documents(notes: cairn.Collection, given: Any) -> None:
    report = notes.add(given)
    assert (report.rows, report.indexed, report.generation) == (6, 6, 1)
    stored = notes.documents.to_arrow(["doc_id", "text", "year"]).to_pylist()
    assert stored == [{"doc_id": row["id"], "text": row["text"], "year": row["year"]} for row in ROWS]


def test_tables_of_string_views_in_dictionaries_and_lists_are_stored(notes: cairn.Collection) -> None:
    words = pl.Series("kind", ["x", "y", None], dtype=pl.Enum(["x", "y"]))
    frame = pl.DataFrame({"id": ["p1", "p2", "p3"], "text": pl.Series(["cat", "dog", "mat"]), "kind": words})
    frame = frame.with_columns(pl.col("text").cast(pl.Categorical), tags=pl.concat_list(words))
    assert notes.add(frame).indexed == 3
    coded = pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None], pa.int32()), pa.array(["x", "y"], pa.string_view())
    )
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), coded)
    texts = pa.array(["cat", "dog", "mat"], pa.string_view())
    assert (
        notes.add(pa.table({"id": ["a1", "a2", "a3"], "text": texts, "kind": coded, "tags": lists})).indexed
        == 3
    )
    stored = notes.documents.to_arrow(["doc_id", "kind", "tags"]).to_pylist()
    assert [(row["kind"], row["tags"]) for row in stored] == [("x", ["x"]), ("y", ["y"]), (None, [None])] * 2


def test_first_search_after_several_publications_finds_what_they_added(
    root: Path, settings: dict[str, Any]
) -> None:
    settings["encoder"]["use_context"] = True  # queries are encoded by what lies beside a generation
    written = cairn.Collection.create("notes", root=root, settings=settings)
    written.add(ROWS)
    reader = cairn.open_collection("notes", root=root)
    assert len(reader.documents) == 6
    for number in range(4):
        written.add([{"id": f"n{number}", "text": f"the dog sat on rug {number}"}])
    for collection in (written, reader):
        assert len(collection.search("dog", top_k=20).hits) == 10


def test_add_stores_what_an_ingest_of_the_same_rows_stores(
    notes: cairn.Collection, root: Path, tmp_path: Path, config: IngestConfig
) -> None:
    notes.add(ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    build_index([str(tmp_path / "rows.parquet")], root, "files", config)
    files = cairn.open_collection("files", root=root)
    columns = ["doc_id", "content_sha256", "cluster_id", "vector"]
    assert notes.documents.to_arrow(columns) == files.documents.to_arrow(columns)
    assert notes.add(str(tmp_path / "rows.parquet")).unchanged == 6


def test_rows_that_cannot_be_indexed_are_in_the_report_and_its_file(notes: cairn.Collection) -> None:
    bad = [{"id": "0", "text": "again"}, {"id": "s", "text": "\ud800"}, {"id": "e", "text": " "}]
    report = notes.add([*ROWS, *bad])
    assert report.rows == 9
    assert report.indexed == 6
    assert report.quarantine_reasons == {"duplicate_id": 1, "empty_text": 1, "invalid_utf8": 1}
    assert report.quarantine_file is not None
    assert sorted(pq.read_table(report.quarantine_file).column("doc_id").to_pylist()) == ["0", "e", "s"]
    (record,) = notes.layout.runs_folder.iterdir()
    assert json.loads(record.read_text())["report"]["quarantine_reasons"] == report.quarantine_reasons
    with pytest.raises(SourceError, match="empty_text: 1"):
        cairn.Collection.create("none", root=notes.layout.root).add([bad[-1]])


def test_add_fills_missing_columns_with_nulls_and_makes_mixed_ones_texts(
    notes: cairn.Collection,
) -> None:
    notes.add([{"id": 1, "text": "old stone", "code": 7}, {"id": "b", "text": "path", "code": "x"}])
    assert notes.add([{"id": "c", "text": "river"}, {"id": "d", "text": "way", "code": None}]).indexed == 2
    codes = notes.documents.to_arrow(["doc_id", "code"]).to_pylist()
    assert [(row["doc_id"], row["code"]) for row in codes] == [
        ("1", "7"),
        ("b", "x"),
        ("c", None),
        ("d", None),
    ]


def test_names_of_columns_hold_for_one_call_and_those_that_create_is_given_for_all(
    notes: cairn.Collection, root: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    notes.add([{"key": "k", "body": "old stone"}], id_column="key", text_column="body")
    assert notes.add([{"id": "i", "text": "path"}]).indexed == 1
    with pytest.raises(SchemaError, match=r"got none in memory.*--id-column, in Python with id_column"):
        notes.add([{"key": "k"}])
    (tmp_path / "rows.jsonl").write_text('{"id": "j", "text": "river"}\n')
    notes.add([{"key": "k2", "body": "way"}], id_column="key", text_column="body")
    assert notes.add(str(tmp_path / "rows.jsonl")).indexed == 1
    assert sorted(notes.documents.ids()) == ["i", "j", "k", "k2"]
    settings["corpus"] = {"id_column": "key"}
    cairn.Collection.create("keyed", root=root, settings=settings).add([{"key": "k", "text": "old stone"}])
    keyed = cairn.open_collection("keyed", root=root)
    keyed.add([{"id": "i", "text": "path"}], id_column="id")
    assert keyed.add([{"key": "k2", "text": "way"}]).indexed == 1


def test_sync_deletes_what_it_is_not_given_and_add_does_not(notes: cairn.Collection) -> None:
    notes.add(ROWS)
    assert notes.add([{**ROWS[0], "text": "changed"}]).deleted == 0
    with pytest.raises(UsageError, match=r"got 4 of 6 .* in Python max_deleted"):
        notes.sync(ROWS[:2])
    report = notes.sync(ROWS[:2], max_deleted=1.0)
    assert (report.indexed, report.unchanged, report.deleted) == (1, 1, 4)
    assert notes.documents.ids() == ["1", "0"]
    with pytest.raises(SourceError, match="every `sync`, must be given at least one document, got none"):
        notes.sync([])


def test_add_of_nothing_changes_nothing_and_cannot_be_the_first(notes: cairn.Collection) -> None:
    with pytest.raises(SourceError, match=r"the first `add`.* at least one document"):
        notes.add([])
    assert repr(notes) == "Collection('notes', nothing published yet)"
    notes.add(ROWS)
    report = notes.add([])
    assert (report.rows, report.indexed, report.generation, len(notes.documents)) == (0, 0, 1, 6)
    assert repr(notes) == "Collection('notes', 6 documents, 6 chunks, generation 1)"
    assert repr(notes.documents) == "<6 documents of 'notes'>"
    first, *rest = repr(notes.search("cat", top_k=2)).splitlines()
    assert (first, len(rest)) == ("<2 found for 'cat', generation 1", 2)
    notes.delete(["0", "1", "2", "3", "4"])
    assert "1 document, 1 chunk, generation" in repr(notes)


def test_delete_takes_ids_or_a_filter(notes: cairn.Collection) -> None:
    notes.add(ROWS)
    assert notes.delete({"type": "gte", "key": "year", "value": 2004}).deleted == 2
    report = notes.delete(["0", "gone"])
    assert (report.deleted, report.missing) == (1, ("gone",))
    assert notes.documents.ids() == ["1", "2", "3"]
    with pytest.raises(FilterError):
        notes.delete({"type": "eq", "key": "yaer", "value": 2004})


def test_documents_are_read_by_id_and_in_order_and_copied(notes: cairn.Collection, root: Path) -> None:
    notes.add(ROWS)
    assert notes.documents["3"].metadata == {"year": 2003}
    assert "9" not in notes.documents
    assert notes.documents.get("9") is None
    with pytest.raises(KeyError):
        notes.documents["9"]
    assert [document.text for document in notes.documents] == [row["text"] for row in ROWS]
    with pytest.raises(UsageError, match="must be among doc_id, title, text"):
        list(notes.documents.batches(["vektor"]))
    with pytest.raises(UsageError, match="must be among doc_id, title, text"):
        notes.documents.to_arrow(["vektor"])
    copy = cairn.Collection.create("copy", root=root, settings={"encoder": notes.status()["encoder"]})
    copy.add(notes.documents)
    assert [document.metadata for document in copy.documents] == [{"year": row["year"]} for row in ROWS]


def test_search_by_stored_vectors_finds_each_document_first(notes: cairn.Collection) -> None:
    notes.add(ROWS)
    vectors = np.stack(notes.documents.to_arrow(["vector"]).column("vector").to_numpy())
    answers = notes.search_vectors(vectors, granularity="document")
    assert [answer.hits[0].doc_id for answer in answers] == [row["id"] for row in ROWS]
    like = notes.more_like("2", filters={"type": "gte", "key": "year", "value": 2001}, granularity="document")
    assert [hit.doc_id for hit in like.hits] == [
        hit.doc_id for hit in answers[2].hits if hit.doc_id not in ("0", "2")
    ]
    with pytest.raises(UsageError, match="must be of a document of 'notes', got '9'"):
        notes.more_like("9")


def test_reading_loads_no_model(notes: cairn.Collection, tmp_path: Path, tiny_model_folder: Path) -> None:
    notes.add(ROWS)
    moved = tiny_model_folder.rename(tmp_path / "moved")
    try:
        opened = cairn.open_collection("notes", root=notes.layout.root)
        assert len(opened.documents) == 6
        assert opened.more_like("1").hits
        with pytest.raises(ConfigError, match="where the model was moved"):
            opened.search("cat")
    finally:
        moved.rename(tiny_model_folder)
    assert opened.search("cat").hits


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "notes"}, "must have a new name, got 'notes'"),
        ({"name": "a", "model": "no-such-model"}, "no-such-model"),
        ({"name": "a", "settings": {"encodr": {}}}, "did you mean 'encoder'"),
        ({"name": "a", "settings": {"encoder": {"poling": "cls"}}}, "did you mean 'pooling'"),
        ({"name": "../a"}, "name must match"),
    ],
    ids=["taken", "model", "stage", "setting", "name"],
)
def test_create_refuses_what_cannot_be(
    notes: cairn.Collection, arguments: dict[str, Any], sentence: str
) -> None:
    notes.add(ROWS)
    with pytest.raises(UsageError, match=sentence):
        cairn.Collection.create(**arguments, root=notes.layout.root)


def test_values_of_rows_are_taken_as_python_numpy_and_pandas_have_them(notes: cairn.Collection) -> None:
    day, moment = dt.date(2024, 5, 31), dt.datetime.fromisoformat("2024-05-31T01:00")
    days, moments = np.array([day, "NaT"], "datetime64[D]"), np.array([moment], "datetime64[ns]")
    rows = [
        {"id": uuid.UUID(int=1), "n": np.int64(3), "when": pd.NaT, "days": days, "moments": moments},
        {"id": "b", "x": np.float32(0.5), "when": day, "days": list(days), "moments": list(moments)},
        {"id": "c", "x": float("nan"), "when": np.datetime64(day)},
    ]
    assert notes.add([{**row, "text": "a stone"} for row in rows]).indexed == 3
    later = {"id": "d", "text": "a stone", "moments": np.array(moment, "datetime64[us]"), "m": {"x": 1}}
    report = notes.add([later, {"id": "e", "text": "a stone", "m": 3}])
    assert any("values of column 'm'" in warning for warning in report.warnings)
    stored = notes.documents.to_arrow(["doc_id", "n", "x", "when", "days", "moments", "m"]).to_pylist()
    assert [tuple(row.values()) for row in stored] == [
        (str(uuid.UUID(int=1)), 3, None, None, [day, None], [moment], None),
        ("b", None, 0.5, day, [day, None], [moment], None),
        ("c", None, None, day, None, None, None),
        ("d", None, None, None, None, [moment], None),
        ("e", None, None, None, None, None, 3),
    ]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        *((given, "must be") for given in (7, [1, 2], [{1: "x"}], [b"x"])),
        ("no-such-folder", "no-such-folder"),
        ([{"a": 1}, 3], "or dictionaries, got 3; give"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "got what Arrow does not take .*Duplicate column names"),
        ([pa.record_batch({name: [1]}) for name in "ab"], "got what Arrow does not take .*Schema at index 1"),
    ],
    ids=[*("number", "numbers", "key", "bytes", "folder"), *("row", "pandas", "batches")],
)
def test_add_refuses_what_is_no_document_or_cannot_be_held(
    notes: cairn.Collection, given: Any, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        notes.add(given)


DATED = [{"id": f"d{i}", "text": f"the cat sat on mat {i}", "year": str(2000 + i)} for i in range(6)]


def type_of_year(notes: cairn.Collection) -> str:
    return next(column.type for column in notes.columns() if column.name == "year")


@pytest.mark.parametrize("partitions", [1, 2])
def test_retyped_column_holds_the_same_values_and_later_rows_follow(
    root: Path, settings: dict[str, Any], partitions: int
) -> None:
    index = {"index": {"partitions": partitions}}
    notes = cairn.Collection.create("notes", root=root, settings={**settings, **index})
    source = root.parent / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(DATED), source)
    notes.add(source)
    notes.delete("d0")
    before = notes.search("the mat", top_k=5)
    assert notes.retype({"year": "int64"}) == 3
    assert verify_collection(notes.layout) == []
    years = notes.documents.to_arrow(["doc_id", "year"]).to_pylist()
    assert {row["doc_id"]: row["year"] for row in years} == {f"d{i}": 2000 + i for i in range(1, 6)}
    assert notes.count({"type": "gte", "key": "year", "value": 2004}) == 2
    assert [hit.score for hit in notes.search("the mat", top_k=5).hits] == [hit.score for hit in before.hits]
    pq.write_table(pa.Table.from_pylist([*DATED, {"id": "d6", "text": "a dog", "year": "2006"}]), source)
    report = notes.add(source)
    assert (report.unchanged, report.encoded) == (5, 2)  # what was deleted comes back, and what is new
    assert type_of_year(notes) == "int64"


@pytest.mark.parametrize(
    ("types", "told"),
    [
        ({"year": "int64"}, r"column 'year' must hold int64 without loss .*, got '19th' in 'd2'"),
        ({"year": "list[foo]"}, r"the type of column 'year' must be one such as"),
        ({"month": "int64"}, r"must be a metadata column of collection 'notes', which has: year"),
        ({"year": "number"}, r"must be one such as string, int64, .*, got 'number'"),
    ],
)
def test_column_that_cannot_be_retyped_stays(
    notes: cairn.Collection, types: dict[str, str], told: str
) -> None:
    notes.add([*DATED[:2], {**DATED[2], "year": "19th"}])
    with pytest.raises(CairnError, match=told):
        notes.retype(types)
    assert type_of_year(notes) == "string"
    assert notes.add([{**DATED[3], "year": "20th"}]).generation == 2


def test_retyping_that_was_killed_leaves_the_column(notes: cairn.Collection) -> None:
    notes.add(DATED)
    with stopped_at("manifest-written"):
        notes.retype({"year": "int64"})
    assert type_of_year(notes) == "string"
    assert notes.add([{**DATED[0], "year": "19th"}]).generation == 2
    assert verify_collection(notes.layout) == []
