import numpy as np
import pytest
from cairn.pipeline.search.fusion import (
    LateFusion,
    Scale,
    best_first,
    document_scores,
    with_neighbours,
)
from cairn.pipeline.search_options import SearchOptions
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays


def test_scale_begins_at_the_lowest_where_none_passes_the_floor() -> None:
    scores = np.array([2.0, 4.0, 3.0])
    assert Scale.of(scores, floor=9.0).apply(scores).tolist() == [0.0, 1.0, 0.5]
    equal = np.array([0.3, 0.3])
    assert Scale.of(equal, floor=0.3).apply(equal).tolist() == [1.0, 1.0]


def test_query_that_the_model_does_not_know_is_ranked_by_words_where_they_are_found() -> None:
    cosines = np.array([0.64, 0.998, 0.995, 0.93])  # of texts of a script that the model does not know
    found = np.array([7.4, 0.0, 2.0, 0.0])
    options = SearchOptions(granularity="document")
    scores, _ = document_scores(
        options, {"document": cosines}, bm25_N=found, average_chunk=0.9, is_known=False
    )

    assert scores == pytest.approx(found / 7.4)
    alone, fusion = document_scores(options, {"document": cosines}, average_chunk=0.9, is_known=False)
    assert fusion is None
    assert alone == pytest.approx(cosines)


@given(own=arrays(np.float64, st.integers(0, 40), elements=st.floats(-1, 1)), data=st.data())
def test_passages_with_their_neighbours_stay_between_the_scores_of_their_document(
    own: np.ndarray, data: st.DataObject
) -> None:
    owner = np.sort(data.draw(arrays(np.int64, len(own), elements=st.integers(0, 5))))
    near = with_neighbours(own, owner)
    for document in np.unique(owner):
        inside = owner == document
        assert near[inside].min() >= own[inside].min() - 1e-12
        assert near[inside].max() <= own[inside].max() + 1e-12
        assert near[inside] == pytest.approx(with_neighbours(own[inside], owner[inside]))


def test_best_first_breaks_ties_by_doc_id_whatever_the_order() -> None:
    ids, scores = ["c", "a", "d", "b"], np.array([0.5, 0.5, 0.9, 0.5])
    for seed in range(5):
        shuffled = np.random.default_rng(seed).permutation(4)
        best = best_first(scores[shuffled], [ids[i] for i in shuffled], 3)
        assert [ids[shuffled[i]] for i in best] == ["d", "a", "b"]


def test_max_sim_is_a_fifth_of_a_documents_score_beside_bm25_and_half_of_a_passages() -> None:
    dense = np.array([0.5, 0.9, 0.1])
    scores, fusion = document_scores(
        SearchOptions(), {"document": dense, "chunk": dense}, bm25_N=np.array([2.0, 1.0, 0.0])
    )
    late = LateFusion.of(scores, fusion, average_chunk=0.1)
    max_sim = np.array([1.0, 0.0, 0.5])
    assert late.documents(scores, max_sim) == pytest.approx((2 * scores + max_sim / 2) / 2.5)
    assert late.passages(scores, max_sim) == pytest.approx((scores + max_sim) / 2)
    alone = LateFusion.of(dense, None, average_chunk=0.1)  # without BM25 it is half of every score
    expected = (np.array([0.5, 1.0, 0.0]) + max_sim) / 2
    assert alone.documents(dense, max_sim) == pytest.approx(expected)
    assert alone.passages(dense, max_sim) == pytest.approx(expected)
