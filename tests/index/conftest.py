"""Fixtures over ``stones.py``, loaded by path since tests are no packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.index.layout import CollectionLayout


def load_stones() -> ModuleType:
    """Load the builders of small collections."""
    path = Path(__file__).with_name("stones.py")
    spec = importlib.util.spec_from_file_location("stones", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault("stones", importlib.util.module_from_spec(spec))
    if not hasattr(module, "publish_documents"):
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def stones() -> ModuleType:
    return load_stones()


@pytest.fixture
def layout(tmp_path: Path) -> CollectionLayout:
    return CollectionLayout(tmp_path / "root", "stones")


@pytest.fixture
def published(layout: CollectionLayout, stones: ModuleType) -> CollectionLayout:
    """A collection of twenty documents, generation 1."""
    stones.publish_documents(layout, stones.document_ids(20))
    return layout
