"""Which passages an answer shows: the best of every document, or the best of all within a character budget.

    passages = 3             each document's best windows, none touching another
    max_characters = 2,000   windows of all candidates, best first; each adds what no better one holds;
                             neighbours become one passage

With a budget, the text around the best place is read before the next place. The reasons are in
docs/design/decisions/reading-on.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from cairn.pipeline.search.candidates import ScoredWindows
from cairn.pipeline.search.windows import choose_windows, new_pieces
from jaxtyping import Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenPassage:
    """Chunks ``first`` to ``end`` of the collection, read as one.

    Score and parts are those of its best window.
    """

    first: int
    end: int
    score: float
    parts: Mapping[str, float]


def best_of_each(
    scored: ScoredWindows, num_documents: int, size: int, limit: int
) -> list[list[ChosenPassage]]:
    """Return each document's best windows that share no chunk, best first, ties by place."""
    bounds = np.searchsorted(scored.owner, np.arange(num_documents + 1))
    chosen: list[list[ChosenPassage]] = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        own = [start + window for window in choose_windows(scored.scores[start:stop], size, limit)]
        chosen.append(
            [_passage(scored, window, int(scored.first[window]), int(scored.end[window])) for window in own]
        )
    return chosen


def best_within(
    scored: ScoredWindows,
    start_char: Int64[np.ndarray, " M"],
    end_char: Int64[np.ndarray, " M"],
    max_characters: int,
    max_documents: int,
) -> dict[int, list[ChosenPassage]]:
    """Return the pieces of all documents that are read within the budget, by document and best first.

    The first one that does not fit ends the selection. Once ``max_documents`` have a
    passage, those of others are passed over.
    """
    chosen: dict[int, list[ChosenPassage]] = {}
    characters = 0
    for window, first, end in new_pieces(scored.scores, scored.first, scored.end):
        owner = int(scored.owner[window])
        if owner not in chosen and len(chosen) == max_documents:
            continue
        characters += int(end_char[end - 1] - start_char[first])
        if characters > max_characters:
            break
        chosen.setdefault(owner, []).append(_passage(scored, window, first, end))
    return chosen


def budget_warning(max_characters: int, smallest: int) -> str:
    """Say that no passage fits a budget, and the smallest that gives one."""
    return f"no passage fits in {max_characters:,} characters; ask for at least {smallest:,}"


def joined(pieces: Sequence[ChosenPassage]) -> list[ChosenPassage]:
    """Join pieces that stand side by side; the best one's score and parts stand for all."""
    merged: list[ChosenPassage] = []
    for piece in sorted(pieces, key=lambda piece: piece.first):
        if merged and merged[-1].end == piece.first:
            before = merged.pop()
            merged.append(
                replace(max(before, piece, key=lambda one: one.score), first=before.first, end=piece.end)
            )
        else:
            merged.append(piece)
    return sorted(merged, key=lambda piece: (-piece.score, piece.first))


def _passage(scored: ScoredWindows, window: int, first: int, end: int) -> ChosenPassage:
    parts = {
        part: float(scores[window])
        for part, scores in scored.parts.items()
        if part != "bm25" or scores[window] > 0.0
    }
    return ChosenPassage(first=first, end=end, score=float(scored.scores[window]), parts=parts)
