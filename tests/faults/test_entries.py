"""Entries of another kind in a collection: a folder or a link for a file, a file for a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.errors import DamageError
from pipeline.index.layout import CollectionLayout
from pipeline.index.maintenance import delete_documents, repair_collection, verify_collection
from pipeline.search.searcher import Searcher
from tests.entries import KINDS, put
from tests.faults.test_copies import Encoder, require_answers
from tests.index import stones


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two generations, made once; each test damages a copy."""
    root = tmp_path_factory.mktemp("template")
    layout = CollectionLayout(root, "stones")
    stones.publish_documents(layout, stones.document_ids(20))
    stones.publish_change(layout, "n")
    return root


@pytest.fixture
def layout(template: Path, tmp_path: Path) -> CollectionLayout:
    shutil.copytree(template, tmp_path / "root")
    return CollectionLayout(tmp_path / "root", "stones")


@pytest.mark.parametrize("kind", KINDS)
def test_current_of_another_kind_is_damaged_and_replaced(layout: CollectionLayout, kind: str) -> None:
    running = Searcher(layout, Encoder())
    put(layout.current_path, kind)
    require_answers(running, 2)
    assert "CURRENT" in running.warnings[0]
    require_answers(Searcher(layout, Encoder()), 2)
    assert [problem.file for problem in verify_collection(layout)] == ["CURRENT"]
    with pytest.raises(DamageError, match="run `cairn repair"):
        delete_documents(layout, ["n1"])
    report = repair_collection(layout)
    assert (report.generation, report.lost) == (2, ())
    assert verify_collection(layout) == []
    require_answers(running, 2)
    assert running.warnings == ()


@pytest.mark.parametrize("kind", KINDS)
def test_stray_entry_among_the_generations_stops_no_writer(layout: CollectionLayout, kind: str) -> None:
    stray = layout.generations_folder / ".x.tmp"
    put(stray, kind)
    assert repair_collection(layout).generation == 2
    assert not stray.is_symlink()
    assert not stray.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_generation_folder_of_another_kind_is_removed(layout: CollectionLayout, kind: str) -> None:
    put(layout.generation_folder(2), kind)
    report = repair_collection(layout)
    assert (report.generation, report.lost) == (3, ())
    assert verify_collection(layout) == []
    assert {entry.name for entry in layout.generations_folder.iterdir()} == {"00000001", "00000003"}
