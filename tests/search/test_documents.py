"""Documents by their id, and the restriction nothing gets around."""

import pytest
from cairn.pipeline.errors import ConfigError, FilterError, RestrictionError
from cairn.pipeline.search.documents import read_document
from cairn.pipeline.search.searcher import Searcher

OWN = {"type": "eq", "key": "Odd name", "value": "o1"}


@pytest.mark.parametrize(
    "filters",
    [None, {"type": "ne", "key": "Odd name", "value": "o1"}, {"type": "gte", "key": "year", "value": 1993}],
)
def test_search_within_a_restriction_is_the_search_with_both_filters(searcher: Searcher, filters) -> None:
    both = OWN if filters is None else {"type": "and", "filters": [OWN, filters]}
    found = searcher.search("granite", top_k=200, filters=filters, restriction=OWN)
    assert found == searcher.search("granite", top_k=200, filters=both)


def test_filter_of_the_deepest_kind_still_fits_beside_a_restriction(searcher: Searcher) -> None:
    deep = {"type": "gte", "key": "year", "value": 1990}
    for _ in range(7):
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
