"""The parts that one process holds: opened when first asked for, closed when no longer asked for.

Every question names its generation, so a search that began with one is answered from it to the end, whatever
is published meanwhile.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Final

from cairn.pipeline.errors import StorageError
from cairn.pipeline.index.generation import open_generation, part_of
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.stored_files import Checks
from cairn.pipeline.search.shards.messages import PartKey, content_of
from cairn.pipeline.search.shards.placement import place
from cairn.pipeline.search.shards.shard_part import ShardPart

METHODS: Final = frozenset(
    {
        "search",
        "score",
        "windows",
        "max_sim",
        "token_matches",
        "chunk_vectors",
    }
)
"""What may be asked."""
UNUSED_SECONDS: Final = 60.0
"""A part of another generation is closed so long after the last question: longer than any request takes."""


class HeldParts:
    """Answers questions about the collections under ``root``; safe to share between threads.

    With ``verify``, every file of a collection is hashed when the first part of it is opened.
    """

    def __init__(self, root: Path, *, verify: bool = False) -> None:
        self._root, self._verify = root, verify
        self._parts: dict[PartKey, ShardPart] = {}
        self._asked_at: dict[PartKey, float] = {}
        self._opening = threading.Lock()

    def answer(self, key: PartKey, method: str, arguments: tuple[Any, ...]) -> Any:
        """Answer a question, opening its part first where it is not held."""
        if method not in METHODS:
            raise AssertionError(f"a shard has no method {method!r}")
        self._asked_at[key] = time.monotonic()
        part = self._parts.get(key) or self._open(key)
        part.part.require_whole()
        return getattr(part, method)(*arguments)

    def held(self) -> list[PartKey]:
        """List the parts that are open."""
        return sorted(self._parts)

    def _open(self, key: PartKey) -> ShardPart:
        with self._opening:
            known = self._parts.get(key)
            if known is not None:
                return known
            layout = CollectionLayout.at(self._root, key.collection)
            is_first = all(held.collection != key.collection for held in self._parts)
            checks = Checks(verify=self._verify and is_first)
            generation = open_generation(layout, key.generation, checks)
            placement = place(generation, key.num_shards, key.place_by)
            if content_of(generation, placement) != key.content:
                raise StorageError(
                    f"generation {key.generation} of {key.collection!r} must be the same for every process "
                    "of a search, got two; let all see one root folder"
                )
            part = self._parts[key] = ShardPart(part_of(generation, placement.documents[key.shard]))
            self._close_unused(key)
            return part

    def _close_unused(self, opened: PartKey) -> None:
        before = time.monotonic() - UNUSED_SECONDS
        for key in list(self._parts):
            if key.collection == opened.collection and self._asked_at[key] < before:
                del self._parts[key], self._asked_at[key]
