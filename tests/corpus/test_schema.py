from typing import Any

import pyarrow as pa
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats import PARQUET
from cairn.pipeline.corpus.formats.format import SourceFile
from cairn.pipeline.corpus.schema import CorpusSchema, agree_on_schema, stored_type, widened
from cairn.pipeline.errors import SchemaError
from pyarrow.fs import LocalFileSystem

BASE = {"id": pa.string(), "text": pa.string()}


def agree(
    *schemas: dict[str, pa.DataType],
    partitions: tuple[tuple[tuple[str, str | None], ...], ...] | None = None,
    **config: Any,
) -> CorpusSchema:
    values = partitions or ((),) * len(schemas)
    files = [
        (
            SourceFile(
                filesystem=LocalFileSystem(),
                path=f"/{i}",
                name=f"{i}.parquet",
                source="",
                format=PARQUET,
                partitions=values[i],
            ),
            pa.schema([*schema.items()]),
        )
        for i, schema in enumerate(schemas)
    ]
    return agree_on_schema(files, CorpusConfig(**config))


def fields(schema: CorpusSchema) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in schema.metadata_fields}


@pytest.mark.parametrize(
    "id_type",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.int32(),
        pa.uint64(),
        pa.dictionary(pa.int8(), pa.string()),
    ],
)
def test_id_of_string_or_integer_type_is_accepted(id_type: pa.DataType) -> None:
    assert agree({"id": id_type, "text": pa.string()}).roles["doc_id"] == "id"


@pytest.mark.parametrize("id_type", [pa.float64(), pa.binary(), pa.bool_(), pa.list_(pa.string())])
def test_id_of_other_type_is_refused(id_type: pa.DataType) -> None:
    with pytest.raises(SchemaError, match="id column 'id' must be of type string or integer"):
        agree({"id": id_type, "text": pa.string()})


def test_missing_column_error_lists_columns_and_suggests_the_closest() -> None:
    with pytest.raises(
        SchemaError, match=r"which has: body, id, texts; did you mean 'texts'\? .*--text-column"
    ):
        agree({"id": pa.string(), "texts": pa.string(), "body": pa.string()})


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.int8(), pa.int64(), pa.int64()),
        (pa.uint8(), pa.int8(), pa.int16()),
        (pa.uint32(), pa.int64(), pa.int64()),
        (pa.uint64(), pa.int64(), None),
        (pa.uint8(), pa.uint32(), pa.uint32()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.int32(), pa.float64(), None),
        (pa.null(), pa.string(), pa.string()),
        (pa.string(), pa.int64(), None),
        (pa.list_(pa.int8()), pa.list_(pa.int32()), pa.list_(pa.int32())),
        (pa.timestamp("s"), pa.timestamp("us"), None),
    ],
)
def test_widened_is_symmetric_and_loses_nothing(
    first: pa.DataType, second: pa.DataType, expected: pa.DataType | None
) -> None:
    assert widened(first, second) == expected
    assert widened(second, first) == expected


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (pa.dictionary(pa.int32(), pa.string()), pa.string()),
        (pa.large_string(), pa.string()),
        (pa.large_list(pa.string_view()), pa.list_(pa.string())),
        (pa.list_(pa.float32(), 3), pa.list_(pa.float32(), 3)),
        (pa.decimal128(9, 2), pa.decimal128(9, 2)),
        (pa.struct([("a", pa.int8())]), None),
        (pa.map_(pa.string(), pa.int8()), None),
        (pa.binary(), None),
        (pa.list_(pa.list_(pa.int8())), None),
        (pa.time32("s"), None),
    ],
)
def test_stored_type_keeps_flat_values_only(given: pa.DataType, kept: pa.DataType | None) -> None:
    assert stored_type(given) == kept


@pytest.mark.parametrize(
    "left_out", [{"nested": pa.struct([("a", pa.int8())])}, {"void": pa.null()}, {"a.b": pa.int8()}]
)
def test_column_that_cannot_be_stored_is_left_out_with_a_warning(left_out: dict[str, pa.DataType]) -> None:
    schema = agree({**BASE, **left_out})
    assert fields(schema) == {}
    assert len(schema.warnings) == 1
    assert next(iter(left_out)) in schema.warnings[0]


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        ({"year": pa.int64()}, {}, r"'year'.*none in 1\.parquet"),
        ({}, {"year": pa.int64()}, r"'year'.*got it in 1\.parquet"),
        ({"year": pa.int64()}, {"year": pa.float64()}, r"'year'.*double in 1\.parquet and int64"),
    ],
    ids=["missing", "added", "of another type"],
)
def test_drift_of_a_later_file_names_file_and_column(
    first: dict[str, pa.DataType], second: dict[str, pa.DataType], sentence: str
) -> None:
    with pytest.raises(SchemaError, match=sentence):
        agree({**BASE, **first}, {**BASE, **second})
    assert fields(agree({**BASE, **first, "x": pa.int8()}, {**BASE, **second}, metadata_columns=())) == {}


def test_column_that_cannot_be_stored_but_is_named_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"'blob' of 0\.parquet cannot be stored: its type is binary"):
        agree({**BASE, "blob": pa.binary()}, metadata_columns=("blob",))


@pytest.mark.parametrize("name", ["vector", "doc_id", "_score"])
def test_reserved_metadata_name_is_refused_with_a_way_out(name: str) -> None:
    with pytest.raises(SchemaError, match=f"'{name}'.*--metadata"):
        agree({**BASE, name: pa.string()})


def test_reserved_name_left_out_of_the_metadata_is_fine() -> None:
    assert fields(agree({**BASE, "vector": pa.string(), "year": pa.int8()}, metadata_columns=("year",))) == {
        "year": pa.int8()
    }


def test_metadata_column_that_has_a_role_is_not_stored_twice() -> None:
    schema = agree(BASE, metadata_columns=("id",))
    assert fields(schema) == {}
    assert "not stored twice" in schema.warnings[0]


def test_columns_that_filters_cannot_name_are_kept_and_named_in_one_warning() -> None:
    others = {"price": pa.decimal128(5, 2), "axis": pa.list_(pa.float32(), 3)}
    schema = agree({**BASE, **others, "tags": pa.list_(pa.string())})
    assert fields(schema) == {**others, "tags": pa.list_(pa.string())}
    assert [warning.partition(";")[0] for warning in schema.warnings] == [
        "filters cannot name 'price' (decimal128(5, 2)), 'axis' (fixed_size_list<item: float>[3])"
    ]


def test_repeated_column_name_is_refused() -> None:
    file = SourceFile(filesystem=LocalFileSystem(), path="/a", name="a.parquet", source="", format=PARQUET)
    with pytest.raises(SchemaError, match=r"'text' more than once in a\.parquet"):
        agree_on_schema(
            [(file, pa.schema([("id", pa.string()), ("text", pa.string()), ("text", pa.string())]))],
            CorpusConfig(),
        )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("1", "-20"), pa.int64()),
        (("1", "x"), pa.string()),
        (("007", "1"), pa.string()),
        (("1", None), pa.int64()),
        ((None, None), pa.string()),
    ],
)
def test_partition_type_is_integer_when_every_value_is_one(
    values: tuple[str | None, ...], expected: pa.DataType
) -> None:
    schema = agree(BASE, BASE, partitions=((("k", values[0]),), (("k", values[1]),)))
    assert fields(schema) == {"k": expected}
    assert schema.partition_keys == {"k"}
