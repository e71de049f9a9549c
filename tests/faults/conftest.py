"""Two generations of a collection, made once, whose copies tests damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cairn.pipeline.index.layout import CollectionLayout

from tests.index import stones


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two generations, made once; each test damages a copy."""
    root = tmp_path_factory.mktemp("template")
    layout = CollectionLayout(root, "stones")
    stones.publish_documents(layout, stones.document_ids(20), with_tokens=True)
    stones.publish_change(layout, "n")
    shutil.rmtree(layout.pending_folder)
    return root


@pytest.fixture
def layout(template: Path, tmp_path: Path) -> CollectionLayout:
    """A copy of the template."""
    shutil.copytree(template, tmp_path / "root")
    return CollectionLayout(tmp_path / "root", "stones")
