"""What is made once a generation for whoever looks, and kept: maps, curves. At most so many, the least lately looked at go first.

A drawing belongs to the documents that a key sees: its restriction is part of the name, and nothing of
others' documents enters it.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, Final, Generic, TypeVar

from pipeline.errors import TryAgainError
from pipeline.index.generation import Generation
from pipeline.serve.problems import OVERLOADED, ProblemError

NICENESS: Final = 10
MAX_KEPT: Final = 32
MAX_UNDER_WAY: Final = 8
"""Drawings that may be under way or waiting: more callers than that are told to try again."""

_Drawn = TypeVar("_Drawn")
Name = tuple[str, int, str, str]


def name_of(generation: Generation, restriction: Mapping[str, Any] | None) -> Name:
    """Return what tells a drawing from all others.

    Collection, generation, the run that made it, and whose documents are seen.
    """
    manifest = generation.manifest
    return (
        generation.layout.name,
        manifest.generation,
        manifest.run_id,
        json.dumps(restriction, sort_keys=True),
    )


class Drawings(Generic[_Drawn]):
    """Drawings of one kind, made on an executor; used from one event loop.

    One that is given up is still finished for who waits.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._made: OrderedDict[Name, asyncio.Future[_Drawn]] = OrderedDict()
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """Let what is being drawn end soon: a server that stops waits for its threads."""
        self._is_stopped.set()

    def go_on(self) -> None:
        """Raise :class:`TryAgainError` once it is to stop; asked by what draws, on its own thread."""
        if self._is_stopped.is_set():
            raise TryAgainError(
                "a map must be asked for while the server runs, got a server that stops; ask again once "
                "it is up"
            )

    async def get(
        self, name: Name, draw: Callable[[], _Drawn], patience_seconds: float | None = None
    ) -> _Drawn | None:
        """Return a drawing, None where it is not ready within ``patience_seconds``.

        A failed one raises, and is drawn anew next time.
        """
        drawing = self._made.get(name)
        if drawing is None or (drawing.done() and (drawing.cancelled() or drawing.exception() is not None)):
            self._make_room(name)
            drawing = self._made[name] = asyncio.get_running_loop().run_in_executor(self._executor, draw)
            drawing.add_done_callback(_look_at)
        self._made.move_to_end(name)
        done, _ = await asyncio.wait({drawing}, timeout=patience_seconds)
        return drawing.result() if done else None

    def _make_room(self, name: Name) -> None:
        collection, generation, *_ = name
        for other in [other for other in self._made if other[0] == collection and other[1] != generation]:
            del self._made[other]
        while len(self._made) >= MAX_KEPT:
            self._made.popitem(last=False)
        if sum(not drawing.done() for drawing in self._made.values()) >= MAX_UNDER_WAY:
            raise ProblemError(OVERLOADED, "too many maps are being drawn")


def low_priority() -> None:
    """Let this thread yield to all others of the machine: who searches is waiting, who draws can."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _look_at(drawing: asyncio.Future[Any]) -> None:
    """Take note of an error that nobody may be waiting for any more; whoever asks again draws again."""
    if not drawing.cancelled():
        drawing.exception()
