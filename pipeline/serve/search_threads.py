"""Threads for the blocking work of requests: reading and ranking, never encoding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

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

    def submit_after(self, first: Future[Any], call: Callable[[], _Result]) -> Future[_Result]:
        """Run ``call`` in the caller's context as soon as ``first`` is done, however that ended.

        No other thread wakes in between, and whoever cancels the result cancels ``first``.
        """
        result, context = Future[_Result](), copy_context()

        def run() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(context.run(call))
                except BaseException as error:  # noqa: BLE001 - `result.result()` raises it
                    result.set_exception(error)

        def begin(_: Future[Any]) -> None:
            try:
                _cancel_with(self.submit(run), result)
            except RuntimeError:  # the pool was shut down
                result.cancel()

        _cancel_with(result, first)
        first.add_done_callback(begin)
        return result

    async def run(self, call: Callable[[], _Result]) -> _Result:
        """Await a blocking call."""
        return await asyncio.wrap_future(self.submit(call))


def _cancel_with(future: Future[Any], other: Future[Any]) -> None:
    """Cancel the other future when this one is cancelled."""
    future.add_done_callback(lambda done: done.cancelled() and other.cancel())
