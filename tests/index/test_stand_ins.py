"""Damaged files of a generation that searches do without, or read the second copy of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from cairn.pipeline.errors import DamageError
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import open_generation, open_latest_intact_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import repair_collection, verify_collection
from cairn.pipeline.index.names import COPIES

BITS, TOKENS = "deleted.bits", "tokens.arrow"


@pytest.fixture
def layout(stones: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CollectionLayout:
    """Generation 2 deletes two of twenty documents, 3 adds one; both share the first segment's files."""
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    found = CollectionLayout(tmp_path / "root", "stones")
    ids = stones.document_ids(20)
    stones.publish_documents(found, ids, with_tokens=True)
    stones.delete(found, [ids[3], ids[7]])
    stones.publish_documents(found, ["new"], with_tokens=True)
    for name in (BITS, TOKENS):
        assert (found.generation_folder(3) / name).stat().st_nlink > 1
    return found


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_both(layout: CollectionLayout, name: str, damage: Callable[[Path], None]) -> None:
    for number in (2, 3):
        damage(layout.generation_folder(number) / name)
        if damage is not Path.unlink:
            return  # one file with two names


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_deleted_documents_are_told_by_the_second_copy_of_damaged_bits(
    layout: CollectionLayout, damage: Callable[[Path], None]
) -> None:
    whole = open_generation(layout)
    damage_both(layout, BITS, damage)
    found = open_latest_intact_generation(layout)
    assert (found.number, found.copied) == (3, (BITS,))
    assert "its second copy is read" in str(found.warning)
    assert found.doc_ids.equals(whole.doc_ids)
    assert found.chunk_offsets.tolist() == whole.chunk_offsets.tolist()
    assert {problem.file for problem in verify_collection(layout)} == {BITS}
    repair_collection(layout)
    assert layout.generation_numbers() == [2, 3], "mended where they lay"
    assert (open_generation(layout).copied, verify_collection(layout)) == ((), [])


def test_bits_whose_second_copies_are_damaged_too_are_made_again_from_the_tables(
    layout: CollectionLayout,
) -> None:
    whole = open_generation(layout)
    damage_both(layout, BITS, flip)
    for number in (2, 3):
        flip(layout.generation_folder(number) / COPIES / BITS)
    with pytest.raises(DamageError, match=r"deleted\.bits"):
        open_latest_intact_generation(layout)
    assert repair_collection(layout).lost == ()
    assert open_generation(layout).doc_ids.equals(whole.doc_ids)
    assert verify_collection(layout) == []


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_searches_go_without_token_vectors_that_no_generation_has_whole(
    layout: CollectionLayout, damage: Callable[[Path], None]
) -> None:
    whole = open_generation(layout)
    assert whole.token_vectors is not None
    damage_both(layout, TOKENS, damage)
    with pytest.raises(DamageError, match=r"tokens\.arrow"):
        open_generation(layout)
    found = open_latest_intact_generation(layout)
    assert (found.number, found.token_vectors, found.lacking) == (3, None, (TOKENS,))
    assert "searches go without token vectors" in str(found.warning)
    assert found.doc_ids.equals(whole.doc_ids)
    repair_collection(layout)
    assert open_generation(layout).token_vectors is not None
    assert verify_collection(layout) == []


def test_older_generation_with_token_vectors_goes_before_the_newest_without(layout: CollectionLayout) -> None:
    (added,) = layout.generation_folder(3).glob(f"00000003-*{TOKENS}")
    flip(added)
    found = open_latest_intact_generation(layout)
    assert (found.number, found.token_vectors is None) == (2, False)
