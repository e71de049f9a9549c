import datetime as dt
import operator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.errors import FilterError, TryAgainError
from cairn.pipeline.index.generation import Generation, open_generation
from cairn.pipeline.search.filters import (
    ColumnTest,
    allowed_documents,
    compile_filter,
    filterable_columns,
    matching_documents,
    parse_filter,
    text_order_warnings,
)
from cairn.pipeline.search.searcher import Searcher
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}


def read_value(column: Any, value: Any) -> Any:
    """Give a filter's value the type of the stored one it meets."""
    if isinstance(column, dt.datetime) and isinstance(value, str):
        value = dt.datetime.fromisoformat(value)
        return value.replace(tzinfo=dt.UTC) if column.tzinfo and not value.tzinfo else value
    if isinstance(column, dt.date) and isinstance(value, str):
        return dt.date.fromisoformat(value)
    return value


def matches(tree: dict[str, Any], row: dict[str, Any]) -> bool:
    if not {"key", "filters"} & tree.keys():
        return all(matches_plain(row[key], value) for key, value in tree.items())
    if tree["type"] in ("and", "or"):
        return (all if tree["type"] == "and" else any)(matches(child, row) for child in tree["filters"])
    column = row[tree["key"]]
    if tree["type"] in ("is_null", "is_not_null"):
        return (column is None) == (tree["type"] == "is_null")
    if column is None:
        return False
    if tree["type"] == "contains":
        return tree["value"] in column
    if isinstance(column, list):
        return any(value in column for value in tree["value"]) == (tree["type"] == "in")
    if tree["type"] in ("in", "nin"):
        return (column in [read_value(column, value) for value in tree["value"]]) == (tree["type"] == "in")
    return COMPARE[tree["type"]](column, read_value(column, tree["value"]))


def matches_plain(column: Any, value: Any) -> bool:
    if value is None or column is None:
        return column is value
    wanted = value if isinstance(value, list) else [value]
    return any(one in column for one in wanted) if isinstance(column, list) else column in wanted


@pytest.fixture(scope="session")
def generation(stones) -> Generation:
    return open_generation(stones.layout)


@pytest.fixture(scope="session")
def rows(generation: Generation) -> list[dict[str, Any]]:
    """Rows as stored: floats in the column's own precision."""
    columns = list(filterable_columns(generation.document_schema))
    return generation.fetch_documents(range(generation.num_documents), columns).to_pylist()


def filtered_ids(generation: Generation, tree: dict[str, Any]) -> list[str]:
    positions = allowed_documents(generation, compile_filter(tree, generation.document_schema), None)
    return [generation.doc_ids[position].as_py() for position in positions]


def leaf(kind: str, key: str, value: Any) -> dict[str, Any]:
    return {"type": kind, "key": key, "value": value}


def null(kind: str, key: str) -> dict[str, Any]:
    return {"type": kind, "key": key}


COMPARED = [
    ("doc_id", "doc-0-017"),
    ("title", "Title 2"),
    ("source_file", "part-1.parquet"),
    ("cluster_id", 2),
    ("num_tokens", 20.5),
    ("year", 1993),
    ("price", 3),
    ("lang", "it's"),
    ("day", "2020-02-01"),
    ("seen_at", "2020-02-02T12:00:00Z"),
    ("seen_at", "2020-02-02T17:00:00+05:00"),
    ("seen_at", "2020-02-02T12:00:00"),
    ("made_at", "2020-02-02T12:00:00"),
    ("Odd name", "o1"),
]
LISTED = [
    ("year", [1991, 1996, 3000]),
    ("is_open", [True]),
    ("lang", ["NULL", "日本語"]),
    ("day", ["2020-01-05"]),
]


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        *((kind, *asked) for kind in COMPARE for asked in COMPARED),
        *((kind, *asked) for kind in ("in", "nin") for asked in LISTED),
    ],
)
def test_filter_of_stored_rows_equals_python(
    generation: Generation, rows: list[dict[str, Any]], kind: str, key: str, value: Any
) -> None:
    expected = [row["doc_id"] for row in rows if matches(leaf(kind, key, value), row)]
    assert filtered_ids(generation, leaf(kind, key, value)) == expected


