"""What is drawn once and kept.

Shared by all who ask, drawn anew after a failure or a publication, never more than a few.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.errors import TryAgainError
from pipeline.serve.maps import map_cache as drawings
from pipeline.serve.maps.map_cache import Drawings, Name
from pipeline.serve.problems import ProblemError


def name(collection: str = "stones", generation: int = 1, restriction: str = "null") -> Name:
    return collection, generation, "run", restriction


def test_all_who_ask_share_one_drawing() -> None:
    made: list[int] = []

    async def run() -> list[object]:
        with ThreadPoolExecutor(2) as pool:
            kept = Drawings[int](pool)
            return await asyncio.gather(*(kept.get(name(), lambda: made.append(1) or 7) for _ in range(5)))

    assert asyncio.run(run()) == [7] * 5
    assert made == [1]


def test_drawing_that_takes_long_is_there_later() -> None:
    release = threading.Event()

    async def run() -> tuple[object, object]:
        with ThreadPoolExecutor(1) as pool:
            kept = Drawings[bool](pool)
            early = await kept.get(name(), lambda: release.wait(), 0.0)
            release.set()
            return early, await kept.get(name(), lambda: False)

    assert asyncio.run(run()) == (None, True)


def test_failed_drawing_is_drawn_anew() -> None:
    async def run() -> object:
        with ThreadPoolExecutor(1) as pool:
            kept = Drawings[float](pool)
            with pytest.raises(ZeroDivisionError):
                await kept.get(name(), lambda: 1 / 0)
            return await kept.get(name(), lambda: 2.0)

    assert asyncio.run(run()) == 2.0


def test_what_is_being_drawn_is_told_to_end_when_the_server_stops() -> None:
    drawing = threading.Event()

    async def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            kept = Drawings[None](pool)

            def draw() -> None:
                while True:
                    kept.go_on()
                    drawing.set()

            assert await kept.get(name(), draw, 0.0) is None
            await asyncio.to_thread(drawing.wait)
            kept.stop()
            with pytest.raises(TryAgainError, match="server that stops"):
                await kept.get(name(), draw)

    asyncio.run(run())


def test_other_generations_and_too_many_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawings, "MAX_KEPT", 3)
    made: list[str] = []

    async def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            kept = Drawings[None](pool)
            steps = [name(), name(generation=2), name(), name("a"), name("b"), name("c"), name()]
            for step, each in enumerate(steps):
                await kept.get(each, lambda step=step: made.append(str(step)))
            await kept.get(name("c"), lambda: made.append("again"))

    asyncio.run(run())
    assert made == ["0", "1", "2", "3", "4", "5", "6"]


def test_more_than_can_be_drawn_are_told_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawings, "MAX_UNDER_WAY", 2)
    release = threading.Event()

    async def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            kept = Drawings[bool](pool)
            for collection in "ab":
                assert await kept.get(name(collection), lambda: release.wait(), 0.0) is None
            with pytest.raises(ProblemError, match="too many maps"):
                await kept.get(name("c"), lambda: True, 0.0)
            release.set()

    asyncio.run(run())
