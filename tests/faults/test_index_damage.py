"""Fault matrix 11-14: flipped bits, truncated and missing files; what is refused, found and repaired.

Of files that are there twice, both copies are damaged here: see ``test_copies`` for one.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.index.generation import open_generation, open_latest_intact_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import (
    compact_collection,
    delete_documents,
    repair_collection,
    verify_collection,
)
from cairn.pipeline.index.names import COPIES
from cairn.pipeline.manifest import MANIFEST_NAME

DERIVED = (
    "documents.faiss",
    "chunks.faiss",
    "documents.arrow",
    "chunks.arrow",
    "passages.arrow",
    "titles.arrow",
    "lengths.arrow",
    "lance_files.json",
)
SIDE = ("context.arrow", "clusters.arrow")


@pytest.fixture(scope="module")
def stones() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "stones_of_damage", Path(__file__).parents[1] / "index" / "stones.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def template(stones: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two generations, made once; each test damages a copy."""
    root = tmp_path_factory.mktemp("template")
    layout = CollectionLayout(root, "stones")
    stones.publish_documents(layout, stones.document_ids(20))
    stones.publish_change(layout, "n")
    return root


@pytest.fixture(scope="module")
def old_ids(stones: ModuleType) -> list[str]:
    return stones.document_ids(20)


@pytest.fixture(scope="module")
def new_ids(stones: ModuleType, template: Path) -> list[str]:
    return open_generation(CollectionLayout(template, "stones")).doc_ids.to_pylist()


def twice(path: Path) -> list[Path]:
    """Return a file and its second copy, if it has one."""
    below = path.name if path.parent.parent.name == "generations" else Path(*path.parts[-3:])
    copies = path.parents[3].glob(f"generations/*/{COPIES}/{below}")
    own = path.parent / COPIES / path.name
    return [path, *([own] if own.is_file() else copies)]


