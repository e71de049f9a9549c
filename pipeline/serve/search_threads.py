"""Threads for the blocking work of requests: reading and ranking, never encoding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

from typing_extensions import override

_Result = TypeVar("_Result")
_Given = ParamSpec("_Given")


class SearchThreads(Executor):
    """A pool whose calls are timed; its maker shuts the pool down."""

    def __init__(self, pool: Executor, observe_seconds: Callable[[float], None]) -> None:
        self._pool = pool
        self._observe_seconds = observe_seconds

    @override
    def submit(
        self, call: Callable[_Given, _Result], /, *args: _Given.args, **kwargs: _Given.kwargs
    ) -> Future[_Result]:
        def timed() -> _Result:
            started_seconds = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._observe_seconds(time.perf_counter() - started_seconds)

        return self._pool.submit(timed)

    async def run(self, call: Callable[[], _Result]) -> _Result:
        """Await a blocking call."""
        return await asyncio.wrap_future(self.submit(call))
