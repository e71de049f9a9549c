"""Filters as the command line writes them."""

from typing import Any

import pyarrow as pa
import pytest
from cairn.pipeline.errors import FilterError
from cairn.pipeline.search.filters import parse_filter
from cairn.pipeline.search.searcher import Searcher


def leaf(kind: str, key: str, value: Any) -> dict[str, Any]:
    return {"type": kind, "key": key, "value": value}


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


def test_parse_filter_of_several_requires_all() -> None:
    assert parse_filter(["year>1", "lang=de"], SCHEMA) == {
        "type": "and",
        "filters": [leaf("gt", "year", 1), leaf("eq", "lang", "de")],
    }


def test_parse_filter_of_none_is_none() -> None:
    assert parse_filter([], SCHEMA) is None


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


def test_order_of_texts_against_a_number_is_told(searcher: Searcher) -> None:
    tree = searcher_filter(searcher, ["Odd name>9"])
    assert "letter by letter" in searcher.search("slate", filters=tree).warnings[0]
    for quiet in (["Odd name=9"], ["Odd name>o1"], ["year>1993"]):
        assert searcher.search("slate", filters=searcher_filter(searcher, quiet)).warnings == ()


def searcher_filter(searcher: Searcher, expressions: list[str]) -> dict[str, Any] | None:
    return parse_filter(expressions, searcher.generation.document_schema)
