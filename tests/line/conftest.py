"""A small ingest, and runs that are interrupted where they commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cairn.pipeline import durable
from cairn.pipeline.config import IngestConfig

from tests.small_ingests import WINDOWS, settings


@pytest.fixture(scope="session")
def config(tiny_model_folder: Path) -> IngestConfig:
    return settings(tiny_model_folder, num_clusters=3, context_documents=8, shard_characters=600, **WINDOWS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


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
