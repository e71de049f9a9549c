from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.errors import (
    CollectionBusyError,
    CollectionNotFoundError,
    ConfigError,
    DamageError,
    StorageError,
)
from cairn.pipeline.index.generation import open_generation, open_latest_intact_generation
from cairn.pipeline.index.layout import CollectionLayout, list_collections, list_states, read_manifest
from cairn.pipeline.index.maintenance import delete_documents
from cairn.pipeline.index.names import Current
from cairn.pipeline.index.recovery import repair_collection
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.manifest import MANIFEST_NAME

from tests.damages import flip, flipped_bits, put
from tests.index import stones


@pytest.mark.parametrize("name", ["", "Upper", "../x", "a/b", "-rf", ".hidden", "a" * 64, "nul\0", "x\n"])
def test_layout_of_a_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="must match"):
        CollectionLayout(tmp_path, name)


@pytest.mark.parametrize("below", ["", "folder", "folder/of/it"])
def test_root_in_or_below_a_file_is_refused_with_its_name(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"the root must be a folder, got the file 'file'; give a folder"):
        CollectionLayout(tmp_path / "file" / below, "stones")


@pytest.mark.parametrize(
    "root", ["gs://bucket", "file:///tmp", "http://host/x", "s3://", "s3://key:secret@bucket/x"]
)
def test_layout_of_a_root_of_another_scheme_or_without_a_plain_bucket_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match="must be a folder or s3://BUCKET/PREFIX"):
        CollectionLayout.at(root, "stones")


def test_layout_of_a_symlinked_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "stones").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic link"):
        CollectionLayout(tmp_path, "stones")


def test_list_collections_leaves_out_what_was_never_published(published: CollectionLayout) -> None:
    for folder in ("lance", "pending"):
        (published.root / "half-done" / folder).mkdir(parents=True)
    assert list_collections(published.root) == ["stones"]


def test_command_names_a_root_that_is_not_the_default_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CollectionLayout(tmp_path / "cairn-data", "stones").command("verify") == "cairn verify stones"
    elsewhere = CollectionLayout(tmp_path / "my data", "stones").command("repair")
    assert shlex.split(elsewhere) == [
        "cairn",
        "repair",
        "stones",
        "--root",
        str(tmp_path.resolve() / "my data"),
    ]


def test_naming_damage_completes_the_advice_of_who_knew_only_a_file(layout: CollectionLayout) -> None:
    with pytest.raises(DamageError) as caught, layout.naming_damage():
        raise DamageError("chunks.arrow cannot be read")
    assert caught.value.fault == "chunks.arrow cannot be read"
    assert str(caught.value) == f"chunks.arrow cannot be read; run `{layout.command('repair')}`"


def test_writer_lock_held_by_another_process_is_busy_and_names_it(layout: CollectionLayout) -> None:
    code = (
        "import sys; from pathlib import Path; from cairn.pipeline.index.layout import CollectionLayout\n"
        f"with CollectionLayout(Path({str(layout.root)!r}), 'stones').writer_lock(): print('held', "
        "flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(CollectionBusyError, match=f"process {holder.pid}") as caught,
            layout.writer_lock(),
        ):
            pass
        holder.stdin.close()
    assert caught.value.exit_code == 75
    with layout.writer_lock():  # the kernel gave it back
        pass


def test_root_in_an_object_store_has_its_copies_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path))
    for root in ("s3://bucket/some/where", "s3://bucket/some/where/", Path("s3://bucket/some/where")):
        layout = CollectionLayout.at(root, "handbook")
        assert layout.folder == tmp_path / "s3" / "bucket" / "some" / "where" / "handbook"
        assert layout.command("verify") == "cairn verify handbook --root s3://bucket/some/where"
        assert not layout.folder.exists()


def test_root_in_an_object_store_without_its_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"must have the package obstore.*'\.\[store\]"):
        CollectionLayout.at("s3://bucket", "handbook")


