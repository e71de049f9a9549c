"""Which passages an answer shows: windows of k neighbouring landmarks, their size chosen at query time.

    passages = 3             each document's best windows, none touching another
    max_characters = 2,000   windows of all candidates, best first; each adds what no better one holds;
                             neighbours become one passage; what repeats another document is passed over

With a budget, the text around the best place is read before the next place. The reasons are in
docs/design/decisions/reading-on.md. Copies cost a budget nothing: see :class:`ShownTexts`. A window never
crosses into another document, and a document with fewer than k chunks is one window.

Windows slide because the passage a query asks for rarely starts where a fixed group would. Share of the
evidence within the best 2,000 characters of a collection (all-MiniLM-L6-v2, landmarks of 64 tokens, 20 whole
articles of SQuAD, 600 questions): single landmarks .559, fixed pairs .586, sliding pairs .612.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.search.candidates import ScoredWindows
from cairn.pipeline.search.late import best_places
from jaxtyping import Float, Int64

DEFAULT_CHUNK_TOKENS = 128
"""About a paragraph: long enough to be read alone, short enough to quote."""
COPIED_CHARACTERS = 32
"""Length of the stretches by which texts are compared, about five words; a shorter text may be said twice."""
FIRST_LOOK = 256
"""Windows sorted at first; all are when these are read to the end."""


def window_size(chunk_tokens: int | None, settings: Mapping[str, Any]) -> int:
    """Return how many landmarks make a passage of ``chunk_tokens``; ``settings`` are the manifest's.

    ``chunk_tokens`` must be a multiple of the stored landmark interval. None takes
    :data:`DEFAULT_CHUNK_TOKENS` where the interval divides it, else the interval itself.
    """
    interval = int(settings["encoder"]["landmark_interval"])
    default = interval * default_window(interval)
    wanted = default if chunk_tokens is None else chunk_tokens
    if wanted < interval or wanted % interval:
        allowed = f"{interval}, {2 * interval}, {3 * interval}, …; left out, it is {default}"
        raise ConfigError(
            f"chunk_tokens must be a multiple of this collection's {interval} ({allowed}), got {wanted}"
        )
    return wanted // interval


def default_window(interval: int) -> int:
    """Return how many landmarks make a passage where nothing else is asked for."""
    return 1 if DEFAULT_CHUNK_TOKENS % interval else DEFAULT_CHUNK_TOKENS // interval


def choose_windows(scores_W: Float[np.ndarray, " W"], size: int, limit: int) -> list[int]:
    """Return up to ``limit`` windows that share no landmark, best first, ties by place.

    What lies between two chosen windows and is shorter than ``size`` is in none.
    """
    left_W = scores_W.copy()
    chosen: list[int] = []
    while len(chosen) < limit:
        best = int(np.argmax(left_W))
        if left_W[best] == -np.inf:
            break
        chosen.append(best)
        left_W[max(best - size + 1, 0) : best + size] = -np.inf
    return chosen


def new_pieces(
    scores_W: Float[np.ndarray, " W"], first_W: Int64[np.ndarray, " W"], end_W: Int64[np.ndarray, " W"]
) -> Iterator[tuple[int, int, int]]:
    """Yield (window, first chunk, end chunk): of each window, best first, what no better one holds.

    So a good place grows by its neighbours, a landmark at a time, and nothing is read twice. A window held
    whole by better ones, and one that scores minus infinity, is left out. ``first_W`` and ``end_W`` are
    chunks of the whole collection; windows of a document are equally long.
    """
    taken: set[int] = set()
    for window in _best_first(scores_W):
        if scores_W[window] == -np.inf:
            return
        new = [chunk for chunk in range(int(first_W[window]), int(end_W[window])) if chunk not in taken]
        # Neighbours: better windows hold stretches at least as long as this one, so never just its middle.
        if new:
            taken.update(new)
            yield window, new[0], new[-1] + 1


def _best_first(scores_W: Float[np.ndarray, " W"]) -> Iterator[int]:
    """Yield windows by falling score, ties by place; sorting them all only where the best few do not do."""
    few = best_places(scores_W, FIRST_LOOK)
    yield from few.tolist()
    if len(few) < len(scores_W):
        yield from np.argsort(-scores_W, kind="stable")[len(few) :].tolist()


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


class ShownTexts:
    """The stretches of text that an answer shows, white space aside, each with the document that has it."""

    def __init__(self) -> None:
        self._owners: dict[str, int] = {}

    def takes(self, owner: int, text: str) -> bool:
        """Take a passage in, unless other documents show half of it or more; a few words are no copy."""
        plain = " ".join(text.split())
        starts = range(len(plain) - COPIED_CHARACTERS + 1)
        stretches = {plain[start : start + COPIED_CHARACTERS] for start in starts}
        copied = sum(self._owners.get(stretch, owner) != owner for stretch in stretches)
        if stretches and 2 * copied >= len(stretches):
            return False
        for stretch in stretches:
            self._owners.setdefault(stretch, owner)
        return True


def best_within(
    scored: ScoredWindows,
    span_of: Callable[[int, int], tuple[int, int]],
    max_characters: int,
    max_documents: int,
    text_of: Callable[[int], str] | None = None,
) -> dict[int, list[ChosenPassage]]:
    """Return the pieces of all documents that are read within the budget, by document and best first.

    The first one that does not fit ends the selection. Once ``max_documents`` have a
    passage, those of others are passed over. ``span_of`` gives the characters of chunks from one to another.
    With the text of a document, what repeats others is passed over, too.
    """
    chosen: dict[int, list[ChosenPassage]] = {}
    characters, shown = 0, ShownTexts()
    for window, first, end in new_pieces(scored.scores, scored.first, scored.end):
        owner = int(scored.owner[window])
        if owner not in chosen and len(chosen) == max_documents:
            continue
        start_char, end_char = span_of(first, end)
        if text_of is not None and not shown.takes(owner, text_of(owner)[start_char:end_char]):
            continue
        characters += end_char - start_char
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
