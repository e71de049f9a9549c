"""``CURRENT`` and the hashes it records: a flipped bit of it or of a manifest is noticed."""

from __future__ import annotations

from itertools import islice
from types import ModuleType

import pytest
from cairn.pipeline.errors import DamageError
from cairn.pipeline.index.current import Current
from cairn.pipeline.index.generation import open_generation, open_latest_intact_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import delete_documents, repair_collection, verify_collection
from cairn.pipeline.index.names import COPIES
from cairn.pipeline.index.stored_files import read_manifest
from cairn.pipeline.manifest import MANIFEST_NAME
from cairn.pipeline.search.searcher import Searcher

from tests.damages import flipped_bits
from tests.nightly.served import StoneEncoder

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
def changed(published: CollectionLayout, stones: ModuleType) -> CollectionLayout:
    """A collection whose second generation is served."""
    stones.publish_change(published, "n")
    return published


def test_current_names_the_served_generation_and_the_one_before(changed: CollectionLayout) -> None:
    current = changed.current()
    assert current is not None
    assert list(current.manifests) == [2, 1]


@pytest.mark.parametrize("number", [1, 2])
def test_flipped_bit_of_a_manifest_is_noticed(changed: CollectionLayout, number: int) -> None:
    path = changed.generation_folder(number) / MANIFEST_NAME
    whole = path.read_bytes()
    read_manifest(changed, number)
    (changed.generation_folder(number) / COPIES / MANIFEST_NAME).unlink()
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


def test_publication_carries_the_recorded_hash_of_a_manifest_over(
    changed: CollectionLayout, stones: ModuleType
) -> None:
    before = changed.manifest_sha256(2)
    stones.publish_change(changed, "m")
    assert changed.manifest_sha256(2) == before


def test_older_current_put_back_is_noticed_and_costs_no_document(
    published: CollectionLayout, stones: ModuleType
) -> None:
    older = published.current_path.read_bytes()
    stones.publish_change(published, "n")
    running = Searcher(published, StoneEncoder())
    published.current_path.write_bytes(older)
    for searcher in (running, Searcher(published, StoneEncoder())):
        assert searcher.search("stone").generation == 2
        assert "must name generation 2, which was published, got 1; run `cairn repair" in searcher.warnings[0]
    assert [problem.file for problem in verify_collection(published)] == ["CURRENT"]
    with pytest.raises(DamageError, match="must name generation 2"):
        delete_documents(published, ["d4"])
    report = repair_collection(published)
    assert (report.generation, report.lost, verify_collection(published)) == (2, (), [])
    assert (running.search("stone").generation, running.warnings) == (2, ())


def test_swapped_folders_of_generations_are_damaged(changed: CollectionLayout) -> None:
    one, two = (changed.generation_folder(number) for number in (1, 2))
    one.rename(one.with_name("aside"))
    two.rename(one)
    one.with_name("aside").rename(two)
    for number in (1, 2):
        with pytest.raises(DamageError, match="SHA-256 in CURRENT"):
            read_manifest(changed, number)
