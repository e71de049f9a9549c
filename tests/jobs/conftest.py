"""Runs that are interrupted where they commit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline import durable


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that interrupts the run in this process at the n-th passing of a commit point."""
    monkeypatch.setattr(durable, "_observers", [])

    def arm(name: str, times: int = 1) -> None:
        passed = 0

        def observer(point: str) -> None:
            nonlocal passed
            passed += point == name
            if point == name and passed == times:
                raise KeyboardInterrupt

        durable.observe_commit_points(observer)

    return arm
