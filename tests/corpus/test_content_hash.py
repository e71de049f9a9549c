import datetime as dt
import hashlib
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from cairn.pipeline.corpus.content_hash import content_hashes


def framed(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value


def naive(row: dict[str, Any], kinds: dict[str, bytes]) -> str:
    out = b""
    for name in [
        *(role for role in ("title", "text", "query") if role in row),
        *sorted(set(row) - {"title", "text", "query"}),
    ]:
        value = row[name]
        if value is None:
            continue
        out += framed(name.encode()) + kinds[name]
        if isinstance(value, list):
            out += framed(
                b"".join(b"\xff" * 8 if item is None else framed(str(item).encode()) for item in value)
            )
        else:
            out += framed(str(value).encode())
    return hashlib.sha256(out).hexdigest()


def test_content_hashes_equal_the_naive_reference() -> None:
    columns = {
        "text": pa.array(["one", "two", "drei ü"], pa.large_string()),
        "title": pa.array(["a", None, ""]),
        "year": pa.array([1, None, -7], pa.int16()),
        "tags": pa.array([["x", None, "y"], [], None], pa.list_(pa.string())),
        "price": pa.array([Decimal("1.50"), None, Decimal("2.00")], pa.decimal128(9, 2)),
    }
    kinds = {"text": b"s", "title": b"s", "year": b"i", "tags": b"ls", "price": b"d"}
    rows = [
        dict(zip(columns, values, strict=True))
        for values in zip(*(column.to_pylist() for column in columns.values()), strict=True)
    ]
    assert content_hashes(columns) == [naive(row, kinds) for row in rows]


def one(**columns: pa.Array) -> str:
    return content_hashes({"text": pa.array(["t"], pa.large_string()), **columns})[0]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"a": pa.array(["xy"]), "b": pa.array(["z"])}, {"a": pa.array(["x"]), "b": pa.array(["yz"])}),
        ({"a": pa.array(["1"])}, {"a": pa.array([1])}),
        ({"a": pa.array([0.1])}, {"a": pa.array([0.1000001])}),
        ({"a": pa.array(["1"])}, {"b": pa.array(["1"])}),
        ({"a": pa.array([""])}, {"a": pa.array([None], pa.string())}),
        ({"a": pa.array([["x", "y"]])}, {"a": pa.array([["xy"]])}),
        ({"a": pa.array([[]], pa.list_(pa.string()))}, {"a": pa.array([None], pa.list_(pa.string()))}),
        ({"a": pa.array([[None]], pa.list_(pa.string()))}, {"a": pa.array([[""]], pa.list_(pa.string()))}),
        ({"a": pa.array([1], pa.timestamp("s"))}, {"a": pa.array([1], pa.timestamp("ms"))}),
        ({"a": pa.array([1], pa.timestamp("s"))}, {"a": pa.array([1], pa.timestamp("s", "UTC"))}),
        ({"title": pa.array(["x"])}, {"query": pa.array(["x"])}),
    ],
)
def test_content_hash_tells_different_contents_apart(
    left: dict[str, pa.Array], right: dict[str, pa.Array]
) -> None:
    assert one(**left) != one(**right)


def test_content_hash_ignores_storage() -> None:
    numbers = {"a": pa.array([7], pa.int8()), "b": pa.array([0.5], pa.float32())}
    wider = {"c": pa.array([None], pa.string()), "b": pa.array([0.5]), "a": pa.array([7])}
    assert one(**numbers) == one(**wider)


def test_content_hash_of_a_slice_is_that_of_its_rows() -> None:
    column = pa.array(["a", "b", "c", None, "e"], pa.large_string())
    lists = pa.array([["a"], [], ["b", "c"], None, ["d"]], pa.list_(pa.string()))
    whole = content_hashes({"text": column, "l": lists})
    assert content_hashes({"text": column.slice(1, 3), "l": lists.slice(1, 3)}) == whole[1:4]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([True, False]),
        pa.array([1.5, 2.5], pa.float16()),
        pa.array([dt.date(2024, 1, 1), dt.date(9999, 12, 31)]),
        pa.array([2**31 - 1, -(2**31)], pa.int32()).cast(pa.date32()),
        pa.array([86_400_000, 0], pa.int64()).cast(pa.date64()),
        pa.array([2**63 - 1, 0], pa.timestamp("ns", "Europe/Berlin")),
        pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        pa.array([2**64 - 1, 0], pa.uint64()),
    ],
)
def test_content_hash_takes_every_kept_type(column: pa.Array) -> None:
    first, second = content_hashes({"text": pa.array(["t", "t"], pa.large_string()), "m": column})
    assert first != second
