from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats import PARQUET
from cairn.pipeline.corpus.formats.format import SourceFile
from cairn.pipeline.corpus.scan import scan_sources
from cairn.pipeline.corpus.schema import MAX_METADATA_COLUMNS, CorpusSchema, agree_on_schema
from cairn.pipeline.errors import SchemaError
from pyarrow.fs import LocalFileSystem

from tests.corpus.checked_rows import read

BASE = {"id": pa.string(), "text": pa.string()}


def agree(
    *schemas: dict[str, pa.DataType],
    stored: tuple[pa.Field, ...] | None = None,
    **config: Any,
) -> CorpusSchema:
    made = [pa.schema([*schema.items()]) for schema in schemas]
    files = [(parquet(f"{place}.parquet"), schema) for place, schema in enumerate(made)]
    return agree_on_schema(files, CorpusConfig(**config), stored)


def parquet(name: str) -> SourceFile:
    return SourceFile(filesystem=LocalFileSystem(), path=f"/{name}", name=name, source="", format=PARQUET)


def fields(schema: CorpusSchema) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in schema.metadata_fields}


def test_a_file_of_which_the_id_cannot_be_one_is_quarantined_and_the_others_read(tmp_path: Path) -> None:
    for name, ids in (("a", [b"bin"]), ("b", [1.5]), ("c", ["kept"])):
        pq.write_table(pa.table({"id": ids, "text": ["text"]}), tmp_path / f"{name}.parquet")
    rows, rejected = read(tmp_path)
    assert [row["doc_id"] for row in rows] == ["kept"]
    assert [(each["reason"], each["detail"].partition("; ")[0]) for each in rejected] == [
        ("damaged_file", f"id column 'id' must be of type string or integer, got {kind} in {tmp_path}/{name}")
        for kind, name in (("binary", "a.parquet"), ("double", "b.parquet"))
    ]
    with pytest.raises(SchemaError, match="got double in"):
        read(tmp_path / "b.parquet", tmp_path / "c.parquet")


DECIMAL = pa.decimal128(5, 2)


@pytest.mark.parametrize(
    ("schemas", "kept", "told"),
    [
        ([{"tag": pa.large_string()}, {"tag": pa.string()}], {"tag": pa.string()}, []),
        ([{"nested": pa.struct([("a", pa.int8())])}], {}, ["column 'nested' of 0.parquet cannot be stored"]),
        ([{"void": pa.null()}], {}, ["column 'void' of 0.parquet cannot be stored: it is null throughout"]),
        (
            [{"void": pa.list_(pa.null())}],
            {},
            ["column 'void' of 0.parquet cannot be stored: all of its lists"],
        ),
        ([{"a.b": pa.int8()}], {}, ["column 'a.b' of 0.parquet cannot be stored: a name must not be"]),
        ([{"a`b": pa.int8()}], {}, ["column 'a`b' of 0.parquet cannot be stored: a name must not be"]),
        ([{"a\0": pa.int8()}], {}, ["column 'a\\x00' of 0.parquet cannot be stored: a name must not be"]),
        ([{"*": pa.int8()}], {}, ["column '*' of 0.parquet cannot be stored: a name must not be"]),
        (
            [{"at": pa.timestamp("s", "Nowhere/City")}],
            {},
            ["column 'at' of 0.parquet cannot be stored: its type"],
        ),
        ([{"title": pa.null()}], {}, []),
        ([{"title": pa.int64()}], {}, []),
        ([{"title": pa.float64()}], {}, []),
        ([{"title": pa.bool_()}], {}, []),
        (
            [{"price": DECIMAL, "cost": DECIMAL, "tags": pa.list_(pa.string())}],
            {"price": DECIMAL, "cost": DECIMAL, "tags": pa.list_(pa.string())},
            ["filters cannot name 'price' (decimal128(5, 2)), 'cost' (decimal128(5, 2)); the values"],
        ),
    ],
)
def test_columns_are_kept_as_a_plain_type_or_left_out_with_a_warning(
    schemas: list[dict[str, pa.DataType]], kept: dict[str, pa.DataType], told: list[str]
) -> None:
    schema = agree(*({**BASE, **each} for each in schemas))
    assert fields(schema) == kept
    assert [warning[: len(start)] for warning, start in zip(schema.warnings, told, strict=True)] == told
    title = {"title": "title"} if "title" in schemas[0] else {}
    assert schema.columns[0] == {"doc_id": "id", "text": "text", **title, **{name: name for name in kept}}


