"""``CURRENT`` and the hashes it records: a flipped bit of it or of a manifest is noticed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
from cairn.pipeline.errors import DamageError
from cairn.pipeline.index.generation import open_generation, open_latest_intact_generation
from cairn.pipeline.index.layout import CollectionLayout, read_manifest
from cairn.pipeline.index.maintenance import delete_documents
from cairn.pipeline.index.names import Current
from cairn.pipeline.index.recovery import repair_collection
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.manifest import MANIFEST_NAME

from tests.damages import flipped_bits
from tests.index import stones

EVERY_NTH_BIT = 61
"""Bits of a manifest left out between two that are flipped: SHA-256 knows none from the others."""
HASHES = {7: "a" * 64, 6: "0" * 64}


def test_current_reads_back_what_it_wrote() -> None:
    assert Current.of(Current(HASHES).to_bytes()) == Current(HASHES)
    assert Current(HASHES).served == 7


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"00000007\n", b"7\n", b"00000007 " + b"a" * 63 + b"\n", b"00000007 " + b"A" * 64 + b"\n"],
)
def test_current_of_other_content_is_damaged(content: bytes) -> None:
    assert Current.of(content) is None


def test_current_with_generations_out_of_order_is_damaged() -> None:
    older_first = dict(reversed(HASHES.items()))
    assert Current.of(Current(older_first).to_bytes()) is None


@pytest.fixture
def changed(published: CollectionLayout) -> CollectionLayout:
    """A collection whose second generation is served."""
    stones.publish_change(published, "n")
    return published


@pytest.mark.parametrize("number", [1, 2])
def test_flipped_bit_of_a_manifest_is_noticed(changed: CollectionLayout, number: int) -> None:
    path = changed.generation_folder(number) / MANIFEST_NAME
    whole = path.read_bytes()
    read_manifest(changed, number)
    (changed.copies_folder(number) / MANIFEST_NAME).unlink()
    for flipped in islice(flipped_bits(whole), 0, None, EVERY_NTH_BIT):
        path.write_bytes(flipped)
        with pytest.raises(DamageError, match="SHA-256 in CURRENT"):
            read_manifest(changed, number)


def test_every_flipped_bit_of_current_is_noticed(changed: CollectionLayout) -> None:
    whole = changed.current_path.read_bytes()
    assert verify_collection(changed) == []
    assert all(Current.of(flipped) is None for flipped in flipped_bits(whole))


def test_flip_of_the_served_number_serves_the_newest_whole_generation_and_is_repaired(
    changed: CollectionLayout,
) -> None:
    changed.current_path.write_bytes(changed.current_path.read_bytes().replace(b"00000002 ", b"00000003 "))
    assert open_latest_intact_generation(changed).number == 2
    assert [problem.file for problem in verify_collection(changed)] == ["CURRENT"]
    repair_collection(changed)
    assert verify_collection(changed) == []
    assert open_generation(changed).number == 2


def test_flipped_hash_in_current_costs_a_collection_of_one_generation_nothing(
    published: CollectionLayout,
) -> None:
    content = bytearray(published.current_path.read_bytes())
    content[20] ^= 1  # another hexadecimal digit
    published.current_path.write_bytes(content)
    assert open_latest_intact_generation(published).number == 1
    assert [problem.file for problem in verify_collection(published)] == ["CURRENT"]
    assert repair_collection(published).lost == ()
    assert verify_collection(published) == []


def test_publication_carries_the_recorded_hash_of_a_manifest_over(changed: CollectionLayout) -> None:
    before = changed.manifest_sha256(2)
    stones.publish_change(changed, "m")
    assert changed.manifest_sha256(2) == before


@pytest.mark.parametrize("bring_back", [repair_collection, lambda layout: delete_documents(layout, ["d4"])])
def test_older_current_put_back_costs_no_document_once_something_is_written(
    published: CollectionLayout, bring_back: Callable[[CollectionLayout], object]
) -> None:
    older = published.current_path.read_bytes()
    stones.publish_change(published, "n")
    whole = set(stones.served_ids(published))
    published.current_path.write_bytes(older)
    assert open_generation(published).number == 1
    bring_back(published)
    assert set(stones.served_ids(published)) | {"d4"} == whole
    assert verify_collection(published) == []


def test_swapped_folders_of_generations_are_damaged(changed: CollectionLayout) -> None:
    one, two = (changed.generation_folder(number) for number in (1, 2))
    one.rename(one.with_name("aside"))
    two.rename(one)
    one.with_name("aside").rename(two)
    for number in (1, 2):
        with pytest.raises(DamageError, match=f"of generation {number} "):
            open_generation(changed, number)
    assert repair_collection(changed).lost == ()
    assert verify_collection(changed) == []
