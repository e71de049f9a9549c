"""Shards of a collection in this process, each with the parts that another would hold, asked in its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cairn.jobs.ray_serve.wire import pack, unpack
from cairn.pipeline.index.generation import Generation, OpenOne
from cairn.pipeline.index.layout import Checks, CollectionLayout
from cairn.pipeline.search.shards.parts import HeldParts, Question, ShardUnreachableError
from cairn.pipeline.search.shards.sharded_generation import open_on_shards


class Shards:
    """So many shards; ``asked`` are the methods they were asked for, ``rounds`` how often.

    Those that are ``down`` do not answer.
    """

    def __init__(self, root: Path, num_shards: int) -> None:
        self.held = [HeldParts(root) for _ in range(num_shards)]
        self.down: set[int] = set()
        self.asked: list[str] = []
        self.rounds = 0

    def ask(self, questions: Sequence[Question]) -> list[Any]:
        self.rounds += 1
        for each in questions:
            if each.shard in self.down:
                raise ShardUnreachableError("no replica answers")
        self.asked += [question.method for question in questions]
        answers: list[Any] = []
        for each in questions:
            key, method, arguments = unpack(pack((each.key, each.method, each.arguments)))
            answers.append(unpack(pack(self.held[each.shard].answer(key, method, arguments))))
        return answers

    def open(self, layout: CollectionLayout, number: int, checks: Checks) -> Generation:
        return open_on_shards(layout, number, checks, len(self.held), self.ask)


def shards_of(root: Path, num_shards: int) -> OpenOne:
    return Shards(root, num_shards).open
