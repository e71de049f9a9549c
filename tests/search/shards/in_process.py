"""Shards of a collection in this process, each with the parts that another process would hold."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cairn.pipeline.index.generation import Generation
from cairn.pipeline.search.served import MakeReader
from cairn.pipeline.search.shards.fan_out import FanOut
from cairn.pipeline.search.shards.held_parts import HeldParts
from cairn.pipeline.search.shards.messages import Question
from cairn.pipeline.search.shards.placement import Sharding
from cairn.pipeline.search.shards.sharded_reader import ShardedReader
from cairn.pipeline.types import PlaceBy


class Shards:
    """So many shards; ``asked`` are the methods they were asked for, ``rounds`` how often."""

    def __init__(
        self, root: Path, num_shards: int, place_by: PlaceBy = "order", route_clusters: int | None = None
    ) -> None:
        self.sharding = Sharding(num_shards=num_shards, place_by=place_by, route_clusters=route_clusters)
        self.held = [HeldParts(root) for _ in range(num_shards)]
        self.asked: list[str] = []
        self.rounds = 0

    def ask(self, questions: Sequence[Question]) -> list[Any]:
        self.rounds += 1
        self.asked += [question.method for question in questions]
        return [
            pickle.loads(
                pickle.dumps(
                    self.held[each.shard].answer(
                        each.key, each.method, pickle.loads(pickle.dumps(each.arguments))
                    )
                )
            )
            for each in questions
        ]

    def reader(self, generation: Generation) -> ShardedReader:
        return ShardedReader(generation, FanOut(generation, self.sharding, self.ask))


def shards_of(root: Path, num_shards: int, place_by: PlaceBy = "order") -> MakeReader:
    return Shards(root, num_shards, place_by).reader