def flip_bit(path: Path) -> None:
    for each in twice(path):
        content = bytearray(each.read_bytes())
        content[len(content) // 2] ^= 1
        each.write_bytes(bytes(content))


def served_ids(layout: CollectionLayout) -> list[str]:
    return open_generation(layout).doc_ids.to_pylist()


@pytest.mark.parametrize("name", [*DERIVED, *SIDE])
def test_flipped_bit_in_a_generation_file_is_refused_and_the_old_generation_served(
    layout: CollectionLayout, name: str
) -> None:
    flip_bit(layout.generation_folder(2) / name)
    with pytest.raises(
        IntegrityError,
        match=f"{name} of generation 2 does not match its SHA-256; run `cairn repair stones --root ",
    ):
        open_generation(layout)
    fallback = open_latest_intact_generation(layout)
    assert fallback.number == 1
    assert fallback.warning is not None
    found = {(problem.generation, Path(problem.file).name) for problem in verify_collection(layout)}
    assert found == {(2, name)}


@pytest.mark.parametrize("name", DERIVED)
def test_repair_of_a_derived_file_makes_it_again_and_loses_no_row(
    layout: CollectionLayout, name: str, new_ids: list[str]
) -> None:
    flip_bit(layout.generation_folder(2) / name)
    report = repair_collection(layout)
    assert report.generation == 3
    assert served_ids(layout) == new_ids
    assert verify_collection(layout) == []


@pytest.mark.parametrize("name", SIDE)
def test_repair_of_a_side_file_copies_it_from_the_generation_it_was_carried_from(
    layout: CollectionLayout, name: str, new_ids: list[str]
) -> None:
    flip_bit(layout.generation_folder(2) / name)
    report = repair_collection(layout)
    assert (report.generation, report.lost) == (2, ())
    assert report.action == "2 fault(s) of generation 2 were mended where they lay"
    assert served_ids(layout) == new_ids
    assert verify_collection(layout) == []


@pytest.mark.parametrize("name", SIDE)
def test_repair_of_a_side_file_of_its_own_returns_to_the_last_whole_generation(
    tmp_path: Path, stones: ModuleType, name: str, old_ids: list[str]
) -> None:
    layout = CollectionLayout(tmp_path, "stones")
    stones.publish_documents(layout, old_ids)
    stones.publish_documents(layout, ["new"], context=b"drawn again")
    flip_bit(layout.generation_folder(2) / name)
    report = repair_collection(layout)
    assert (report.generation, report.lost) == (1, ("new",))
    assert served_ids(layout) == old_ids
    assert verify_collection(layout) == []


def test_flipped_bit_in_any_lance_file_is_found_by_verify(layout: CollectionLayout) -> None:
    paths = [
        path
        for path in sorted(layout.lance_folder.rglob("*"))
        if path.is_file() and path.suffix in (".lance", ".arrow", ".manifest")
    ]
    assert len(paths) >= 8
    for path in paths:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert any(
            problem.file == str(path.relative_to(layout.lance_folder))
            for problem in verify_collection(layout)
        ), path.name
        path.write_bytes(whole)
    assert verify_collection(layout) == []


def damage_manifest_truncated(layout: CollectionLayout) -> None:
    for path in twice(layout.generation_folder(2) / MANIFEST_NAME):
        path.write_bytes(path.read_bytes()[:100])


def damage_manifest_missing(layout: CollectionLayout) -> None:
    for path in twice(layout.generation_folder(2) / MANIFEST_NAME):
        path.unlink()


def damage_folder_missing(layout: CollectionLayout) -> None:
    shutil.rmtree(layout.generation_folder(2))


def damage_newest_lance_manifest(layout: CollectionLayout) -> None:
    newest = min(
        (layout.lance_folder / "documents.lance" / "_versions").glob("*.manifest")
    )  # named by 2^64 - version
    for path in twice(newest):
        path.unlink()


def damage_lance_data_of_the_newest_rows(layout: CollectionLayout) -> None:
    newest = max(
        (layout.lance_folder / "chunks.lance" / "data").iterdir(), key=lambda path: path.stat().st_mtime_ns
    )
    newest.write_bytes(newest.read_bytes()[:-50])


DAMAGES = (
    damage_manifest_truncated,
    damage_manifest_missing,
    damage_folder_missing,
    damage_newest_lance_manifest,
    damage_lance_data_of_the_newest_rows,
)


@pytest.mark.parametrize("damage", DAMAGES[:3])
def test_repair_derives_again_what_lost_its_manifest(
    layout: CollectionLayout, damage: Callable[[CollectionLayout], None], new_ids: list[str]
) -> None:
    damage(layout)
    assert verify_collection(layout) != []
    report = repair_collection(layout)
    assert (report.generation, report.lost) == (3, ())
    assert served_ids(layout) == new_ids
    assert verify_collection(layout) == []


@pytest.mark.parametrize("damage", DAMAGES[3:])
def test_repair_returns_to_the_last_whole_generation(
    layout: CollectionLayout,
    damage: Callable[[CollectionLayout], None],
    old_ids: list[str],
    new_ids: list[str],
) -> None:
    damage(layout)
    assert verify_collection(layout) != []
    report = repair_collection(layout)
    assert report.generation == 1
    assert "returned to generation 1" in report.action
    assert set(report.lost) == set(new_ids) - set(old_ids) | {"d0"}
    assert served_ids(layout) == old_ids
    assert verify_collection(layout) == []


@pytest.mark.parametrize("damage", DAMAGES[:4])
def test_damaged_generation_is_not_ready_and_says_what_to_do(
    layout: CollectionLayout, damage: Callable[[CollectionLayout], None]
) -> None:
    damage(layout)
    with pytest.raises(IntegrityError, match="run `cairn repair"):
        open_generation(layout)
    assert open_latest_intact_generation(layout).number == 1


@pytest.mark.parametrize("content", [None, b"", b"00000009\n", b"\x00\xff"])
def test_damaged_current_is_found_and_repaired_to_the_newest_whole_generation(
    layout: CollectionLayout, content: bytes | None, new_ids: list[str]
) -> None:
    layout.current_path.unlink()
    if content is not None:
        layout.current_path.write_bytes(content)
    with pytest.raises(IntegrityError, match="run `cairn repair"):
        open_generation(layout)
    assert any(problem.file == "CURRENT" for problem in verify_collection(layout))
    assert repair_collection(layout).generation == 2
    assert served_ids(layout) == new_ids
    assert verify_collection(layout) == []


def test_collection_can_be_written_after_a_repair(layout: CollectionLayout, old_ids: list[str]) -> None:
    damage_newest_lance_manifest(layout)
    repair_collection(layout)
    delete_documents(layout, [old_ids[0]])
    assert served_ids(layout) == old_ids[1:]
    assert verify_collection(layout) == []


def test_damaged_older_generation_is_dropped_by_repair(layout: CollectionLayout, new_ids: list[str]) -> None:
    flip_bit(layout.generation_folder(1) / "chunks.faiss")
    assert [problem.generation for problem in verify_collection(layout)] == [1]
    assert repair_collection(layout).generation == 2
    assert layout.generation_numbers() == [2]
    assert served_ids(layout) == new_ids


def test_repair_without_any_whole_generation_is_refused_and_changes_nothing(layout: CollectionLayout) -> None:
    for number in (1, 2):
        flip_bit(layout.generation_folder(number) / "context.arrow")
    before = sorted(path for path in layout.generations_folder.rglob("*"))
    with pytest.raises(IntegrityError, match="no generation that is whole"):
        repair_collection(layout)
    assert sorted(path for path in layout.generations_folder.rglob("*")) == before


@pytest.mark.parametrize("table", ["documents", "chunks"])
def test_repair_of_rows_that_no_generation_has_whole_keeps_the_others_and_names_the_lost(
    layout: CollectionLayout, table: str, old_ids: list[str], new_ids: list[str]
) -> None:
    data = (layout.lance_folder / f"{table}.lance" / "data").iterdir()
    oldest = min(data, key=lambda path: path.stat().st_mtime_ns)
    oldest.write_bytes(oldest.read_bytes()[:-50])
    report = repair_collection(layout)
    kept = [doc_id for doc_id in new_ids if doc_id not in old_ids or doc_id == "d0"]
    assert report.lost == tuple(sorted(set(new_ids) - set(kept)))
    assert served_ids(layout) == kept
    assert verify_collection(layout) == []


def test_damaged_side_file_is_never_carried_into_the_next_generation(
    tmp_path: Path, stones: ModuleType, old_ids: list[str]
) -> None:
    layout = CollectionLayout(tmp_path, "stones")
    stones.publish_documents(layout, old_ids)
    flip_bit(layout.generation_folder(1) / "context.arrow")
    with pytest.raises(IntegrityError, match=r"context.arrow of generation 1 does not match its SHA-256"):
        delete_documents(layout, [old_ids[0]])


def test_compaction_of_damaged_rows_is_refused(layout: CollectionLayout) -> None:
    damage_lance_data_of_the_newest_rows(layout)
    with pytest.raises(IntegrityError, match="run `cairn repair stones"):
        compact_collection(layout)