@pytest.mark.parametrize("kind", ["folder", "dangling link", "link to itself", "FIFO"])
def test_lock_of_another_kind_is_damaged_and_hides_no_other_collection(
    published: CollectionLayout, kind: str
) -> None:
    layout = CollectionLayout(published.root, "pebbles")
    layout.folder.mkdir()
    put(layout.lock_path, kind)
    assert list_states(published.root) == {"pebbles": "damaged", "stones": None}
    with pytest.raises(CollectionNotFoundError, match=r"remove `\.lock`"):
        layout.require_exists()
    with (
        pytest.raises(StorageError, match="opening the lock of collection 'pebbles' failed"),
        layout.writer_lock(),
    ):
        pass


def test_unreadable_folder_is_listed_as_damaged_and_hides_no_other(
    published: CollectionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    (published.root / "backup").mkdir()
    stat = os.stat

    def refusing(path: Any, *args: Any, **keywords: Any) -> os.stat_result:  # root reads all
        if isinstance(path, str | os.PathLike) and "/backup/" in os.fspath(path):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return stat(path, *args, **keywords)

    monkeypatch.setattr(os, "stat", refusing)
    assert list_states(published.root) == {"backup": "damaged", "stones": None}
    assert list_collections(published.root) == ["stones"]
    with pytest.raises(StorageError, match="reading collection 'backup' failed: Permission denied"):
        CollectionLayout(published.root, "backup").require_exists()
    with pytest.raises(CollectionNotFoundError, match="known collections: stones"):
        CollectionLayout(published.root, "pebbles").require_exists()


EVERY_NTH_BIT = 61
"""Bits of a manifest left out between two that are flipped: SHA-256 knows none from the others."""
HASHES = {7: "a" * 64, 6: "0" * 64}


def test_current_reads_back_what_it_wrote_and_nothing_else() -> None:
    assert Current.of(Current(HASHES).to_bytes()) == Current(HASHES)
    assert Current(HASHES).served == 7
    short, capitals = b"00000007 " + b"a" * 63 + b"\n", b"00000007 " + b"A" * 64 + b"\n"
    out_of_order = Current(dict(reversed(HASHES.items()))).to_bytes()
    for content in (b"", b"\n", b"00000007\n", b"7\n", short, capitals, out_of_order):
        assert Current.of(content) is None


@pytest.fixture
def changed(published: CollectionLayout) -> CollectionLayout:
    """A collection whose second generation is served."""
    stones.publish_change(published, "n")
    return published


@pytest.mark.parametrize("number", [1, 2])
def test_flipped_bit_of_a_manifest_or_of_current_is_noticed(changed: CollectionLayout, number: int) -> None:
    assert verify_collection(changed) == []
    assert not any(map(Current.of, flipped_bits(changed.current_path.read_bytes())))
    path = changed.generation_folder(number) / MANIFEST_NAME
    whole = path.read_bytes()
    read_manifest(changed, number)
    (changed.copies_folder(number) / MANIFEST_NAME).unlink()
    for flipped in islice(flipped_bits(whole), 0, None, EVERY_NTH_BIT):
        path.write_bytes(flipped)
        with pytest.raises(DamageError, match="SHA-256 in CURRENT"):
            read_manifest(changed, number)


@pytest.mark.parametrize(
    ("published_changes", "place"), [(1, 7), (0, 20)], ids=["served number", "hash of the only generation"]
)
def test_flipped_character_of_current_costs_nothing_and_is_repaired(
    published: CollectionLayout, published_changes: int, place: int
) -> None:
    for _ in range(published_changes):
        stones.publish_change(published, "n")
    flip(published.current_path, place)  # another digit
    assert open_latest_intact_generation(published).number == 1 + published_changes
    assert [problem.file for problem in verify_collection(published)] == ["CURRENT"]
    assert repair_collection(published).lost == ()
    assert verify_collection(published) == []
    assert open_generation(published).number == 1 + published_changes


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
