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
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, without settings of the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("CAIRN_ROOT", "CAIRN_CONFIG", "CAIRN_COLLECTION", "CAIRN_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"