def test_column_too_large_for_memory_is_asked_in_the_table(
    generation: Generation, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.pipeline.index.generation.MAX_COLUMN_BYTES", 0)
    opened = open_generation(generation.layout)
    for tree in ({"lang": "it's"}, {"lang": ["NULL", "日本語"]}, {"year": 1993}):
        assert filtered_ids(opened, tree) == [row["doc_id"] for row in rows if matches(tree, row)]
    assert (opened.column_values("lang"), opened.column_values("year")) == (None, None)


def test_filter_asked_again_finds_the_same(generation: Generation, rows: list[dict[str, Any]]) -> None:
    opened = open_generation(generation.layout)
    two, three = {"cluster_id": 2}, {"cluster_id": 3}
    expected = {
        each: [place for place, row in enumerate(rows) if row["cluster_id"] == each] for each in (2, 3)
    }
    for _ in range(2):
        for filters, restriction, found in (
            (two, None, expected[2]),
            (None, two, expected[2]),
            (three, None, expected[3]),
            (three, two, []),
            ({"cluster_id": [2, 3]}, three, expected[3]),
        ):
            positions = matching_documents(opened, filters, restriction)
            assert positions is not None
            assert positions.tolist() == found


def test_filters_that_leave_nothing_are_kept_within_bounds(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.pipeline.index.generation.MAX_MATCHES_BYTES", 10_000)
    opened = open_generation(generation.layout)
    asked = [{"cluster_id": number} for number in range(100, 150)]
    for each in asked:
        matching_documents(opened, each, None)
    kept = [each for each in asked if opened.matches.get(repr((each, None))) is not None]
    assert kept == asked[-len(kept) :]
    assert len(kept) <= 16


def test_filter_waits_for_no_search_that_reads_its_column(
    generation: Generation, rows: list[dict[str, Any]]
) -> None:
    opened, tree = open_generation(generation.layout), {"lang": "it's"}
    expected = [row["doc_id"] for row in rows if matches(tree, row)]
    with opened._values[0]:
        assert filtered_ids(opened, tree) == expected
    assert opened.column_values("lang") is not None
    with opened._values[0]:
        assert filtered_ids(opened, tree) == expected


NASTY_TEXT = st.one_of(
    st.sampled_from(
        [
            "it's",
            "x' OR 1=1 --",
            "'; DROP TABLE documents; --",
            "`tick`",
            "NULL",
            "\x00",
            "100%",
            "日本語",
            "\\",
        ]
    ),
    st.text(max_size=8),
)
TAG = st.sampled_from(["a", "b", "it's"])
PLAIN = {
    "year": st.none() | st.integers(1989, 1997) | st.lists(st.integers(1989, 1997), min_size=1),
    "lang": st.none() | NASTY_TEXT,
    "sizes": st.none() | st.integers(0, 9),
}
LEAVES = st.one_of(
    st.builds(
        leaf,
        st.sampled_from(list(COMPARE)),
        st.just("year"),
        st.one_of(st.integers(1985, 2000), st.floats(1985, 2000)),
    ),
    st.builds(
        leaf,
        st.sampled_from(list(COMPARE)),
        st.sampled_from(["num_tokens", "price", "cluster_id"]),
        st.integers(-5, 30),
    ),
    st.builds(
        leaf, st.sampled_from(list(COMPARE)), st.sampled_from(["lang", "Odd name", "title"]), NASTY_TEXT
    ),
    st.builds(
        leaf, st.sampled_from(["in", "nin"]), st.just("lang"), st.lists(NASTY_TEXT, min_size=1, max_size=4)
    ),
    st.builds(leaf, st.sampled_from(["eq", "ne"]), st.just("is_open"), st.booleans()),
    st.builds(leaf, st.just("contains"), st.sampled_from(["lang", "title"]), NASTY_TEXT),
    st.builds(leaf, st.just("contains"), st.just("tags"), TAG),
    st.builds(leaf, st.sampled_from(["in", "nin"]), st.just("tags"), st.lists(TAG, min_size=1, max_size=3)),
    st.builds(
        leaf,
        st.sampled_from(["in", "nin"]),
        st.just("sizes"),
        st.lists(st.integers(0, 9) | st.sampled_from([0.5, 7.1]), min_size=1, max_size=3),
    ),
    st.builds(
        null,
        st.sampled_from(["is_null", "is_not_null"]),
        st.sampled_from(["year", "title", "tags", "sizes", "is_open"]),
    ),
    st.dictionaries(st.just("tags"), st.none() | TAG | st.lists(TAG, min_size=1, max_size=3), min_size=1),
    st.fixed_dictionaries({}, optional=PLAIN).filter(bool),
    st.builds(
        leaf,
        st.sampled_from(list(COMPARE)),
        st.just("day"),
        st.dates(dt.date(2019, 12, 1), dt.date(2020, 4, 1)).map(str),
    ),
)
TREES = st.recursive(
    LEAVES,
    lambda children: st.builds(
        lambda kind, filters: {"type": kind, "filters": filters},
        st.sampled_from(["and", "or"]),
        st.lists(children, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@settings(derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(tree=TREES)
def test_any_tree_finds_exactly_what_python_finds(
    generation: Generation, rows: list[dict[str, Any]], tree: dict[str, Any]
) -> None:
    assert filtered_ids(generation, tree) == [row["doc_id"] for row in rows if matches(tree, row)]


def nested(depth: int) -> dict[str, Any]:
    tree = leaf("eq", "year", 1)
    for _ in range(depth - 1):
        tree = {"type": "and", "filters": [tree]}
    return tree


def deep_list(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("tree", "word"),
    [
        ("year = 1", "object"),
        ([], "object"),
        ({}, "type"),
        ({"yaer": 1993}, "must be one of doc_id"),
        ({"year": "1993"}, "must be a number"),
        ({"year": []}, "list of 1 to 1,000"),
        ({"year": {"$gte": 1990}}, "a value or a list of them, got a dict"),
        ({"tags": 3}, "must be a string"),
        ({3: 3}, "must be one of doc_id"),
        (leaf("contains", "year", 1), "text or lists, got 'year'"),
        (leaf("in", "sizes", ["a"]), "must be a number"),
        (leaf("gt", "sizes", 1), "holds lists"),
        ({"type": "is_null", "key": "year", "value": 1}, "exactly the fields"),
        ({"type": "like", "key": "lang", "value": "x"}, "must be one of eq"),
        ({"type": ["eq"], "key": "lang", "value": "x"}, "must be one of eq"),
        ({"type": "eq", "key": "lang"}, "exactly the fields"),
        ({"type": "eq", "key": "lang", "value": "x", "sql": "1=1"}, "exactly the fields"),
        ({"type": "and", "filters": []}, "at least one"),
        ({"type": "or", "filters": {"type": "eq"}}, "at least one"),
        (leaf("eq", "vector", 1), "must be one of doc_id"),
        (leaf("eq", "text", "x"), "must be one of doc_id"),
        (leaf("eq", "tags", "a"), "holds lists and must be asked with contains"),
        (leaf("eq", "content_sha256", "x"), "must be one of doc_id"),
        (leaf("eq", {"a": 1}, 1), "must be one of doc_id"),
        (leaf("eq", "year", "1993"), "must be a number"),
        (leaf("eq", "year", True), "must be a number"),
        (leaf("eq", "year", None), "must be a number"),
        (leaf("eq", "year", float("nan")), "finite"),
        (leaf("eq", "year", 2**63), "64 bits"),
        (leaf("eq", "year", 10**5000), "64 bits"),
        (leaf("gt", "price", -(2**63) - 1), "64 bits"),
        (leaf("eq", "year", deep_list(5000)), "must be a number"),
        (leaf("eq", "lang", 1), "must be a string"),
        (leaf("eq", "lang", "\ud800"), "surrogate"),
        (leaf("eq", "lang", "x" * 9000), "8,192 bytes"),
        (leaf("eq", "is_open", 1), "true or false"),
        (leaf("gt", "is_open", True), "eq, ne, in or nin"),
        (leaf("eq", "day", "31/05/2024"), "2024-05-31"),
        (leaf("eq", "day", dt.datetime(2024, 1, 1, tzinfo=dt.UTC)), "2024-05-31"),
        (leaf("eq", "seen_at", "yesterday"), "must read like 2024-05-31T08:30:00Z, got"),
        (leaf("eq", "made_at", "yesterday"), "must read like 2024-05-31T08:30:00, got"),
        (leaf("eq", "made_at", "2020-01-01T00:00:00Z"), "no UTC offset"),
        (leaf("in", "year", 1993), "list of 1 to 1,000"),
        (leaf("in", "year", []), "list of 1 to 1,000"),
        (leaf("in", "year", list(range(1001))), "list of 1 to 1,000"),
        (leaf("in", "year", [1993, "x"]), "must be a number"),
        (nested(9), "8 levels"),
        (nested(10_000), "8 levels"),
        ({"type": "and", "filters": [{"year": i} for i in range(256)]}, "256 nodes"),
    ],
)
def test_violation_is_one_sentence(generation: Generation, tree: Any, word: str) -> None:
    with pytest.raises(FilterError, match=word) as caught:
        compile_filter(tree, generation.document_schema)
    assert len(str(caught.value)) < 400


def test_values_at_the_limits_are_taken_and_one_that_the_column_cannot_hold_is_not(
    generation: Generation,
) -> None:
    wide = [*(leaf("eq", "year", i) for i in range(254)), leaf("in", "year", list(range(1000)))]
    for tree in ({"type": "or", "filters": wide}, nested(8), leaf("eq", "doc_id", "x' OR 1=1 --")):
        assert filtered_ids(generation, tree) == []
    with pytest.raises(FilterError, match="1678 and 2262"):
        filtered_ids(generation, leaf("lt", "made_at", "2300-01-01T00:00:00"))


@pytest.mark.parametrize(
    ("tree", "column", "expected"),
    [
        (
            leaf("gte", "x", "2020-01-01T00:00:00.5"),
            pa.array([1577836800, 1577836801], pa.timestamp("s")),
            [0, 1],
        ),
        (leaf("eq", "x", "2020-01-01T00:00:00.5"), pa.array([1577836800], pa.timestamp("s")), [0]),
        (leaf("contains", "x", 0), pa.array([[-0.0], [0.5], [0.0, 1.0]]), [1, 0, 1]),
        (leaf("gt", "x", -0.5), pa.array([0, 255], pa.uint8()), [1, 1]),
        (leaf("lt", "x", 2**62 + 0.0), pa.array([2**62 - 1, 2**62], pa.int64()), [1, 0]),
        (leaf("lte", "x", 300), pa.array([0, 255], pa.uint8()), [1, 1]),
        (leaf("lte", "x", 2**53 + 1), pa.array([2.0**53, 2.0**54, None]), [1, 0, 0]),
        (leaf("gt", "x", -(2**63)), pa.array([-(2.0**63), -(2.0**62)], pa.float32()), [0, 1]),
        (leaf("gte", "x", 2**63 - 1), pa.array([1.0, 2.0**63]), [0, 1]),
    ],
)
def test_value_between_or_beyond_those_of_a_column_is_compared_exactly(
    tree: dict[str, Any], column: pa.Array, expected: list[int]
) -> None:
    condition = compile_filter(tree, pa.schema([pa.field("x", column.type)]))
    assert isinstance(condition, ColumnTest)
    assert condition.matches(column).tolist() == [bool(each) for each in expected]


@pytest.mark.parametrize("kind", ["and", "or"])
@pytest.mark.parametrize(
    ("asked", "column"),
    [
        (
            [leaf("contains", "x", each) for each in ("a.c", "(", "日", "\n \\", "é|", "y" * 8192)],
            ["abc", "ac"],
        ),
        ([leaf("contains", "x", each) for each in ("", "no")], ["abc", "no", None]),
        ([leaf("contains", "x", each) for each in ("y" * 8192, "z", "(")], ["(", "xyz", "y" * 8192, None]),
        ([leaf("contains", "x", each) for each in ("a.c", "\\d#", "\0")], ["a.c\\d#\0", "1#", "\0", "abc"]),
        ([leaf("ne", "x", each) for each in ("a", "b")], ["a", "b", "c", None]),
        ([leaf("nin", "x", [each]) for each in ("a", "b")], [["a"], ["a", "b"], [None], [], None]),
        ([leaf("contains", "x", each) for each in ("a", "b")], [["a"], ["a", "b"], [None], [], None]),
        ([leaf("gt", "x", each) for each in ("a", "b")], ["a", "b", "c", None]),
        ([leaf("lte", "x", each) for each in (1, 2.5, 2)], [1.0, 2.0, 2.5, 3.0, None]),
        ([*(leaf("gte", "x", each) for each in (1, 2.5)), leaf("gt", "x", 2)], [1, 2, 3, None]),
        ([leaf("lt", "x", each) for each in (1, 2**63 - 1)], [0, 1, None]),
    ],
)
def test_joined_tests_of_a_column_match_what_each_matches(
    kind: str, asked: list[dict[str, Any]], column: list[Any]
) -> None:
    column_N = pa.array(column)
    schema = pa.schema([pa.field("x", column_N.type)])
    each_TN = [compile_filter(one, schema).matches(column_N) for one in asked]  # type: ignore[union-attr]
    whole = compile_filter({"type": kind, "filters": asked}, schema)
    mask_N = getattr(np, f"logical_{kind}").reduce(each_TN)
    if isinstance(whole, ColumnTest):
        assert whole.matches(column_N).tolist() == mask_N.tolist()
    else:
        assert kind == ("and" if asked[0]["type"] == "contains" else "or")


@pytest.mark.parametrize("tree", [{"lang": "it's"}, {"year": [1993, 1994]}, leaf("gt", "price", 3)])
def test_filter_that_takes_too_long_asks_to_try_again(generation: Generation, tree: dict[str, Any]) -> None:
    condition = compile_filter(tree, generation.document_schema)
    with pytest.raises(TryAgainError, match="in time"):
        allowed_documents(generation, condition, dt.timedelta(microseconds=-1))
    expected = allowed_documents(generation, condition, None)
    assert np.array_equal(allowed_documents(generation, condition, dt.timedelta(minutes=1)), expected)


@pytest.mark.parametrize("tree", [{"type": ["guide", "note"]}, {"type": "gt"}, {"type": "lt", "other": "9"}])
def test_column_that_is_named_type_is_no_order(tree: dict[str, Any]) -> None:
    schema = pa.schema({"type": pa.string(), "other": pa.string()})
    compile_filter(tree, schema)
    both = {"type": "and", "filters": [tree, leaf("gt", "type", "9")]}
    (warning,) = text_order_warnings(both, schema)
    assert warning.startswith("column 'type' is text and compared with '9' letter by letter")
    assert text_order_warnings(tree, schema) == []


def test_order_of_texts_against_a_number_is_told(searcher: Searcher) -> None:
    for expression, told in (
        ("Odd name>9", True),
        ("Odd name=9", False),
        ("Odd name>o1", False),
        ("year>1", False),
    ):
        tree = parse_filter([expression], searcher.generation.document_schema)
        assert [*map(type, searcher.search("slate", filters=tree).warnings)] == [str] * told


def test_filterable_columns_are_the_stored_ones_and_comparable_metadata(generation: Generation) -> None:
    stored = ["doc_id", "title", "source_file", "cluster_id", "num_tokens"]
    metadata = ["year", "price", "lang", "is_open", "day", "seen_at", "made_at", "Odd name", "tags", "sizes"]
    assert list(filterable_columns(generation.document_schema)) == stored + metadata


SCHEMA = pa.schema(
    [
        ("year", pa.int32()),
        ("price", pa.float64()),
        ("lang", pa.string()),
        ("ok", pa.bool_()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us")),
        ("tags", pa.list_(pa.string())),
        ("sizes", pa.list_(pa.int32())),
    ]
)


@pytest.mark.parametrize(
    ("expression", "tree"),
    [
        ("year=1993", leaf("eq", "year", 1993)),
        ("year == 1993", leaf("eq", "year", 1993)),
        (" year >= 1993 ", leaf("gte", "year", 1993)),
        ("year<=1993.5", leaf("lte", "year", 1993.5)),
        ("price>-1e3", leaf("gt", "price", -1000.0)),
        ("year!=7", leaf("ne", "year", 7)),
        ("lang=a=b>c", leaf("eq", "lang", "a=b>c")),
        ("lang=", leaf("eq", "lang", "")),
        ("lang=7", leaf("eq", "lang", "7")),
        ("ok=TRUE", leaf("eq", "ok", True)),
        ("day<2024-05-31", leaf("lt", "day", "2024-05-31")),
        ("at>=2024-05-31T08:00", leaf("gte", "at", "2024-05-31T08:00")),
        ("lang~e", leaf("contains", "lang", "e")),
        ("tags=a,b", leaf("contains", "tags", "a,b")),
        ("tags~a", leaf("contains", "tags", "a")),
        ("sizes!=3", leaf("nin", "sizes", [3])),
        (' {"lang": ["de", "en"]}', {"lang": ["de", "en"]}),
        ('{"type": "is_null", "key": "year"}', {"type": "is_null", "key": "year"}),
    ],
)
def test_parse_filter_reads_the_value_by_its_column(expression: str, tree: dict[str, Any]) -> None:
    assert parse_filter([expression], SCHEMA) == tree
    both = {"type": "and", "filters": [tree, leaf("eq", "lang", "de")]}
    assert (parse_filter([expression, "lang=de"], SCHEMA), parse_filter([], SCHEMA)) == (both, None)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "year",
        "=3",
        "nope=3",
        "year=abc",
        "year=nan",
        "year=1e999",
        "ok=yes",
        "day=soon",
        "at=now",
        "year=99999999999999999999",
        "year~1",
        "tags>a",
        "sizes=a",
        "{",
        '{"nope": 1}',
        "{}",
    ],
)
def test_parse_filter_of_nonsense_is_refused(expression: str) -> None:
    with pytest.raises(FilterError):
        parse_filter([expression], SCHEMA)
