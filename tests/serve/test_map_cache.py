"""Entries are computed once for a generation, shared, bounded, and computed again after a failure."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from cairn.pipeline.errors import TryAgainError
from cairn.pipeline.serve import corpus_map
from cairn.pipeline.serve.corpus_map import CacheKey, MapCache
from cairn.pipeline.serve.problems import ProblemError


def key(collection: str = "stones", generation: int = 1, restriction: str = "null") -> CacheKey:
    return collection, generation, "run", restriction


def test_all_requests_share_one_entry() -> None:
    made: list[int] = []

    async def run() -> list[object]:
        with ThreadPoolExecutor(2) as pool:
            kept = MapCache(pool)
            return await asyncio.gather(*(kept.get(key(), lambda: made.append(1) or 7) for _ in range(5)))

    assert asyncio.run(run()) == [7] * 5
    assert made == [1]


def test_entry_that_takes_long_is_there_later() -> None:
    release = threading.Event()

    async def run() -> tuple[object, object]:
        with ThreadPoolExecutor(1) as pool:
            kept = MapCache(pool)
            early = await kept.get(key(), lambda: release.wait(), 0.0)
            release.set()
            return early, await kept.get(key(), lambda: False)

    assert asyncio.run(run()) == (None, True)


def test_failed_entry_is_computed_again() -> None:
    async def run() -> object:
        with ThreadPoolExecutor(1) as pool:
            kept = MapCache(pool)
            with pytest.raises(ZeroDivisionError):
                await kept.get(key(), lambda: 1 / 0)
            return await kept.get(key(), lambda: 2.0)

    assert asyncio.run(run()) == 2.0


def test_what_is_being_computed_is_told_to_end_when_the_server_stops() -> None:
    is_computing = threading.Event()

    async def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            kept = MapCache(pool)

            def compute() -> None:
                while True:
                    kept.report(key(), 0.5)
                    is_computing.set()

            assert await kept.get(key(), compute, 0.0) is None
            await asyncio.to_thread(is_computing.wait)
            assert kept.progress(key()) == 0.5
            kept.stop()
            with pytest.raises(TryAgainError, match="ask again"):
                await kept.get(key(), compute)
            assert kept.progress(key()) == 0.0

    asyncio.run(run())


def test_only_the_newest_of_generations_that_follow_one_another_is_computed() -> None:
    """A page asks after each write: what older generations left would never end."""
    made: list[int] = []
    is_computing, all_are_asked = threading.Event(), threading.Event()

    async def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            kept = MapCache(pool)

            def first() -> int:
                is_computing.set()
                all_are_asked.wait()
                kept.report(key(), 0.5)  # it is told to end
                made.append(1)
                return 1

            asked = asyncio.create_task(kept.get(key(), first))
            await asyncio.to_thread(is_computing.wait)
            for number in range(2, 10):
                await kept.get(key(generation=number), lambda number=number: made.append(number) or 1, 0.0)
            last = asyncio.create_task(kept.get(key(generation=10), lambda: 10))
            for _ in range(2):  # what `last` cancels reaches the pool one turn of the loop later
                await asyncio.sleep(0)
            all_are_asked.set()
            assert (await asked, await last) == (None, 10)

    asyncio.run(run())
    assert made == []


def test_other_generations_and_too_many_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_map, "MAX_ENTRIES", 3)
    made: list[str] = []

    async def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            kept = MapCache(pool)
            steps = [key(), key(generation=2), key(), key("a"), key("b"), key("c"), key()]
            for step, each in enumerate(steps):
                await kept.get(each, lambda step=step: made.append(str(step)))
            await kept.get(key("c"), lambda: made.append("again"))

    asyncio.run(run())
    assert made == ["0", "1", "2", "3", "4", "5", "6"]


def test_more_than_can_be_computed_are_told_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_map, "MAX_PENDING", 2)
    release = threading.Event()

    async def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            kept = MapCache(pool)
            for collection in "ab":
                assert await kept.get(key(collection), lambda: release.wait(), 0.0) is None
            with pytest.raises(ProblemError, match="too many maps"):
                await kept.get(key("c"), lambda: True, 0.0)
            release.set()

    asyncio.run(run())
