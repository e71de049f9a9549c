"""Documents by their id, and the restriction nothing gets around."""

import pytest
from cairn.pipeline.errors import ConfigError, FilterError, RestrictionError
from cairn.pipeline.search.documents import count_documents, read_document, read_lineage
from cairn.pipeline.search.searcher import Searcher

OWN = {"type": "eq", "key": "Odd name", "value": "o1"}


def own_ids(stones) -> list[str]:
    return [row["doc_id"] for row in stones.rows if row["Odd name"] == "o1"]


def test_every_document_is_read_by_its_id(stones, searcher: Searcher) -> None:
    for row in stones.rows:
        document = searcher.reading(read_document, row["doc_id"])
        assert document is not None
        assert (document.doc_id, document.title, document.text, document.num_tokens) == tuple(
            row[name] for name in ("doc_id", "title", "text", "num_tokens")
        )
        assert document.metadata["year"] == row["year"]
        assert document.generation == 1


@pytest.mark.parametrize("doc_id", ["", "doc-0-999", "doc-0-001' OR 1=1 --", "\0", "é"])
def test_unknown_document_is_none(searcher: Searcher, doc_id: str) -> None:
    assert searcher.reading(read_document, doc_id) is None


def test_document_outside_the_restriction_is_none(stones, searcher: Searcher) -> None:
    for read in (read_document, read_lineage):
        found = [each["doc_id"] for each in stones.rows if searcher.reading(read, each["doc_id"], OWN)]
        assert found == own_ids(stones)


def test_count_documents_counts_those_within_the_restriction(stones, searcher: Searcher) -> None:
    assert searcher.reading(count_documents) == len(stones.rows)
    assert searcher.reading(count_documents, OWN) == len(own_ids(stones))


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


@pytest.mark.parametrize("granularity", ["document", "chunk", "both"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_pages_are_the_ranking_cut(searcher: Searcher, granularity, hybrid) -> None:
    options = {"granularity": granularity, "hybrid": hybrid, "max_candidates": 30}
    whole = searcher.search("granite slate", top_k=30, **options).hits
    cut = [
        hit
        for offset in range(0, 30, 7)
        for hit in searcher.search("granite slate", top_k=min(7, 30 - offset), offset=offset, **options).hits
    ]
    assert [(hit.doc_id, hit.score, hit.scores) for hit in cut] == [
        (hit.doc_id, hit.score, hit.scores) for hit in whole
    ]
    assert [[(p.start_char, p.end_char) for p in hit.passages] for hit in cut] == [
        [(p.start_char, p.end_char) for p in hit.passages] for hit in whole
    ]


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
