"""One process that holds shards: the parts of collections that it is asked for."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from pipeline.faiss_library import faiss
from pipeline.search.shards.held_parts import HeldParts
from pipeline.search.shards.messages import PartKey


def packed(value: Any) -> bytes:
    """Pickle a question or an answer; Ray sends bytes as they are, and objects in several times as long."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpacked(content: bytes) -> Any:
    """Return what was packed, by a process of the same cluster."""
    return pickle.loads(content)  # noqa: S301 - Ray would unpickle it, too


class ShardActor:
    """Answers what :class:`~jobs.ray_serve.shard_calls.ShardCalls` asks, several questions at a time."""

    def __init__(self, root: str) -> None:
        # One question is one processor's work, as a search is in a server without shards.
        threadpool_limits(limits=1)
        self._held = HeldParts(Path(root))

    def answer(self, asked: bytes) -> bytes:
        """Answer a question about a part: its key, method and arguments, packed as the answer is."""
        faiss.omp_set_num_threads(1)
        key, method, arguments = unpacked(asked)
        return packed(self._held.answer(key, method, arguments))

    def held(self) -> tuple[int, list[PartKey]]:
        """Return the process and the parts it holds."""
        return os.getpid(), self._held.held()
