"""Probabilities of hits: nonsense falls below a threshold that real questions pass."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from cairn.pipeline.search.calibration import (
    BEING_MEASURED,
    MIN_KNOWN_ITEMS,
    NUM_KNOWN_ITEMS,
    Calibration,
    known_items,
)
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.types import Hit, SearchResult


def answer(doc_id: str, **scores: float) -> SearchResult:
    hit = Hit(doc_id=doc_id, title=None, score=1.0, scores=scores, metadata={}, passages=())
    return SearchResult(query="", generation=1, hits=(hit,))


@pytest.fixture
def calibration() -> Calibration:
    off_topic = [answer("any", late=low, chunk=low + 0.2) for low in (0.1, 0.2, 0.9)]
    known = {str(n): answer(str(n), late=0.6, chunk=0.9) for n in range(MIN_KNOWN_ITEMS)}
    return Calibration.of(off_topic, known, num_documents=100)


def test_scales_are_medians_of_off_topic_and_of_known_answers(calibration: Calibration) -> None:
    assert calibration.scales == {"late": (0.2, 0.6), "chunk": (0.4, 0.9)}


def test_probability_rises_with_the_raw_score_that_tells_most(calibration: Calibration) -> None:
    of_late = [
        calibration.probability({"late": late, "chunk": 0.4}) or 0.0 for late in np.linspace(0, 0.8, 9)
    ]
    assert of_late == sorted(of_late)
    assert of_late[2] < 0.1 < 0.9 < of_late[6]
    assert calibration.probability({"chunk": 0.9}) == calibration.probability({"late": 0.6})
    assert calibration.probability({"bm25": 3.0}) is None


def test_documents_below_the_threshold_are_left_out(calibration: Calibration) -> None:
    result = answer("1", late=0.6)
    result = replace(result, hits=(*result.hits, *answer("2", late=0.2).hits))
    kept = calibration.apply(result, 0.5)
    assert [hit.doc_id for hit in kept.hits] == ["1"]
    assert kept.hits[0].scores["probability"] == calibration.probability({"late": 0.6})
    assert len(calibration.apply(result, 0.0).hits) == 2


def test_too_few_known_items_leave_answers_as_they_are_and_say_so() -> None:
    known = {str(n): answer(str(n), late=0.6) for n in range(MIN_KNOWN_ITEMS - 1)}
    result = answer("1", late=0.6)
    (warning,) = (applied := Calibration.of([answer("any", late=0.1)], known, 7).apply(result, 0.9)).warnings
    assert applied.hits == result.hits
    assert warning.startswith("min_probability was not applied")


def test_search_during_the_measurement_is_answered_at_once_and_says_so(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ends = threading.Event(), threading.Event()

    def measured(*_: object) -> Calibration:
        begun.set()
        assert ends.wait(300)
        return Calibration(scales={"chunk": (-9.0, -8.0), "document": (-9.0, -8.0)}, num_documents=100)

    monkeypatch.setattr("cairn.pipeline.search.searcher.measured", measured)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(searcher.search, "granite", min_probability=0.5)
        assert begun.wait(300)
        meanwhile = searcher.search("granite", min_probability=0.5)
        ends.set()
        found = first.result()
    assert (meanwhile.warnings, found.warnings) == ((BEING_MEASURED,), ())
    assert all("probability" in hit.scores for hit in found.hits)


def test_it_is_measured_again_when_the_collection_has_doubled(calibration: Calibration) -> None:
    assert [calibration.holds_for(size) for size in (49, 50, 200, 201)] == [False, True, True, False]


def test_known_items_are_sentences_that_no_two_documents_share() -> None:
    sentence = "The first of its kind here."
    texts = {"a": f"{sentence} More.", "b": f"{sentence} Else.", "c": "Short. No."}
    assert known_items(texts.items()) == {"a": sentence}


def test_no_more_documents_are_read_than_are_asked_for() -> None:
    texts = iter([(str(number), f"This is sentence number {number}.") for number in range(100)])
    assert len(known_items(texts)) == NUM_KNOWN_ITEMS
    assert len([*texts]) == 100 - NUM_KNOWN_ITEMS
