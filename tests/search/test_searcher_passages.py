"""The passages of found documents, and those that a budget of characters is spent on, against brute force."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.search import ranking
from cairn.pipeline.search.ranking import ShownTexts, window_size
from cairn.pipeline.search.reader import window_scores, words_asked
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.search_options import Granularity
from cairn.pipeline.types import SearchResult

if TYPE_CHECKING:
    from tests.search.conftest import StoneEncoder, Stones
QUERY = "granite slate"
EVERYTHING = 1_000


def near(own: list[float]) -> list[float]:
    """Return each window's score and half of those beside it, as a mean."""
    scores: list[float] = []
    for place, score in enumerate(own):
        beside = [own[other] for other in (place - 1, place + 1) if 0 <= other < len(own)]
        scores.append((score + sum(beside) / 2) / (1 + len(beside) / 2))
    return scores


def window_cosines(stones: Stones, index: int, vector: np.ndarray, size: int) -> list[float]:
    """Return the cosine of every window of a document with a unit vector."""
    vectors = stones.chunk_vectors[index]
    sums = [vectors[start : start + size].sum(axis=0) for start in range(max(len(vectors) - size, 0) + 1)]
    return [float(total @ vector / np.linalg.norm(total)) for total in sums]


def naive_passages(
    stones: Stones, index: int, vector: np.ndarray, size: int, limit: int, *, reads_neighbours: bool
) -> list[tuple[int, int, float]]:
    """Take the best windows of a document one by one, each time among those that touch no taken one.

    (start, end, cosine).
    """
    spans, own = stones.spans[index], window_cosines(stones, index, vector, size)
    scored = [
        (score, spans[start][0], spans[min(start + size, len(spans)) - 1][1])
        for start, score in enumerate(own)
    ]
    ranks = dict(zip(scored, near(own) if reads_neighbours else own, strict=True))
    taken: list[tuple[int, int, float]] = []
    for score, start_char, end_char in sorted(scored, key=lambda item: (-ranks[item], item[1])):
        if len(taken) < limit and all(end_char <= other[0] or start_char >= other[1] for other in taken):
            taken.append((start_char, end_char, score))
    return taken


@pytest.mark.parametrize("granularity", ["document", "chunk", "both"])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_passages_are_the_best_windows_that_do_not_overlap(
    stones: Stones, searcher: Searcher, encoder: StoneEncoder, granularity: Granularity, size: int
) -> None:
    vector = encoder.encode_queries([QUERY])[0]
    for hit in searcher.search(
        QUERY, granularity=granularity, passages=3, chunk_tokens=64 * size, hybrid=False
    ).hits:
        expected = naive_passages(
            stones, stones.index_of(hit.doc_id), vector, size, 3, reads_neighbours=granularity != "chunk"
        )
        assert [(p.start_char, p.end_char) for p in hit.passages] == [
            (start, end) for start, end, _ in expected
        ]
        assert [p.scores["chunk"] for p in hit.passages] == pytest.approx(
            [score for _, _, score in expected], abs=1e-6
        )
        if granularity == "both":  # half by their place and half by their document
            index = stones.index_of(hit.doc_id)
            places = near(window_cosines(stones, index, vector, size))
            starts = [start for start, _ in stones.spans[index]]
            assert [p.score for p in hit.passages] == pytest.approx(
                [(places[starts.index(p.start_char)] + hit.score) / 2 for p in hit.passages], abs=1e-6
            )


def test_passages_of_any_size_are_spans_of_the_text_and_move_no_document(
    stones: Stones, searcher: Searcher
) -> None:
    whole = searcher.search(QUERY)
    assert whole == searcher.search(QUERY, chunk_tokens=128)
    for options in ({"chunk_tokens": 64, "passages": 50}, {"chunk_tokens": 640}, {"passages": 0}):
        found = searcher.search(QUERY, **options).hits
        assert [(hit.doc_id, hit.score) for hit in found] == [(hit.doc_id, hit.score) for hit in whole.hits]
        for hit in found:
            spans, text = (
                [(p.start_char, p.end_char) for p in hit.passages],
                stones.rows[stones.index_of(hit.doc_id)]["text"],
            )
            assert [p.text for p in hit.passages] == [text[start:end] for start, end in spans]
            assert bool(spans) == (options.get("passages") != 0)
            if options.get("chunk_tokens") == 64:  # single landmarks
                assert sorted(spans) == stones.spans[stones.index_of(hit.doc_id)]
    for hit in searcher.search(QUERY, granularity="chunk", chunk_tokens=64, hybrid=False).hits:
        assert hit.passages[0].score == hit.passages[0].scores["chunk"] == hit.scores["chunk"]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_hybrid_passages_score_by_cosine_and_bm25_and_document(
    stones: Stones, searcher: Searcher, encoder: StoneEncoder, size: int
) -> None:
    generation = searcher.generation
    assert generation.passage_bm25 is not None
    scores = generation.passage_bm25.scores(words_asked(QUERY, generation.query_languages), size)
    result = searcher.search(QUERY, chunk_tokens=64 * size, max_candidates=EVERYTHING, top_k=200)
    best_dense = max(hit.scores["document"] / 4 + hit.scores["chunk"] * 3 / 4 for hit in result.hits)
    vector = encoder.encode_queries([QUERY])[0]
    low = float(generation.mean_chunk_vector @ vector)
    for hit in result.hits:
        position, index = generation.doc_ids.to_pylist().index(hit.doc_id), stones.index_of(hit.doc_id)
        cosines = window_cosines(stones, index, vector, size)
        bm25 = scores[generation.chunk_offsets[position] :][: len(cosines)].tolist()
        places = near(
            [
                ((cosine - low) / (best_dense - low) + words / scores.max()) / 2
                for cosine, words in zip(cosines, bm25, strict=True)
            ]
        )
        starts = [start for start, _ in stones.spans[index]]
        for passage in hit.passages:
            window = starts.index(passage.start_char)
            if hit.score > 0.0:  # else it is shown as 0, and its own score may be below
                expected = min(max((places[window] + hit.score) / 2, 0.0), 1.0)
                assert passage.score == pytest.approx(expected, abs=1e-5)
            assert passage.scores.get("bm25", 0.0) == pytest.approx(bm25[window])


