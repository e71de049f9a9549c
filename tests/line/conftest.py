"""The settings and the root of a small ingest."""

from __future__ import annotations

from pathlib import Path

import pytest
from cairn.pipeline.config import IngestConfig

from tests.small_ingests import WINDOWS, settings


@pytest.fixture(scope="session")
def config(tiny_model_folder: Path) -> IngestConfig:
    return settings(tiny_model_folder, num_clusters=3, context_documents=8, shard_characters=600, **WINDOWS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"
