from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.scan import read_checked, scan_sources
from cairn.pipeline.errors import SchemaError, SourceError

from tests.corpus.checked_rows import CONFIG, checked, read, reasons

WriteCorpus = Callable[..., Path]


def test_rows_carry_every_stored_column(write_corpus: WriteCorpus) -> None:
    columns = {"text": ["one", "two"], "title": ["t", None], "query": ["q", None], "year": [2024, None]}
    path = write_corpus(id=pa.array([1, 2], pa.uint64()), **columns, tags=[["a", "b"], None])
    rows, rejected = read(path)
    assert rejected == []
    columns |= {"doc_id": ["1", "2"], "source_file": [str(path)] * 2, "given_vectors": [None, None]}
    del rows[0]["content_sha256"], rows[1]["content_sha256"]
    expected = columns | {"tags": [["a", "b"], None]}
    assert {name: [row[name] for row in rows] for name in rows[0]} == expected


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1.0, float("nan")]),
        pa.array([1.0, float("inf")], pa.float32()),
        pa.array([1.0, float("-inf")], pa.float16()),
        pa.array([[1.0], [2.0, float("nan")]]),
        pa.array([[1.0, 2.0], [float("nan"), 2.0]], pa.list_(pa.float32(), 2)),
    ],
)
def test_non_finite_metadata_is_rejected(write_corpus: WriteCorpus, column: pa.Array) -> None:
    rows, rejected = read(write_corpus(id=["a", "b"], text=["x", "y"], score=column))
    assert [row["doc_id"] for row in rows] == ["a"]
    assert reasons(rejected) == [(1, "nan_metadata")]


DICTIONARY_TYPES = [pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_string())]
PLAIN_TYPES = [pa.string(), pa.large_string(), pa.string_view()]
# Arrow itself cannot read its dictionary type back from a delta encoding.
TYPES_AND_ENCODINGS = [
    (text_type, encoding) for text_type in (*PLAIN_TYPES, *DICTIONARY_TYPES) for encoding in (None, "PLAIN")
] + [
    (text_type, encoding)
    for text_type in PLAIN_TYPES
    for encoding in ("DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY")
]


@pytest.mark.parametrize(("text_type", "encoding"), TYPES_AND_ENCODINGS)
def test_ids_and_texts_read_the_same_from_every_type_and_encoding(
    write_corpus: WriteCorpus, text_type: pa.DataType, encoding: str | None
) -> None:
    options = {} if encoding is None else {"use_dictionary": False, "column_encoding": {"text": encoding}}
    ids, texts = (pa.array(values).cast(text_type) for values in (["a", "b", "c"], ["x", "x", "käse"]))
    rows, _ = read(write_corpus(id=ids, text=texts, options=options))
    assert [(row["doc_id"], row["text"]) for row in rows] == [("a", "x"), ("b", "x"), ("c", "käse")]


def test_batches_keep_to_rows_and_bytes(write_corpus: WriteCorpus) -> None:
    path = write_corpus(id=[*range(100)], text=["x" * 1_000] * 100)
    config = CorpusConfig(batch_rows=30, batch_bytes=8_000)
    batches = list(read_checked(scan_sources([str(path)], config), config))
    assert sum(batch.num_rows for batch in batches) == 100
    assert max(batch.num_rows for batch in batches) <= 8


def test_hive_folders_become_typed_metadata(write_corpus: WriteCorpus) -> None:
    null = "__HIVE_DEFAULT_PARTITION__"
    write_corpus(f"lang=de/year=2023/code=007/none={null}/a.parquet", id=["a"], text=["x"])
    write_corpus(f"lang=f%20r/year={null}/code=1/none={null}/b.parquet", id=["b"], text=["y"])
    path = write_corpus(f"lang=1/year=-20/code=2/none={null}/c.parquet", id=["c"], text=["z"])
    rows, _ = read(path.parents[4])
    assert {row["doc_id"]: (row["lang"], row["year"], row["code"], row["none"]) for row in rows} == {
        "a": ("de", 2023, "007", None),
        "b": ("f r", None, "1", None),
        "c": ("1", -20, "2", None),
    }


def test_a_column_of_a_file_is_taken_and_not_the_value_of_its_folder_and_a_warning_says_so(
    write_corpus: WriteCorpus,
) -> None:
    folder = write_corpus("lang=de/n=x/a.parquet", id=["a"], text=["x"], lang=["fr"], n=[7]).parents[2]
    write_corpus("lang=en/b.parquet", id=["b"], text=["y"])
    found = checked(folder)
    assert [warning.partition(", and not")[0] for warning in found.scan.warnings] == [
        f"column {name!r} of {folder}/lang=de/n=x/a.parquet is taken" for name in ("lang", "n")
    ]
    assert [(row["lang"], row["n"]) for row in found.rows] == [("fr", 7), ("en", None)]


