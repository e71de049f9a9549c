"""What shards computed, as a ranking reads it: BM25 and scores of one query, and the totals that BM25 needs.

BM25 is asked for with the vector of the query, and most scores come with that answer; others are asked for in
a question of their own. The process that asks counts the words of the whole collection. Counting a word reads
its postings; the counts are kept, since frequent words cost most and come back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from cairn.pipeline.index.bm25 import Totals
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.words import terms_of
from cairn.pipeline.ragged import ranges
from cairn.pipeline.search.candidates import documents_of_chunks, windows_of_documents
from cairn.pipeline.search.late import NUM_WINDOWS, LateQuery
from cairn.pipeline.search.lexical import bounded_words
from cairn.pipeline.search.reader import Nominees, ScoresAsked, WindowScores, WordsAsked
from cairn.pipeline.search.shards.fan_out import FanOut, Places, best, gathered
from cairn.pipeline.search.shards.messages import (
    BestWords,
    PartFound,
    PartMatches,
    PartScores,
    Words,
    WordTotals,
)
from jaxtyping import Float32, Int64

KEPT_TERMS: Final = 50_000
"""About 15 MB; with more, all are counted again."""


class CorpusTotals:
    """Totals of one generation; safe to share between threads."""

    def __init__(self, generation: Generation) -> None:
        self._documents, self._passages = generation.document_bm25, generation.passage_bm25
        self._held: dict[str, tuple[int, int, int]] = {}

    def of(self, query: str, sizes: Sequence[int]) -> WordTotals:
        """Return the totals for the words of a query, those of passages by the sizes of their windows."""
        terms = dict.fromkeys(terms_of(bounded_words(query)))
        held = {term: self._held.get(term) or self._count(term) for term in terms}
        text, title = self._documents.totals(())
        chunks = {term: counts[2] for term, counts in held.items()}
        return WordTotals(
            documents=(
                replace(text, holding={term: counts[0] for term, counts in held.items()}),
                replace(title, holding={term: counts[1] for term, counts in held.items()}),
            ),
            passages={size: self._of_passages(size, chunks) for size in sizes},
        )

    def _of_passages(self, size: int, chunks: Mapping[str, int]) -> tuple[Totals, Totals]:
        windows, all_chunks = self._passages.totals((), size)
        return windows, replace(all_chunks, holding=chunks)

    def _count(self, term: str) -> tuple[int, int, int]:
        """Count the texts, titles and chunks that hold a term."""
        if len(self._held) >= KEPT_TERMS:
            self._held = {}
        text, title = self._documents.totals((term,))
        chunks = self._passages.totals((term,), 1)[1]
        counts = text.holding[term], title.holding[term], chunks.holding[term]
        self._held[term] = counts
        return counts


class FetchedWords:
    """:class:`~cairn.pipeline.search.reader.WordScores`; passages of ``size`` chunks rank."""

    def __init__(self, generation: Generation, shards: FanOut, asked: WordsAsked, totals: WordTotals) -> None:
        self._generation, self._shards = generation, shards
        self.num_candidates = asked.num_candidates
        self.words = Words(query=asked.query, totals=totals, size=asked.size)
        self.size = asked.size
        self.shown_size = asked.size if asked.shown_size is None else asked.shown_size
        self._found: Mapping[int, BestWords] | None = None

    @property
    def is_known(self) -> bool:
        """Tell whether the shards of a search have been asked for it."""
        return self._found is not None

    def keep(self, found: Mapping[int, BestWords]) -> None:
        """Take what the shards of a search found."""
        self._found = found

    def has_windows(self, size: int) -> bool:
        """Tell whether a word stands in any passage of a size: of those that rank, or of those shown."""
        return self.has_passages if size == self.size else self.shown_high is not None

    @property
    def documents(self) -> Places:
        """See :class:`~cairn.pipeline.search.reader.WordScores`."""
        return self._best[0]

    @property
    def scores(self) -> Float32[np.ndarray, " A"]:
        """See :class:`~cairn.pipeline.search.reader.WordScores`."""
        return self._best[1]

    @property
    def nominees(self) -> Sequence[Places]:
        """See :class:`~cairn.pipeline.search.reader.WordScores`."""
        by_passage = documents_of_chunks(self._generation, self._passages)
        return [self.documents, by_passage] if len(by_passage) else [self.documents]

    @property
    def has_passages(self) -> bool:
        """See :class:`~cairn.pipeline.search.reader.WordScores`."""
        return len(self._passages) > 0

    @property
    def shown_high(self) -> float | None:
        """See :class:`~cairn.pipeline.search.reader.WordScores`."""
        return max(each.highs[self.shown_size] for each in self._parts.values()) or None

    @property
    def _parts(self) -> Mapping[int, BestWords]:
        assert self._found is not None, "words are looked at after the search that asks for them"
        return self._found

    @cached_property
    def _best(self) -> tuple[Places, Float32[np.ndarray, " A"]]:
        documents_of = self._shards.placement.documents_of
        return best(
            [(documents_of(shard, each.documents), each.scores) for shard, each in self._parts.items()],
            self.num_candidates,
        )

    @cached_property
    def _passages(self) -> Places:
        chunks_of = self._shards.placement.chunks_of
        found, _ = best(
            [(chunks_of(shard, each.passages), each.passage_scores) for shard, each in self._parts.items()],
            self.num_candidates,
        )
        return found


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
