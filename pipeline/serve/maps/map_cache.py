"""Maps computed once for a generation and then kept.

An entry holds only documents that an API key sees, since the key's restriction is part of the cache key. The
number of entries is bounded; the least recently used go first.
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

from cairn.pipeline.errors import TryAgainError
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.serve.problems import OVERLOADED, ProblemError

NICENESS: Final = 10
MAX_ENTRIES: Final = 32
MAX_PENDING: Final = 8
"""Entries that may be computed or wait for it; a request for one more is told to try again."""

_Entry = TypeVar("_Entry")
CacheKey = tuple[str, int, str, str]


def cache_key(generation: Generation, restriction: Mapping[str, Any] | None) -> CacheKey:
    """Return collection, generation, the run that made it, and the restriction of the API key."""
    manifest = generation.manifest
    return (
        generation.layout.name,
        manifest.generation,
        manifest.run_id,
        json.dumps(restriction, sort_keys=True),
    )


class GenerationCache(Generic[_Entry]):
    """Entries of one kind, computed on an executor; used from one event loop.

    An entry whose request was cancelled is still computed for the others that wait. One of a generation that
    is no longer asked for is not: writes would leave more and more of them.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._entries: OrderedDict[CacheKey, asyncio.Future[_Entry]] = OrderedDict()
        self._progress: dict[CacheKey, float] = {}
        self._asked: dict[str, int] = {}
        """The generation of each collection that was last asked for."""
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """Let what is being computed end soon: a server that stops waits for its threads."""
        self._is_stopped.set()

    def progress(self, key: CacheKey) -> float:
        """Return the share of an entry that has been computed so far, 0 to 1."""
        return self._progress.get(key, 0.0)

    def report(self, key: CacheKey, share: float) -> None:
        """Note how much has been computed; raises :class:`TryAgainError` once stopped or out of date."""
        if self._is_stopped.is_set() or self._asked[key[0]] != key[1]:
            raise TryAgainError("a map must be of the generation that is served, got an older one; ask again")
        self._progress[key] = share

    async def get(
        self, key: CacheKey, compute: Callable[[], _Entry], timeout_seconds: float | None = None
    ) -> _Entry | None:
        """Return an entry, None where it is not ready in time or out of date; a failed one is made again."""
        entry = self._entries.get(key)
        if entry is None or (entry.done() and (entry.cancelled() or entry.exception() is not None)):
            self._make_room(key)
            entry = self._entries[key] = asyncio.get_running_loop().run_in_executor(self._executor, compute)
            entry.add_done_callback(_retrieve_exception)
            entry.add_done_callback(lambda _: self._progress.pop(key, None))
        self._entries.move_to_end(key)
        done, _ = await asyncio.wait({entry}, timeout=timeout_seconds)
        return entry.result() if done and not entry.cancelled() else None

    def _make_room(self, key: CacheKey) -> None:
        collection, generation, *_ = key
        self._asked[collection] = generation
        for other in [other for other in self._entries if other[0] == collection and other[1] != generation]:
            self._entries.pop(other).cancel()
        while len(self._entries) >= MAX_ENTRIES:
            self._entries.popitem(last=False)
        if sum(not entry.done() for entry in self._entries.values()) >= MAX_PENDING:
            raise ProblemError(OVERLOADED, "too many maps are being drawn")


def lower_thread_priority() -> None:
    """Let this thread yield to all others of the machine: searches come before maps."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _retrieve_exception(entry: asyncio.Future[Any]) -> None:
    """Mark an error as seen where no request waits for it any more; the next one computes the entry again."""
    if not entry.cancelled():
        entry.exception()
