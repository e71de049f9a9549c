"""Ask shards by the positions they have, and put together what they answer.

N items
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.ragged import ranges
from cairn.pipeline.search.shards.messages import Ask, PartKey, Question, content_of
from cairn.pipeline.search.shards.placement import Places, Sharding, place
from jaxtyping import Float32, Int64, Shaped

Arguments = Callable[[Places, Places], tuple[Any, ...]]
"""A question's arguments, given where a shard's items stand among those asked for, and its own numbers."""


class FanOut:
    """Asks the shards of one generation, each for the positions it has."""

    def __init__(self, generation: Generation, sharding: Sharding, ask: Ask) -> None:
        self._ask = ask
        self.sharding = sharding
        num_shards, place_by = sharding.num_shards, sharding.place_by
        self.placement = place(generation, num_shards, place_by)
        content = content_of(generation, self.placement)
        self.keys = [
            PartKey(generation.layout.name, generation.number, content, place_by, num_shards, shard)
            for shard in range(len(self.placement.documents))
        ]

    def each(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Ask some shards at once, each with its own arguments; return their answers."""
        questions = [
            Question(shard, self.keys[shard], method, own) for shard, own in sorted(arguments.items())
        ]
        return dict(zip(sorted(arguments), self._ask(questions), strict=True))

    def of_documents(self, method: str, documents: Places, arguments: Arguments) -> list[tuple[Places, Any]]:
        """Ask the shards that have some documents; return where each one's stand, and its answer."""
        return self._of_owners(method, self.placement.split_documents(documents), arguments)

    def of_chunks(self, method: str, chunks: Places, arguments: Arguments) -> list[tuple[Places, Any]]:
        """Ask the shards that have some chunks, as :meth:`of_documents` does."""
        return self._of_owners(method, self.placement.split_chunks(chunks), arguments)

    def allowed(self, documents: Int64[np.ndarray, " A"] | None) -> dict[int, Places | None]:
        """Return which of some ascending documents each shard has, by its own numbers; None allows all."""
        if documents is None:
            return dict.fromkeys(range(len(self.keys)))
        return {shard: numbers for shard, _, numbers in self.placement.split_documents(documents)}

    def _of_owners(
        self, method: str, owners: Iterable[tuple[int, Places, Places]], arguments: Arguments
    ) -> list[tuple[Places, Any]]:
        split = list(owners)
        answers = self.each(method, {shard: arguments(places, numbers) for shard, places, numbers in split})
        return [(places, answers[shard]) for shard, places, _ in split]


def best(
    found: Sequence[tuple[Places, Float32[np.ndarray, " _"]]], limit: int
) -> tuple[Places, Float32[np.ndarray, " _"]]:
    """Return the positions and scores of the best of several lists, best first, ties by position."""
    positions = np.concatenate([each for each, _ in found])
    scores = np.concatenate([each for _, each in found])
    order = np.lexsort((positions, -scores))[:limit]
    return positions[order], scores[order]


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
