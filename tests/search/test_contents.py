"""Columns, counts and matches against what Python finds by looking at each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.collection import Collection
from cairn.pipeline.errors import ConfigError, FilterError, RestrictionError
from cairn.pipeline.search.contents import count_documents, list_matches, read_document, summarise_columns
from cairn.pipeline.search.searcher import Searcher

LATE = {"type": "gte", "key": "year", "value": 1993}
OWN = {"type": "eq", "key": "Odd name", "value": "o1"}


def matching(stones: Any, *, late: bool, own: bool) -> list[Mapping[str, Any]]:
    return [
        row
        for row in stones.rows
        if (not late or (row["year"] is not None and row["year"] >= 1993))
        and (not own or row["Odd name"] == "o1")
    ]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_facets_and_counts_are_those_of_the_rows(
    stones: Any, searcher: Searcher, late: bool, own: bool
) -> None:
    filters, restriction = LATE if late else None, OWN if own else None
    rows = matching(stones, late=late, own=own)
    years = Counter(row["year"] for row in rows if row["year"] is not None)
    (year,) = searcher.reading(summarise_columns, ["year"], filters, 3, restriction=restriction)
    assert (year.documents, year.different_values) == (years.total(), len(years))
    assert (year.low, year.high) == (min(years), max(years))
    assert [each.documents for each in year.values] == [count for _, count in years.most_common(3)]
    assert all(years[each.value] == each.documents for each in year.values)
    assert searcher.reading(count_documents, restriction, filters) == len(rows)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("limit", [1, 7, 1_000])
def test_pages_of_matches_are_all_of_them_in_order(
    stones: Any, searcher: Searcher, own: bool, limit: int
) -> None:
    expected = sorted(row["doc_id"] for row in matching(stones, late=True, own=own))[: 5 * limit]
    found: list[str] = []
    after: str | None = None
    page = searcher.reading(list_matches, LATE, None, limit, restriction=OWN if own else None)
    while len(found) < len(expected):
        page = searcher.reading(list_matches, LATE, after, limit, restriction=OWN if own else None)
        found += [document.doc_id for document in page.documents]
        after = page.next_after
    assert found == expected
    assert page.total == len(matching(stones, late=True, own=own))
    assert (after is None) == (len(found) == page.total)


def test_columns_name_what_filters_can_and_leave_out_values_that_mostly_differ(
    searcher: Searcher,
) -> None:
    columns = {column.name: column for column in searcher.reading(summarise_columns)}
    assert {"doc_id", "year", "Odd name"} <= set(columns)
    assert columns["doc_id"].values == ()
    assert columns["Odd name"].values
    assert columns["Odd name"].low is None


def test_what_cannot_be_asked_is_refused(searcher: Searcher) -> None:
    with pytest.raises(ConfigError, match="columns must be a list of some of doc_id, "):
        searcher.reading(summarise_columns, ["text"])
    with pytest.raises(ConfigError, match="columns must be a list of some of doc_id, "):
        searcher.reading(summarise_columns, "year")  # pyright: ignore[reportArgumentType]
    with pytest.raises(FilterError, match="`key` must be one of"):
        searcher.reading(count_documents, filters={"nowhere": 1})


def test_half_precision_numbers_have_bounds(tiny_model_folder: Path, tmp_path: Path) -> None:
    encoder = {"model": str(tiny_model_folder), "use_context": False}
    collection = Collection.create("c", root=tmp_path / "root", settings={"encoder": encoder})
    halves = {"half": np.array([0.5, 2], np.float16), "halves": [[np.float16(1)], [np.float16(3)]]}
    collection.add(pa.table({"id": ["a", "b"], "text": ["one", "two"], **halves}))
    columns = {column.name: column for column in collection.columns()}
    assert (columns["half"].low, columns["half"].high) == (0.5, 2)
    assert (columns["halves"].low, columns["halves"].high) == (1, 3)


@pytest.mark.parametrize(
    "filters",
    [None, {"type": "ne", "key": "Odd name", "value": "o1"}, {"type": "gte", "key": "year", "value": 1993}],
)
def test_search_within_a_restriction_is_the_search_with_both_filters(searcher: Searcher, filters) -> None:
    both = OWN if filters is None else {"type": "and", "filters": [OWN, filters]}
    found = searcher.search("granite", top_k=200, filters=filters, restriction=OWN)
    assert found == searcher.search("granite", top_k=200, filters=both)
    deep = {"type": "gte", "key": "year", "value": 1990}
    for _ in range(7):  # as deep as a filter may be alone
        deep = {"type": "or", "filters": [deep]}
    assert searcher.search("granite", filters=deep, restriction=OWN).hits


def test_restriction_that_does_not_fit_is_not_the_filters_fault(searcher: Searcher) -> None:
    wrong = {"type": "eq", "key": "nothing", "value": 1}
    with pytest.raises(RestrictionError):
        searcher.search("granite", restriction=wrong)
    with pytest.raises(RestrictionError):
        searcher.reading(read_document, "doc-0-001", restriction=wrong)
    with pytest.raises(FilterError) as caught:
        searcher.search("granite", filters=wrong, restriction=OWN)
    assert not isinstance(caught.value, RestrictionError)


@pytest.mark.parametrize(
    "options",
    [
        {"offset": 1},
        {"offset": 1, "max_candidates": 50, "max_characters": 9},
        {"offset": -1, "max_candidates": 50},
        {"offset": 41, "max_candidates": 50},
    ],
)
def test_offset_without_a_ranking_of_fixed_depth_is_refused(searcher: Searcher, options) -> None:
    with pytest.raises(ConfigError, match="offset"):
        searcher.search("granite", top_k=10, **options)
