import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.corpus.plain_columns import pieces, plain, value_bytes, without_views
from hypothesis import given
from hypothesis import strategies as st

STRINGS = pa.array(["a", None, "", "käse", "a"])
LISTS = pa.array([["a", None], None, [], ["käse", "b", "b"]], pa.list_(pa.string()))


def naive_bytes(value: str | list[str | None] | None) -> int:
    if isinstance(value, list):
        return sum(map(naive_bytes, value))
    return len((value or "").encode())


def as_dictionary_list(lists: pa.ListArray) -> pa.Array:
    return lists.cast(pa.list_(pa.dictionary(pa.int32(), pa.string())))


@pytest.mark.parametrize(
    "column",
    [
        STRINGS,
        STRINGS.slice(1, 3),
        STRINGS.cast(pa.large_string()),
        without_views(STRINGS.cast(pa.string_view())),
        without_views(LISTS.cast(pa.list_(pa.string_view()))),
        STRINGS.dictionary_encode(),
        STRINGS.dictionary_encode().slice(2),
        LISTS,
        LISTS.slice(1),
        LISTS.cast(pa.large_list(pa.string())),
        pa.nulls(3, pa.dictionary(pa.int32(), pa.string())),
        as_dictionary_list(LISTS),
        as_dictionary_list(LISTS).slice(1, 3),
    ],
)
def test_value_bytes_equals_the_bytes_of_the_plain_values(column: pa.Array) -> None:
    assert value_bytes(column).tolist() == [naive_bytes(value) for value in column.to_pylist()]


@pytest.mark.parametrize(
    ("column", "target"),
    [
        (STRINGS.dictionary_encode().slice(1), pa.large_string()),
        (without_views(STRINGS.cast(pa.string_view())), pa.string()),
        (as_dictionary_list(LISTS).slice(1), pa.list_(pa.string())),
        (LISTS.cast(pa.large_list(pa.string())), pa.list_(pa.string())),
        (pa.array([1, None], pa.int8()), pa.int64()),
        (pa.array([[1], None, [2, 3]], pa.list_(pa.int8())), pa.list_(pa.int32())),
        (pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)), pa.list_(pa.float64(), 2)),
        (pa.nulls(2), pa.string()),
    ],
)
def test_plain_keeps_values_and_gives_the_stored_type(column: pa.Array, target: pa.DataType) -> None:
    result = plain(column, target)
    assert result.type == target
    assert result.to_pylist() == column.to_pylist()


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_pieces_cover_all_rows_and_keep_to_the_budget(sizes: list[int], budget: int) -> None:
    cut = list(pieces(np.array(sizes, np.int64), budget))
    assert [row for start, stop in cut for row in range(start, stop)] == list(range(len(sizes)))
    assert all(sum(sizes[start:stop]) <= budget or stop == start + 1 for start, stop in cut)
