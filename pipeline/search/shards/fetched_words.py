"""BM25 of one query as shards computed it: they are asked for it with the vector of the query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.search.candidates import documents_of_chunks
from cairn.pipeline.search.reader import WordsAsked
from cairn.pipeline.search.shards.fan_out import FanOut, Places, best
from cairn.pipeline.search.shards.messages import BestAsked, BestWords, Words, WordTotals
from jaxtyping import Float32


class FetchedWords:
    """:class:`~cairn.pipeline.search.reader.WordScores`; passages of ``size`` chunks rank."""

    def __init__(self, generation: Generation, shards: FanOut, asked: WordsAsked, totals: WordTotals) -> None:
        self._generation, self._shards = generation, shards
        self._num_candidates = asked.num_candidates
        self.words = Words(query=asked.query, totals=totals)
        self.size = asked.size
        self.shown_size = asked.size if asked.shown_size is None else asked.shown_size
        self._found: Mapping[int, BestWords] | None = None

    @property
    def best_asked(self) -> BestAsked | None:
        """What to ask shards of it; None where it is known."""
        if self._found is not None:
            return None
        return BestAsked(num_candidates=self._num_candidates, size=self.size)

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
            self._num_candidates,
        )

    @cached_property
    def _passages(self) -> Places:
        chunks_of = self._shards.placement.chunks_of
        found, _ = best(
            [(chunks_of(shard, each.passages), each.passage_scores) for shard, each in self._parts.items()],
            self._num_candidates,
        )
        return found
