"""Small collections of ``stones.py``, on a disk and in an object store."""

from __future__ import annotations

from pathlib import Path

import pytest
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.object_folder import ObjectFolder

from tests.index import stones
from tests.object_stores import STORE_ROOT, ObjectStore


@pytest.fixture
def layout(tmp_path: Path) -> CollectionLayout:
    return CollectionLayout(tmp_path / "root", "stones")


@pytest.fixture
def published(layout: CollectionLayout) -> CollectionLayout:
    """A collection of twenty documents, generation 1."""
    stones.publish_documents(layout, stones.document_ids(20))
    return layout


@pytest.fixture
def bucket(object_store: ObjectStore) -> ObjectFolder:
    """Return the collection's folder in the store, without any copy."""
    return ObjectFolder(f"{STORE_ROOT}/stones")
