"""A small ingest, and runs that are interrupted where they commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cairn.pipeline import durable
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig


@pytest.fixture(scope="session")
def config(tiny_model_folder: Path) -> IngestConfig:
    return IngestConfig(
        encoder=EncoderConfig(
            model=str(tiny_model_folder), landmark_interval=16, window_tokens=64, window_overlap_tokens=16
        ),
        cluster=ClusterConfig(num_clusters=3),
        context=ContextConfig(context_documents=8, max_document_tokens=32),
        shard_characters=600,
    )


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