@pytest.mark.parametrize(
    ("own", "config", "sentence"),
    [
        (
            {"Texts": pa.string(), "body": pa.string()},
            {},
            r"which has: Texts, body, id; did you mean 'Texts'\? .*--text-column",
        ),
        (
            {**BASE, "blob": pa.binary()},
            {"metadata_columns": ("blob",)},
            r"'blob' of 0\.parquet cannot be stored: its type is binary",
        ),
    ],
)
def test_a_column_that_is_asked_for_and_missing_or_of_no_use_is_refused(
    own: dict[str, pa.DataType], config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(SchemaError, match=sentence):
        agree({"id": pa.string(), **own}, **config)


def test_a_column_has_the_type_that_holds_the_values_of_all_files_and_may_be_missing() -> None:
    schema = agree(
        {**BASE, "year": pa.int64(), "code": pa.int64(), "a": pa.struct([("x", pa.int8())])},
        {**BASE, "year": pa.float64(), "code": pa.string(), "b": pa.int8(), "a": pa.string()},
    )
    assert fields(schema) == {"year": pa.float64(), "code": pa.string(), "a": pa.string(), "b": pa.int8()}
    assert [sorted({*each} - {"doc_id", "text"}) for each in schema.columns if each] == [
        ["code", "year"],
        ["a", "b", "code", "year"],
    ]
    mixed = "column 'code' holds numbers and texts, as in 0.parquet"
    assert schema.warnings == (
        f"{mixed}: all are kept as texts, and filters compare them as such",
        "values of column 'a' in 0.parquet are left out: its type is struct<x: int8>",
    )


@pytest.mark.parametrize("mark", [b"decimals", b"cairn.decimals"])
def test_metadata_of_a_parquet_column_does_not_tell_its_type(tmp_path: Path, mark: bytes) -> None:
    marked = pa.field("x", pa.float64(), metadata={mark: b"2 \xff 3:1: 3:2:last"})
    schema = pa.schema([*BASE.items(), marked])
    pq.write_table(pa.table({"id": ["a"], "text": ["t"], "x": [3.1]}, schema), tmp_path / "a.parquet")
    assert read(tmp_path)[0][0]["x"] == 3.1


@pytest.mark.parametrize("kept", [pa.float64(), pa.list_(pa.float64())])
def test_versions_that_go_into_a_stored_column_of_numbers_are_warned_of(
    tmp_path: Path, kept: pa.DataType
) -> None:
    (tmp_path / "a.csv").write_text("id,text,v\n1,t,3.9\n2,t,3.10\n")
    (warning,) = scan_sources([str(tmp_path)], CorpusConfig(), stored=[pa.field("v", kept)]).warnings
    assert "3.10 becomes 3.1; `cairn retype` it to" in warning
    (tmp_path / "a.csv").write_text("id,text,v\n1,t,3.9\n2,t,x\n")
    assert scan_sources([str(tmp_path)], CorpusConfig(), stored=[pa.field("v", kept)]).warnings == ()


def test_a_column_of_many_decimals_is_one_of_numbers_however_its_rows_are_cut_into_files(
    tmp_path: Path,
) -> None:
    rows = [f"{place},t,{place}.5{'0' * (place == 999)}" for place in range(1_001)] + ["x,t,999.5"]
    for cut in (len(rows), 600):
        folder = tmp_path / str(cut)
        folder.mkdir()
        for begin in range(0, len(rows), cut):
            (folder / f"{begin}.csv").write_text("\n".join(["id,text,v", *rows[begin : begin + cut]]))
        assert scan_sources([str(folder)], CorpusConfig()).metadata_fields == (pa.field("v", pa.float64()),)


def test_a_column_that_gives_way_to_another_is_left_out_alone() -> None:
    own = {"id": pa.string(), "metadata_doc_id": pa.string(), "doc_id": pa.string()}
    assert agree(own, text_column="metadata_doc_id").columns == (
        {"doc_id": "id", "text": "metadata_doc_id", "metadata_doc_id": "doc_id"},
    )
    (columns,) = agree({**BASE, **own}).columns
    assert columns is not None
    assert columns["metadata_doc_id"] == "metadata_doc_id"


def test_stored_columns_keep_their_place_and_type_and_further_ones_follow() -> None:
    stored = (pa.field("price", pa.float64()), pa.field("tags", pa.list_(pa.string())))
    schema = agree(
        {**BASE, "new": pa.int64(), "price": pa.int64(), "tags": pa.list_(pa.null())}, stored=stored
    )
    assert fields(schema) == {"price": pa.float64(), "tags": pa.list_(pa.string()), "new": pa.int64()}
    assert schema.columns[0] is not None
    assert {"price", "tags", "new"} <= {*schema.columns[0]}
    assert fields(agree({**BASE, "new": pa.int64()}, stored=stored, metadata_columns=())) == {
        field.name: field.type for field in stored
    }


@pytest.mark.parametrize(
    ("own", "config", "kept"),
    [
        ({"doc_id": pa.string(), "_rowaddr": pa.int8()}, {}, {"metadata_doc_id", "metadata__rowaddr"}),
        ({"full": pa.string(), "title": pa.string()}, {"text_column": "full"}, {"metadata_text"}),
        ({"head": pa.string(), "title": pa.string()}, {"title_column": "head"}, {"metadata_title"}),
        ({"doc_id": pa.string(), "metadata_doc_id": pa.int8()}, {}, {"metadata_doc_id"}),
        ({"vector": pa.list_(pa.float32(), 2)}, {}, set[str]()),
        ({"vector": pa.string(), "year": pa.int8()}, {"metadata_columns": ("year",)}, {"year"}),
    ],
)
def test_a_name_of_cairns_own_refuses_no_corpus(
    own: dict[str, pa.DataType], config: dict[str, Any], kept: set[str]
) -> None:
    schema = agree({**BASE, **own}, **config)
    assert {*fields(schema)} == kept
    assert schema.columns[0] is not None
    source = next((name for name in ("metadata_doc_id", "doc_id") if name in own), None)
    assert schema.columns[0].get("metadata_doc_id") == source
    assert len(schema.warnings) == len(kept - {"year"}) + (own.keys() == {"vector"})


def test_metadata_column_that_has_a_role_is_not_stored_twice() -> None:
    schema = agree(BASE, metadata_columns=("id",))
    assert fields(schema) == {}
    assert "not stored twice" in schema.warnings[0]


def test_repeated_column_name_is_refused_where_it_has_a_role_and_left_out_elsewhere() -> None:
    file = parquet("a.parquet")
    twice = [pa.field("id", pa.string()), pa.field("text", pa.string()), pa.field("x", pa.int8())] * 2
    with pytest.raises(SchemaError, match=r"'id' more than once in a\.parquet"):
        agree_on_schema([(file, pa.schema(twice))], CorpusConfig())
    titles = [pa.field("title", pa.string())] * 2
    schema = agree_on_schema([(file, pa.schema(twice[:2] + titles))], CorpusConfig())
    assert schema.columns == ({"doc_id": "id", "text": "text"},)
    assert "column 'title'" in schema.warnings[0]
    schema = agree_on_schema([(file, pa.schema(twice[:3] + twice[2:3]))], CorpusConfig())
    assert fields(schema) == {}
    assert schema.warnings == (
        "column 'x' of a.parquet cannot be stored: its name stands more than once; it is left out",
    )


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            CorpusConfig(id_column="name"),
            "^text column 'text' must be there, got none in .*/b.csv, which has",
        ),
        (CorpusConfig(text_column="body"), "^id column 'id' must be there, got none in .*/b.csv, which has"),
        (CorpusConfig(id_column="slug"), "^id column 'slug' must be there, got none in .*/a.md and 1 more"),
    ],
)
def test_a_column_that_is_asked_for_and_stands_in_a_table_without_another_names_the_other(
    tmp_path: Path, config: CorpusConfig, sentence: str
) -> None:
    (tmp_path / "a.md").write_text("Hens.")
    (tmp_path / "b.csv").write_text("name,body\n1,Pigs\n")
    with pytest.raises(SchemaError, match=sentence):
        scan_sources([str(tmp_path)], config)


def test_sources_that_bring_more_columns_than_a_collection_may_have_are_refused() -> None:
    wide = {f"column_{number}": pa.int64() for number in range(MAX_METADATA_COLUMNS + 1)}
    stored = tuple(pa.field(*column) for column in wide.items())
    with pytest.raises(SchemaError, match=r"at most 1,000 metadata columns, got 1 new ones beside 1,000;"):
        agree({**BASE, **wide}, stored=stored[:-1])
    with pytest.raises(SchemaError, match=r"got 1,001 new ones beside 0; keep fewer with --metadata-columns"):
        agree({**BASE, **wide})
    assert len(fields(agree({**BASE, **wide}, metadata_columns=["column_7"]))) == 1
    assert len(fields(agree({**BASE, **wide}, stored=stored))) == len(wide), "it has them already"
