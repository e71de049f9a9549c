"""Scores of candidates as shards computed them: most in one question, windows of few documents in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64

from pipeline.index.generation import Generation
from pipeline.ragged import ranges
from pipeline.search.candidates import windows_of_documents
from pipeline.search.feedback import NUM_WINDOWS
from pipeline.search.late import LateQuery
from pipeline.search.reader import WindowScores, WordScores
from pipeline.search.shards.fan_out import FanOut, Places, gathered
from pipeline.search.shards.messages import PartMatches, PartScores, Words


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedWords(WordScores):
    """With what shards need to look at the words again; passages of ``size`` chunks rank."""

    words: Words
    size: int
    shown_size: int


class FetchedScores:
    """:class:`~pipeline.search.reader.CandidateScores` of one query.

    Windows of ``size`` chunks are fetched with the rest; those of another size are asked for when they are
    wanted, of the few documents that they are wanted of.
    """

    def __init__(
        self,
        generation: Generation,
        shards: FanOut,
        positions: Int64[np.ndarray, " N"],
        vector_V: Float32[np.ndarray, " V"],
        words: AskedWords | None,
        *,
        parts: Sequence[str],
        size: int | None,
    ) -> None:
        self._generation, self._shards = generation, shards
        self._positions, self._vector_V, self._words, self._size = positions, vector_V, words, size
        self._sums: dict[tuple[int, int], Float32[np.ndarray, " V"]] = {}
        has_words = words is not None and words.has_passages
        asked = (words.words, words.size) if words is not None and has_words else (None, 0)
        found: list[tuple[Places, PartScores]] = shards.of_documents(
            "score",
            positions,
            lambda places, first: (positions[places] - first, vector_V, parts, *asked, size),
        )
        self._found = [scores for _, scores in found]
        if size is not None:
            sizes_N = windows_of_documents(generation, positions, size)
            self._sizes_N, self._starts_N = sizes_N, np.cumsum(sizes_N) - sizes_N
            windows = [scores.windows for scores in self._found if scores.windows is not None]
            self._windows = WindowScores(
                cosine_W=_joined([each.cosine_W for each in windows]),
                words_W=_joined([each.words_W for each in windows]) if has_words else None,
            )

    def documents(self) -> Float32[np.ndarray, " N"]:
        """See :class:`~pipeline.search.reader.CandidateScores`."""
        return _joined([found.document_N for found in self._found])

    def chunks(self) -> Float32[np.ndarray, " N"]:
        """See :class:`~pipeline.search.reader.CandidateScores`."""
        return _joined([found.chunk_N for found in self._found])

    def passages(self) -> Float32[np.ndarray, " N"]:
        """See :class:`~pipeline.search.reader.CandidateScores`."""
        return _joined([found.passage_N for found in self._found])

    def windows(self, chosen: Int64[np.ndarray, " K"], size: int) -> WindowScores:
        """See :class:`~pipeline.search.reader.CandidateScores`."""
        if size != self._size:
            return self._fetch_windows(self._positions[chosen], size)
        places_W = ranges(self._starts_N[chosen], self._sizes_N[chosen])
        known = self._windows
        return WindowScores(
            cosine_W=known.cosine_W[places_W],
            words_W=None if known.words_W is None else known.words_W[places_W],
        )

    def max_sim(
        self,
        query: LateQuery,
        first_W: Int64[np.ndarray, " W"],
        end_W: Int64[np.ndarray, " W"],
        title_W: Int64[np.ndarray, " W"],
    ) -> Float32[np.ndarray, " W"]:
        """See :class:`~pipeline.search.reader.CandidateScores`; the vectors of the best come with it."""
        found: list[tuple[Places, PartMatches]] = self._shards.of_chunks(
            "max_sim",
            first_W,
            lambda places, first: (
                query,
                *(each[places] - first for each in (first_W, end_W, title_W)),
                NUM_WINDOWS,
            ),
        )
        for places, matches in found:
            windows = first_W[places][matches.best_n], end_W[places][matches.best_n]
            self._sums.update(
                zip(zip(*(each.tolist() for each in windows), strict=True), matches.sums_nV, strict=True)
            )
        return gathered(np.ones_like(first_W), [(places, matches.max_sim_W) for places, matches in found])

    def window_sums(
        self, first_n: Int64[np.ndarray, " n"], end_n: Int64[np.ndarray, " n"]
    ) -> Float32[np.ndarray, "n V"]:
        """See :class:`~pipeline.search.reader.CandidateScores`."""
        return np.stack([self._sums[window] for window in zip(first_n.tolist(), end_n.tolist(), strict=True)])

    def _fetch_windows(self, positions: Int64[np.ndarray, " K"], size: int) -> WindowScores:
        words, asked = self._words, (None, 0)
        if words is not None and size == words.size and words.has_passages:
            asked = words.words, size
        elif words is not None and size != words.size and words.shown_high is not None:
            asked = words.words, words.shown_size
        found: list[tuple[Places, WindowScores]] = self._shards.of_documents(
            "windows",
            positions,
            lambda places, first: (positions[places] - first, self._vector_V, size, *asked),
        )
        sizes_K = windows_of_documents(self._generation, positions, size)
        words_W = [(places, each.words_W) for places, each in found if each.words_W is not None]
        return WindowScores(
            cosine_W=gathered(sizes_K, [(places, each.cosine_W) for places, each in found]),
            words_W=gathered(sizes_K, words_W) if asked[0] is not None else None,
        )


def _joined(parts: Sequence[Float32[np.ndarray, " _"] | None]) -> Float32[np.ndarray, " _"]:
    """Return one array of all shards' that were asked for it."""
    return np.concatenate([np.empty(0, np.float32), *(part for part in parts if part is not None)])
