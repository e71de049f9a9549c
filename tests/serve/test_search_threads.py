"""Calls of search threads that follow a future, without another thread between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import ContextVar

import pytest
from cairn.pipeline.errors import StorageError
from cairn.pipeline.serve.search_threads import SearchThreads

_SEEN: ContextVar[str] = ContextVar("_SEEN", default="nothing")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="cairn-search") as pool:
        yield pool


@pytest.fixture
def threads(pool: ThreadPoolExecutor) -> SearchThreads:
    return SearchThreads(pool, lambda _: None)


def test_call_runs_after_the_future_on_a_search_thread_in_the_callers_context(threads: SearchThreads) -> None:
    first = Future[int]()
    token = _SEEN.set("the caller's")
    found = threads.submit_after(
        first, lambda: (first.result(), threading.current_thread().name, _SEEN.get())
    )
    _SEEN.reset(token)
    assert not found.done()
    first.set_result(7)
    assert found.result(600) == (7, "cairn-search_0", "the caller's")


def test_what_the_future_or_the_call_raises_is_raised(threads: SearchThreads) -> None:
    first = Future[int]()
    found = threads.submit_after(first, first.result)
    first.set_exception(StorageError("what failed"))
    with pytest.raises(StorageError, match=r"^what failed$"):
        found.result(600)


def test_cancelled_result_cancels_the_future_and_is_not_computed(threads: SearchThreads) -> None:
    first, called = Future[int](), threading.Event()
    found = threads.submit_after(first, called.set)
    assert found.cancel()
    assert first.cancelled()
    threads.submit(lambda: None).result(600)
    assert not called.is_set()


@pytest.mark.parametrize("is_queued", [True, False])
def test_result_of_a_pool_that_was_shut_down_is_cancelled(
    pool: ThreadPoolExecutor, threads: SearchThreads, is_queued: bool
) -> None:
    first, go_on = Future[int](), threading.Event()
    threads.submit(go_on.wait)
    found = threads.submit_after(first, first.result)
    if is_queued:
        first.set_result(7)
    pool.shutdown(wait=False, cancel_futures=True)
    if not is_queued:
        first.set_result(7)
    with pytest.raises(CancelledError):
        found.result(600)
    go_on.set()
