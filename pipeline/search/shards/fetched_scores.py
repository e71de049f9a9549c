"""Scores of candidates as shards computed them: most with the search, others in a question of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.ragged import ranges
from cairn.pipeline.search.candidates import windows_of_documents
from cairn.pipeline.search.late import NUM_WINDOWS, LateQuery
from cairn.pipeline.search.reader import Nominees, ScoresAsked, WindowScores
from cairn.pipeline.search.shards.fan_out import FanOut, Places, gathered
from cairn.pipeline.search.shards.fetched_words import FetchedWords
from cairn.pipeline.search.shards.messages import PartFound, PartMatches, PartScores
from jaxtyping import Float32, Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundNominees(Nominees):
    """With all that each shard found."""

    found: Mapping[int, PartFound]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Scores of ``positions`` in a shard; ``rows`` of them are those of candidates ``places``."""

    places: Places
    rows: Places
    positions: Places
    scores: PartScores


class FetchedScores:
    """:class:`~cairn.pipeline.search.reader.CandidateScores` of one query.

    Windows of the size asked for came with the rest; those of another size are asked for when they are
    wanted, of the few documents that they are wanted of.
    """

    def __init__(
        self,
        generation: Generation,
        shards: FanOut,
        nominees: FoundNominees,
        positions: Int64[np.ndarray, " N"],
        vector_V: Float32[np.ndarray, " V"],
        asked: ScoresAsked,
    ) -> None:
        words = asked.words
        assert words is None or isinstance(words, FetchedWords), "words are read and scored by one reader"
        self._generation, self._shards, self._positions = generation, shards, positions
        self._vector_V, self._words, self._size = vector_V, words, asked.size
        self._sums: dict[tuple[int, int], Float32[np.ndarray, " V"]] = {}
        self._pieces = self._known(nominees.found)
        known = np.concatenate([np.empty(0, np.int64), *(piece.places for piece in self._pieces)])
        if len(known) < len(positions):
            self._pieces += self._fetch(np.setdiff1d(np.arange(len(positions)), known), asked)
        self._windows = None if asked.size is None else self._fetched_windows(asked.size)

    def documents(self) -> Float32[np.ndarray, " N"]:
        """See :class:`~cairn.pipeline.search.reader.CandidateScores`."""
        return self._joined(lambda scores: scores.document_N)

    def chunks(self) -> Float32[np.ndarray, " N"]:
        """See :class:`~cairn.pipeline.search.reader.CandidateScores`."""
        return self._joined(lambda scores: scores.chunk_N)

    def passages(self) -> Float32[np.ndarray, " N"]:
        """See :class:`~cairn.pipeline.search.reader.CandidateScores`."""
        return self._joined(lambda scores: scores.passage_N)

    def windows(self, chosen: Int64[np.ndarray, " K"], size: int) -> WindowScores:
        """See :class:`~cairn.pipeline.search.reader.CandidateScores`."""
        known = self._windows
        if known is None or size != self._size:
            return self._fetch_windows(self._positions[chosen], size)
        sizes_N = windows_of_documents(self._generation, self._positions, size)
        places_W = ranges((np.cumsum(sizes_N) - sizes_N)[chosen], sizes_N[chosen])
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
        """See :class:`CandidateScores`; the vectors of the best come with it."""
        before_W = first_W - title_W
        found: list[tuple[Places, PartMatches]] = self._shards.of_chunks(
            "max_sim",
            first_W,
            lambda places, first: (
                query,
                first,
                first + (end_W - first_W)[places],
                first - before_W[places],
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
        """See :class:`~cairn.pipeline.search.reader.CandidateScores`."""
        return np.stack([self._sums[window] for window in zip(first_n.tolist(), end_n.tolist(), strict=True)])

    def _known(self, found: Mapping[int, PartFound]) -> list[_Piece]:
        """Return what came with the search, of those candidates that were scored by their shards."""
        pieces: list[_Piece] = []
        for shard, places, numbers in self._shards.placement.split_documents(self._positions):
            part = found.get(shard)
            if part is None or part.scores is None:
                continue
            rows = np.searchsorted(part.positions, numbers)
            is_known = np.append(part.positions, -1)[rows] == numbers
            positions = self._shards.placement.documents_of(shard, part.positions)
            pieces.append(_Piece(places[is_known], rows[is_known], positions, part.scores))
        return pieces

    def _fetch(self, places: Places, asked: ScoresAsked) -> list[_Piece]:
        """Ask for the scores of the other candidates."""
        words = self._words
        has_words = words is not None and words.has_passages
        positions = self._positions[places]
        found: list[tuple[Places, PartScores]] = self._shards.of_documents(
            "score",
            positions,
            lambda _, numbers: (
                numbers,
                self._vector_V,
                asked.parts,
                words.words if words is not None and has_words else None,
                words.size if words is not None else 0,
                asked.size,
            ),
        )
        return [_Piece(places[own], np.arange(len(own)), positions[own], scores) for own, scores in found]

    def _fetched_windows(self, size: int) -> WindowScores:
        cosines: list[tuple[Places, Float32[np.ndarray, " _"]]] = []
        words: list[tuple[Places, Float32[np.ndarray, " _"]]] = []
        has_words = self._words is not None and self._words.has_windows(size)
        for piece in self._pieces:
            sizes = windows_of_documents(self._generation, piece.positions, size)
            rows_W = ranges((np.cumsum(sizes) - sizes)[piece.rows], sizes[piece.rows])
            windows = piece.scores.windows
            assert windows is not None, "windows were asked for"
            cosines.append((piece.places, windows.cosine_W[rows_W]))
            if has_words:
                assert windows.words_W is not None, "words were asked for"
                words.append((piece.places, windows.words_W[rows_W]))
        sizes_N = windows_of_documents(self._generation, self._positions, size)
        return WindowScores(
            cosine_W=gathered(sizes_N, cosines), words_W=gathered(sizes_N, words) if has_words else None
        )

    def _fetch_windows(self, positions: Int64[np.ndarray, " K"], size: int) -> WindowScores:
        words = None if self._words is None or not self._words.has_windows(size) else self._words.words
        found: list[tuple[Places, WindowScores]] = self._shards.of_documents(
            "windows", positions, lambda _, numbers: (numbers, self._vector_V, size, words)
        )
        sizes_K = windows_of_documents(self._generation, positions, size)
        words_W = [(places, each.words_W) for places, each in found if each.words_W is not None]
        return WindowScores(
            cosine_W=gathered(sizes_K, [(places, each.cosine_W) for places, each in found]),
            words_W=gathered(sizes_K, words_W) if words is not None else None,
        )

    def _joined(
        self, part_of: Callable[[PartScores], Float32[np.ndarray, " _"] | None]
    ) -> Float32[np.ndarray, " N"]:
        """Return one array of what all shards were asked for."""
        scores_N = np.empty(len(self._positions), np.float32)
        for piece in self._pieces:
            part = part_of(piece.scores)
            assert part is not None, "a part that was asked for"
            scores_N[piece.places] = part[piece.rows]
        return scores_N
