"""Which shard has which positions, and what several shards answer put together.

S shards    Q queries    K found    N documents    M chunks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64, Shaped

from pipeline.index.generation import Generation
from pipeline.index.protocol import NO_POSITION
from pipeline.ragged import ranges
from pipeline.search.shards.messages import Ask, Nearest, PartKey, Question, content_of

Places = Int64[np.ndarray, " _"]


def document_bounds(
    chunk_offsets: Int64[np.ndarray, " N_plus_1"], num_shards: int
) -> Int64[np.ndarray, " S_plus_1"]:
    """Return the first document of each shard, and N at the end.

    Shards have about as many chunks each; there are fewer of them where there are few documents.
    """
    wanted = np.linspace(0, int(chunk_offsets[-1]), num_shards + 1)
    return np.unique(np.searchsorted(chunk_offsets, wanted))


def part_keys(generation: Generation, num_shards: int) -> list[PartKey]:
    """Return which part of a generation each shard has."""
    content = content_of(generation)
    bounds = document_bounds(generation.chunk_offsets, num_shards).tolist()
    return [
        PartKey(generation.layout.name, generation.number, content, first, end)
        for first, end in pairwise(bounds)
    ]


class FanOut:
    """Asks the shards of one generation, each for the positions it has."""

    def __init__(self, generation: Generation, num_shards: int, ask: Ask) -> None:
        self._ask = ask
        self._keys = part_keys(generation, num_shards)
        self.bounds = np.array([0, *(key.end for key in self._keys)], np.int64)
        self.chunk_bounds = generation.chunk_offsets[self.bounds]

    def each(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Ask some shards at once, each with its own arguments; return their answers."""
        questions = [
            Question(shard, self._keys[shard], method, own) for shard, own in sorted(arguments.items())
        ]
        return dict(zip(sorted(arguments), self._ask(questions), strict=True))

    def every(self, method: str, *arguments: Any) -> list[Any]:
        """Ask all shards the same."""
        return list(self.each(method, dict.fromkeys(range(len(self._keys)), arguments)).values())

    def of_documents(
        self, method: str, documents: Places, arguments: Callable[[Places, int], tuple[Any, ...]]
    ) -> list[tuple[Places, Any]]:
        """Ask the shards that have some documents; return the places of each one's documents and its answer.

        ``arguments`` gets those places and the first document of the shard.
        """
        return self._of_owners(method, self.bounds, documents, arguments)

    def of_chunks(
        self, method: str, chunks: Places, arguments: Callable[[Places, int], tuple[Any, ...]]
    ) -> list[tuple[Places, Any]]:
        """Ask the shards that have some chunks, as :meth:`of_documents` does."""
        return self._of_owners(method, self.chunk_bounds, chunks, arguments)

    def allowed(self, documents: Int64[np.ndarray, " A"] | None) -> dict[int, Places | None]:
        """Return which of some ascending documents each shard has, as it counts them; None allows all."""
        if documents is None:
            return dict.fromkeys(range(len(self._keys)))
        cuts = np.searchsorted(documents, self.bounds).tolist()
        own = [documents[begin:end] for begin, end in pairwise(cuts)]
        return {shard: each - self.bounds[shard] for shard, each in enumerate(own) if len(each)}

    def _of_owners(
        self,
        method: str,
        bounds: Int64[np.ndarray, " S_plus_1"],
        positions: Places,
        arguments: Callable[[Places, int], tuple[Any, ...]],
    ) -> list[tuple[Places, Any]]:
        owners = np.searchsorted(bounds[1:], positions, side="right")
        places = {owner: np.flatnonzero(owners == owner) for owner in np.unique(owners).tolist()}
        answers = self.each(
            method, {owner: arguments(own, int(bounds[owner])) for owner, own in places.items()}
        )
        return [(places[owner], answer) for owner, answer in answers.items()]


def best(
    found: Sequence[tuple[Places, Float32[np.ndarray, " _"]]], limit: int
) -> tuple[Places, Float32[np.ndarray, " _"]]:
    """Return the positions and scores of the best of several lists, best first, ties by position."""
    positions = np.concatenate([each for each, _ in found])
    scores = np.concatenate([each for _, each in found])
    order = np.lexsort((positions, -scores))[:limit]
    return positions[order], scores[order]


def nearest_of_all(
    found: Mapping[int, Nearest], bounds: Int64[np.ndarray, " S_plus_1"], top_k: int
) -> Int64[np.ndarray, "Q K"]:
    """Return the positions of the nearest vectors of several shards, best first, ties by position."""
    positions = [
        np.where(each.positions_QK == NO_POSITION, NO_POSITION, each.positions_QK + bounds[shard])
        for shard, each in found.items()
    ]
    positions_QF = np.concatenate(positions, axis=1)
    scores_QF = np.concatenate([each.scores_QK for each in found.values()], axis=1)
    last = np.where(positions_QF == NO_POSITION, np.iinfo(np.int64).max, positions_QF)
    order = np.lexsort((last, -scores_QF), axis=1)[:, :top_k]
    return np.take_along_axis(positions_QF, order, axis=1)


def gathered(
    sizes_N: Places, pieces: Sequence[tuple[Places, Shaped[np.ndarray, ...]]]
) -> Shaped[np.ndarray, ...]:
    """Return the rows of N items in their order; each piece has those of the items at some places."""
    start_N = np.empty(len(sizes_N), np.int64)
    num_rows = 0
    for places, rows in pieces:
        ends = np.cumsum(sizes_N[places])
        start_N[places] = num_rows + ends - sizes_N[places]
        num_rows += len(rows)
    return np.concatenate([rows for _, rows in pieces])[ranges(start_N, sizes_N)]
