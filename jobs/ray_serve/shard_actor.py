"""One process that holds shards: the parts of collections that it is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cairn.jobs.ray_serve.direct_line import Listener, Listening
from cairn.pipeline.faiss_library import faiss
from cairn.pipeline.search.shards.held_parts import HeldParts
from cairn.pipeline.search.shards.messages import PartKey
from threadpoolctl import threadpool_limits


class ShardActor:
    """Answers what :class:`ShardCalls` asks, several questions at a time."""

    def __init__(self, root: str, *, verify: bool = False) -> None:
        import ray  # not before it is connected: Ray reads its token when it is imported

        # One question is one processor's work, as a search is in a server without shards.
        threadpool_limits(limits=1)
        self._held = HeldParts(Path(root), verify=verify)
        self._listener = Listener(self.answer, ray.get_runtime_context().get_node_id())

    def listening(self) -> Listening:
        """Return where the process listens for questions of its machine."""
        return self._listener.listening

    def answer(self, key: PartKey, method: str, arguments: tuple[Any, ...]) -> Any:
        """Answer a question about a part."""
        faiss.omp_set_num_threads(1)
        return self._held.answer(key, method, arguments)

    def held(self) -> tuple[int, list[PartKey]]:
        """Return the process and the parts it holds."""
        return os.getpid(), self._held.held()
