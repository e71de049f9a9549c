"""Fault matrix 11-13: flipped bits and missing files of a generation and of the tables."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.index.generation import open_generation, open_latest_intact_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import delete_documents
from cairn.pipeline.index.recovery import repair_collection
from cairn.pipeline.index.verify import verify_collection

from tests.faults.test_damage_matrix import NEW

DERIVED = (
    "documents.faiss",
    "chunks.faiss",
    "documents.arrow",
    "chunks.arrow",
    "passages.arrow",
    "titles.arrow",
    "lengths.arrow",
)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def flip_both(layout: CollectionLayout, number: int, name: str) -> None:
    """Flip a bit of a small file and of its second copy."""
    for folder in (layout.generation_folder(number), layout.copies_folder(number)):
        flip_bit(folder / name)


def served_ids(layout: CollectionLayout) -> list[str]:
    return open_generation(layout).doc_ids.to_pylist()


@pytest.mark.parametrize("name", DERIVED)
def test_flipped_bit_in_a_generation_file_is_refused_and_repaired_without_a_loss(
    layout: CollectionLayout, name: str
) -> None:
    flip_bit(layout.generation_folder(2) / name)
    sentence = f"{name} of generation 2 does not match its SHA-256; run `cairn repair stones --root "
    with pytest.raises(IntegrityError, match=sentence):
        open_generation(layout)
    fallback = open_latest_intact_generation(layout)
    assert fallback.number == 1
    assert fallback.warning is not None
    assert [(problem.generation, problem.file) for problem in verify_collection(layout)] == [(2, name)]
    assert repair_collection(layout).lost == ()
    assert served_ids(layout) == NEW
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
        flip_bit(path)
        named = {problem.file for problem in verify_collection(layout)}
        assert str(path.relative_to(layout.lance_folder)) in named
        path.write_bytes(whole)
    assert verify_collection(layout) == []


@pytest.mark.parametrize("is_gone", [False, True])
def test_damaged_older_generation_is_dropped_by_repair(layout: CollectionLayout, is_gone: bool) -> None:
    if is_gone:
        shutil.rmtree(layout.generation_folder(1))
        shutil.rmtree(layout.copies_folder(1))
    else:
        flip_bit(layout.generation_folder(1) / "chunks.faiss")
    assert [problem.generation for problem in verify_collection(layout)] == [1]
    report = repair_collection(layout)
    assert report.generation == 2
    assert report.action.endswith("generation 1, which was damaged, is removed")
    assert verify_collection(layout) == []
    assert layout.generation_numbers() == [2]
    assert served_ids(layout) == NEW


def test_without_any_whole_context_repair_and_writers_refuse_and_change_nothing(
    layout: CollectionLayout,
) -> None:
    for number in (1, 2):
        flip_both(layout, number, "context.arrow")
    before = sorted(layout.generations_folder.rglob("*"))
    with pytest.raises(IntegrityError, match="no generation that is whole"):
        repair_collection(layout)
    with pytest.raises(IntegrityError, match=r"context\.arrow"):
        delete_documents(layout, ["d1"])
    assert sorted(layout.generations_folder.rglob("*")) == before