def naive_reading(
    stones: Stones, result: SearchResult, vector: np.ndarray, max_characters: int
) -> dict[str, set[int]]:
    """Read pairs of landmarks of the ranked documents, best first, until the next would pass the budget.

    Characters by document.
    """
    scored = []
    for hit in result.hits:
        index = stones.index_of(hit.doc_id)
        spans = stones.spans[index]
        for start, place in enumerate(near(window_cosines(stones, index, vector, 2))):
            end = min(start + 2, len(spans))
            scored.append(
                (place / 2 + hit.score / 2, hit.doc_id, set(range(spans[start][0], spans[end - 1][1])))
            )
    read: dict[str, set[int]] = {}
    for _, doc_id, characters in sorted(scored, key=lambda item: -item[0]):
        if sum(map(len, read.values())) + len(characters - read.get(doc_id, set())) > max_characters:
            break
        read.setdefault(doc_id, set()).update(characters)
    return read


@pytest.mark.parametrize("first_look", [2, 256])
@pytest.mark.parametrize("max_characters", [1, 60, 150, 1_000, 100_000])
def test_a_budget_is_filled_with_the_best_passages_of_all_documents(
    stones: Stones,
    searcher: Searcher,
    encoder: StoneEncoder,
    monkeypatch: pytest.MonkeyPatch,
    max_characters: int,
    first_look: int,
) -> None:
    monkeypatch.setattr(ranking, "FIRST_LOOK", first_look)
    every = searcher.search(QUERY, hybrid=False, top_k=200)
    found = searcher.search(QUERY, hybrid=False, top_k=200, max_characters=max_characters)
    expected = naive_reading(stones, every, encoder.encode_queries([QUERY])[0], max_characters)
    assert {
        hit.doc_id: {c for p in hit.passages for c in range(p.start_char, p.end_char)} for hit in found.hits
    } == expected
    assert [(hit.doc_id, hit.score) for hit in found.hits] == [
        (h.doc_id, h.score) for h in every.hits if h.doc_id in expected
    ]
    for hit in found.hits:
        spans = sorted((p.start_char, p.end_char) for p in hit.passages)
        assert all(end < start for (_, end), (start, _) in pairwise(spans)), "those that touch are one"


def settings_of(interval: int) -> dict[str, dict[str, int]]:
    return {"encoder": {"landmark_interval": interval}}


def test_window_scores_of_opposite_landmarks_are_zero() -> None:
    vectors = np.array([[1.0, 0.0], [-1.0, 0.0]], np.float32)
    assert window_scores(vectors, np.array([0.6, 0.8], np.float32), 2).tolist() == [0.0]


@pytest.mark.parametrize(
    ("interval", "size"), [(8, 16), (16, 8), (32, 4), (64, 2), (128, 1), (96, 1), (100, 1), (256, 1)]
)
def test_window_size_by_default_is_128_tokens_or_one_landmark(interval: int, size: int) -> None:
    assert window_size(None, settings_of(interval)) == size


@pytest.mark.parametrize("chunk_tokens", [1, 63, 65, 100, 200])
def test_window_size_of_another_number_names_the_allowed_ones(chunk_tokens: int) -> None:
    with pytest.raises(
        ConfigError, match=r"multiple of this collection's 64 \(64, 128, 192, …; left out, it is 128\), got"
    ):
        window_size(chunk_tokens, settings_of(64))


NOTICE = "Whoever finds a stone by the river may keep it, but for those that stand in a wall or a bridge."
OWN = "Granite is hard and takes a polish, so it is laid where many feet walk, on steps and in courts."


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        (NOTICE, False),
        (f"{NOTICE[:60]}\n  {NOTICE[61:]}", False),
        (NOTICE[20:80], False),
        (f"{OWN[:40]} {NOTICE}", False),
        (f"{NOTICE[40:]} {OWN}", True),
        (OWN, True),
        (NOTICE[:30], True),
    ],
    ids=["copy", "other white space", "part", "mostly copied", "mostly own", "own", "few words"],
)
def test_shown_texts_take_no_passage_that_another_document_shows_for_the_most_part(
    text: str, is_taken: bool
) -> None:
    shown = ShownTexts()
    assert shown.takes(0, f"Stones. {NOTICE} They are grey.")
    assert shown.takes(1, text) is is_taken
    assert shown.takes(0, NOTICE)
