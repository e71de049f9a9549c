"""Small collections of ``stones.py``, on a disk and in an object store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cairn.pipeline.index import replica as replica_module
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.object_folder import ObjectFolder

from tests.index import stones

if TYPE_CHECKING:
    from tests.object_stores import ObjectStore

STORE_ROOT = "s3://cairn/indexes"
Machine = Callable[[str], CollectionLayout]


@pytest.fixture
def layout(tmp_path: Path) -> CollectionLayout:
    return CollectionLayout(tmp_path / "root", "stones")


@pytest.fixture
def published(layout: CollectionLayout) -> CollectionLayout:
    """A collection of twenty documents, generation 1."""
    stones.publish_documents(layout, stones.document_ids(20))
    return layout


@pytest.fixture
def machine(object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a maker of layouts of one collection, each with the copies of the machine it names."""
    monkeypatch.setattr(replica_module, "REFRESH_SECONDS", 0.0)

    def on(name: str) -> CollectionLayout:
        monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / name))
        return CollectionLayout.at(Path(STORE_ROOT), "stones")

    return on


@pytest.fixture
def bucket(object_store: ObjectStore) -> ObjectFolder:
    """Return the collection's folder in the store, without any copy."""
    return ObjectFolder(f"{STORE_ROOT}/stones")