@pytest.mark.parametrize(("value", "kind"), [("late", "string"), ("1.5", "double")])
def test_a_value_that_does_not_fit_its_column_costs_its_row_alone(
    tmp_path: Path, value: str, kind: str
) -> None:
    (tmp_path / "a.csv").write_text(f"id,text,year\na,x,7\nb,x,{value}\nc,x,\n")
    found = checked(tmp_path, stored=[pa.field("year", pa.int64())])
    assert [row["year"] for row in found.rows] == [7, None]
    (rejected,) = found.rejected
    assert (rejected["doc_id"], rejected["reason"]) == ("b", "unfit_value")
    assert rejected["detail"] == (
        f"column 'year' must hold int64, got {kind} that does not fit; `cairn retype` to {kind} makes it fit"
    )


@pytest.mark.parametrize(
    ("ticks", "arrow_type"),
    [
        (253_402_300_799_000, pa.timestamp("ms", "Europe/Berlin")),
        (400_000_000_000, pa.timestamp("s")),
        (2_932_897, pa.date32()),
        (-719_163, pa.date32()),
        (-62_135_596_800_000_000, pa.timestamp("us", "America/New_York")),
    ],
)
def test_a_date_that_python_cannot_show_is_refused(
    write_corpus: WriteCorpus, ticks: int, arrow_type: pa.DataType
) -> None:
    integer = pa.int32() if arrow_type == pa.date32() else pa.int64()
    column = pa.array([ticks, 0], integer).cast(arrow_type)
    lists = pa.ListArray.from_arrays([0, 1, 2], column)
    for values in (column, lists):
        rows, rejected = read(write_corpus(id=["a", "b"], text=["x", "y"], until=values))
        assert [row["doc_id"] for row in rows] == ["b"]
        assert reasons(rejected) == [(0, "unshowable_date")]


def test_a_stray_table_is_left_out_by_name_and_refused_where_it_is_named(write_corpus: WriteCorpus) -> None:
    stray = write_corpus("bench/results.parquet", run=[1], seconds=[2.5])
    folder = stray.parents[1]
    (folder / "guide.md").write_text("# Guide\n\nText.")
    scan = scan_sources([str(folder)], CONFIG)
    assert [each.file.relative for each in scan.files] == ["guide.md"]
    assert scan.left_out.counts == {"tables without the id column 'id'": 1}
    assert str(stray) in scan.warnings[0]
    for sources in ([str(stray)], [str(stray.parent)]):
        with pytest.raises(
            SchemaError, match=r"id column 'id' must be there, got none in .*results\.parquet"
        ):
            scan_sources(sources, CONFIG)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CorpusConfig(id_prefix=True), {"doc_id": "docs/a.md", "year": 2024}),
        (CorpusConfig(metadata_columns=("",)), {"doc_id": "a.md"}),
        (CorpusConfig(metadata_columns=()), {"doc_id": "a.md"}),
        (CorpusConfig(metadata_columns=("year",)), {"doc_id": "a.md", "year": 2024}),
    ],
)
def test_ids_and_columns_are_as_asked(
    tmp_path: Path, config: CorpusConfig, expected: dict[str, object]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("---\nyear: 2024\n---\nText.")
    ((row,), _) = read(tmp_path / "docs", config=config)
    assert {name: row[name] for name in row if name in ("doc_id", "year")} == expected


def test_an_increment_without_rows_is_none_and_a_first_one_is_refused(tmp_path: Path) -> None:
    for name, text in (("a.csv", "id,text\n"), ("b.csv", ""), ("c.jsonl", "")):
        path = tmp_path / name
        path.write_text(text)
        scan = scan_sources([str(path)], CONFIG, stored=[pa.field("year", pa.int64())])
        assert scan.num_rows == 0
        assert [field.name for field in scan.metadata_fields] == ["year"]
        with pytest.raises(SourceError, match="must have at least one row"):
            scan_sources([str(path)], CONFIG)


def test_schema_fingerprint_follows_the_stored_columns_only(write_corpus: WriteCorpus) -> None:
    own = ({"year": [1]}, {"year": [1], "title": ["t"]}, {"year": ["1"]})
    paths = [write_corpus(f"{place}.parquet", id=["a"], text=["x"], **each) for place, each in enumerate(own)]
    first, second, third = (scan_sources([str(path)], CONFIG).schema_fingerprint for path in paths)
    assert first == second != third


def test_file_that_vanishes_after_the_scan_is_counted_row_by_row(write_corpus: WriteCorpus) -> None:
    path = write_corpus(id=["a", "b"], text=["x", "y"])
    scan = scan_sources([str(path)], CONFIG)
    path.unlink()
    (batch,) = read_checked(scan, CONFIG)
    assert reasons(batch.rejected.to_pylist()) == [(0, "damaged_rows"), (1, "damaged_rows")]
