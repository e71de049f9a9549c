"""A collection in an object store: pushed, pulled, followed, mended; two writers."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline import durable
from cairn.pipeline.durable import exclusive_lock
from cairn.pipeline.errors import (
    CollectionBusyError,
    CollectionNotFoundError,
    DamageError,
    IntegrityError,
)
from cairn.pipeline.index import layout as layout_module
from cairn.pipeline.index import replica as replica_module
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import (
    open_generation,
    open_latest_intact_generation,
    open_parts,
)
from cairn.pipeline.index.layout import HASHES, CollectionLayout, read_manifest
from cairn.pipeline.index.maintenance import delete_documents, drop_collection, repartition
from cairn.pipeline.index.names import Current
from cairn.pipeline.index.object_folder import ObjectFolder
from cairn.pipeline.index.recovery import repair_collection
from cairn.pipeline.index.replica import Replica, key_of
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.manifest import FileRecord
from obstore.store import MemoryStore

from tests.index import stones
from tests.index.stones import served
from tests.served_stones import let_happen_before

ROOT = "s3://cairn/indexes"
Machine = Callable[[str], CollectionLayout]


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the objects in memory; what goes over a wire is tried in test_replica_faults.py."""
    folders: dict[str, MemoryStore] = {}
    monkeypatch.setattr("obstore.store.from_url", lambda uri, **_: folders.setdefault(uri, MemoryStore()))


def named_in(bucket: ObjectFolder) -> dict[int, str]:
    """Return the generations that the store names."""
    found = bucket.read("CURRENT")
    assert found is not None
    current = Current.of(found.content)
    assert current is not None
    return dict(current.manifests)


def test_machines_take_turns_in_writing_and_lose_nothing(machine: Machine) -> None:
    expected: set[str] = set()
    for turn, name in enumerate("abab"):
        ids = stones.document_ids(5, f"{name}{turn}-")
        stones.publish_documents(machine(name), ids)
        expected |= set(ids)
    for name in "abc":
        layout = machine(name)
        assert served(layout) == sorted(expected)
        assert layout.current_generation_number() == 4
        assert verify_collection(layout) == []


@pytest.mark.parametrize(
    "meanwhile", [served, lambda layout: stones.publish_change(layout, "m")], ids=["first readers", "writer"]
)
def test_reader_that_copies_is_waited_for_by_a_writer_and_by_readers_without_a_copy(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[CollectionLayout], object]
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(5))
    layout = machine("b")
    if meanwhile is not served:
        open_generation(layout)
        stones.publish_change(machine("a"), "n")
        machine("b")
    copies, is_over, pull = threading.Event(), threading.Event(), Replica._pull

    def pull_slowly(replica: Replica, current: Current) -> None:
        if not copies.is_set():
            copies.set()
            assert not is_over.wait(0.5)
        pull(replica, current)

    monkeypatch.setattr(Replica, "_pull", pull_slowly)
    with ThreadPoolExecutor(1) as pool:
        refreshed = pool.submit(reader_of(layout, None).refresh)
        assert copies.wait(60)
        meanwhile(layout)
        is_over.set()
        refreshed.result()
    assert layout.current_generation_number() == (1 if meanwhile is served else 3)
    assert verify_collection(layout) == []


def test_reader_whose_copy_is_up_to_date_needs_no_lock(machine: Machine) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(5))
    open_generation(machine("b"))
    layout = machine("b")
    with exclusive_lock(layout.lock_path, "the lock of the copy", CollectionBusyError):
        assert open_generation(layout).warning is None
        stones.publish_change(machine("a"), "n")
        assert "is served as it is" in str(open_generation(machine("b")).warning)
    assert open_generation(machine("b")).number == 2


def test_reader_that_follows_a_collection_copies_none_that_is_being_removed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = machine("a")
    stones.publish_documents(layout, stones.document_ids(5))
    let_happen_before(monkeypatch, Replica, "remove", lambda _: reader_of(layout, None).refresh())
    drop_collection(layout)
    assert not layout.folder.exists()
    assert not layout.exists()


def test_reader_follows_what_is_published_and_keeps_the_generation_it_holds_readable(
    machine: Machine,
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(20))
    reader = machine("b")
    held = open_generation(reader)
    stones.publish_change(machine("a"), "n")
    assert open_generation(reader).number == 2
    assert held.fetch_documents([0], ["doc_id"]).column("doc_id").to_pylist() == [held.doc_ids[0].as_py()]
    for _ in range(3):
        stones.publish_change(machine("a"), "n")
    assert open_generation(reader).number == 5
    assert reader.generation_numbers() == [2, 5]


def reader_of(layout: CollectionLayout, parts: range | None) -> CollectionLayout:
    """Return a copy's layout as a process that wants some partitions sees it."""
    assert layout.replica is not None
    return replace(layout, replica=Replica(layout.replica.uri, layout.folder, parts))


def test_readers_of_some_partitions_copy_those_alone_and_share_a_copy(machine: Machine) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(40))
    repartition(machine("a"), 4)
    plain = machine("b")
    reader = partial(reader_of, plain)

    def copied() -> int:
        return len(list(plain.partitions_folder.glob("*/lance"))) if plain.partitions_folder.exists() else 0

    everything = served(machine("c"))
    machine("b")
    reader(range(0)).refresh()
    assert (read_manifest(plain, 2).documents, copied()) == (40, 0)
    own = [open_parts(reader(parts), 2, parts, HASHES) for parts in (range(1, 2), range(2, 4))]
    assert copied() == 3
    ids = [doc_id for part in own for doc_id in part.doc_ids.to_pylist()]
    assert set(ids) < set(everything)
    delete_documents(machine("a"), everything[:3])
    machine("b")
    assert open_parts(reader(range(1, 2)), 3, range(1, 2), HASHES).num_documents
    assert [doc_id for part in own for doc_id in part.doc_ids.to_pylist()] == ids
    assert served(reader(None)) == everything[3:]
    assert copied() == 4


def test_partition_that_waits_for_the_copy_of_another_is_busy_and_not_damaged(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(layout_module, "COPY_SECONDS", 0.3)
    stones.publish_documents(machine("a"), stones.document_ids(40))
    repartition(machine("a"), 2)
    delete_documents(machine("a"), stones.document_ids(1))
    plain = machine("b")
    reader, first, second = partial(reader_of, plain), range(1), range(1, 2)
    assert open_parts(reader(first), 3, first, HASHES).num_documents
    with exclusive_lock(plain.lock_path, "the lock of the copy", CollectionBusyError):
        assert open_parts(reader(first), 3, first, HASHES).num_documents
        for wanted, parts in ((3, second), (4, first)):
            if wanted == 4:
                delete_documents(machine("a"), stones.document_ids(2))
            began = time.monotonic()
            with pytest.raises(CollectionBusyError):
                open_parts(reader(parts), wanted, parts, HASHES)
            assert time.monotonic() - began >= 0.3
    assert open_parts(reader(second), 3, second, HASHES).num_documents


def test_publication_of_a_segment_moves_what_is_new_once_and_nothing_else(
    machine: Machine, bucket: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    stones.publish_documents(machine("a"), stones.document_ids(400), with_tokens=True)
    reader = machine("b")
    open_generation(reader)
    before = bucket.list("files")
    moved: dict[str, list[str]] = {"write": [], "download": []}
    for name, keys in moved.items():
        whole = getattr(ObjectFolder, name)

        def counted(folder: ObjectFolder, key: str, *more: Any, whole: Any = whole, keys: Any = keys) -> Any:
            if key.startswith("files/"):
                keys.append(key)
            return whole(folder, key, *more)

        monkeypatch.setattr(ObjectFolder, name, counted)
    stones.publish_documents(machine("a"), stones.document_ids(1, "new"))
    assert len(open_generation(reader).segments) == 2
    new = {key: size for key, (size, _) in bucket.list("files").items() if key not in before}
    assert sorted(moved["write"]) == sorted(new)
    assert sorted(moved["download"]) == sorted(new)
    assert sum(new.values()) < sum(size for size, _ in before.values()) / 4


def test_damaged_file_of_an_older_segment_is_downloaded_again_with_the_next_generation(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    stones.publish_documents(machine("a"), stones.document_ids(20))
    reader = machine("b")
    open_generation(reader)
    path = reader.generation_folder(1) / "chunks.faiss"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    stones.publish_documents(machine("a"), stones.document_ids(1, "new"))
    assert len(open_generation(reader).segments) == 2
    assert (reader.generation_folder(2) / "chunks.faiss").read_bytes() == content


def names_below(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


def test_copy_that_was_pulled_has_the_small_files_twice_and_is_mended_by_them(machine: Machine) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(20))
    stones.publish_change(machine("a"), "n")
    reader = machine("b")
    expected = served(reader)
    assert names_below(reader.copies_folder(2)) == names_below(machine("a").copies_folder(2))
    reader = machine("b")
    assert verify_collection(reader) == []
    folder = reader.generation_folder(2)
    for path in (*folder.glob("*.json"), *reader.lance_folder.glob("*.lance/_deletions/*")):
        path.write_bytes(b"")
    reader = machine("b")
    assert repair_collection(reader).lost == ()
    assert served(reader) == expected


def test_writer_that_was_overtaken_publishes_nothing_and_its_next_run_goes_on_from_the_others(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(5))
    push = Replica.push

    def overtaken(self: Replica, number: int) -> None:
        monkeypatch.setattr(Replica, "push", push)
        assert self._store.swap("LEASE", b"{}", self._store.read("LEASE").e_tag)  # type: ignore[union-attr]  # as if it had expired
        stones.publish_documents(machine("b"), stones.document_ids(5, "faster"))
        push(self, number)

    monkeypatch.setattr(Replica, "push", overtaken)
    with pytest.raises(CollectionBusyError, match="published by another run meanwhile"):
        stones.publish_documents(machine("a"), stones.document_ids(5, "slower"))
    expected = {*stones.document_ids(5), *stones.document_ids(5, "faster")}
    assert served(machine("c")) == sorted(expected)
    stones.publish_documents(machine("a"), stones.document_ids(5, "slower"))
    assert served(machine("b")) == sorted(expected | set(stones.document_ids(5, "slower")))
    assert verify_collection(machine("a")) == []


def test_file_that_was_changed_in_the_store_is_refused_and_the_copy_from_before_served(
    machine: Machine, bucket: ObjectFolder
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(20))
    reader = machine("b")
    open_generation(reader)
    record = stones.publish_change(machine("a"), "n").files["chunks.faiss"]
    bucket.write(f"files/{record.sha256}", b"x" * record.size_bytes)
    generation = open_latest_intact_generation(reader)
    assert (generation.number, "chunks.faiss" in str(generation.warning)) == (1, True)
    with pytest.raises(DamageError, match="does not match its SHA-256"):
        open_generation(machine("c"))


def test_verify_finds_damage_in_the_store_and_repair_brings_it_back_from_a_copy(
    machine: Machine, bucket: ObjectFolder
) -> None:
    layout = machine("a")
    files = stones.publish_documents(layout, stones.document_ids(5)).files
    bucket.delete([f"files/{files['chunks.arrow'].sha256}"])
    bucket.write(f"files/{files['documents.arrow'].sha256}", b"x" * files["documents.arrow"].size_bytes)
    bucket.write(f"files/{files['context.arrow'].sha256}", b"short")
    folder = "generations/00000001"
    assert [
        (problem.part, problem.file, problem.sentence.split(" in s3")[0])
        for problem in verify_collection(layout)
    ] == [
        ("store", f"{folder}/chunks.arrow", f"{folder}/chunks.arrow is missing"),
        (
            "store",
            f"{folder}/context.arrow",
            f"{folder}/context.arrow must have {files['context.arrow'].size_bytes} bytes, got 5",
        ),
        ("store", f"{folder}/documents.arrow", f"{folder}/documents.arrow does not match its SHA-256"),
    ]
    assert "3 file(s) were written to the store again" in repair_collection(layout).action
    assert verify_collection(machine("a")) == verify_collection(machine("b")) == []


def test_files_of_no_generation_are_removed_when_they_are_old_enough(
    machine: Machine, bucket: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(20))
    for _ in range(3):
        stones.publish_change(machine("a"), "n")
    many = len(bucket.list("files"))
    monkeypatch.setattr(replica_module, "KEPT_SECONDS", -1.0)
    stones.publish_change(machine("a"), "n")
    few = set(bucket.list("files"))
    assert len(few) < many
    assert list(named_in(bucket)) == [5, 4]
    assert verify_collection(machine("b")) == []
    replica: Any = machine("a").replica
    assert few == {key for generation in named_in(bucket).items() for key in replica._keys(*generation)}


def test_reader_whose_files_went_while_it_pulled_begins_again_with_the_next_generation(
    machine: Machine, bucket: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(20))
    first = {*bucket.list("files")}
    monkeypatch.setattr(replica_module, "KEPT_SECONDS", -1.0)
    download, is_published = ObjectFolder.download, False

    def late(folder: ObjectFolder, key: str, *more: Any) -> Any:
        nonlocal is_published
        if not is_published:
            is_published = True
            for _ in range(2):
                stones.publish_change(machine("a"), "n")
            assert not first <= {*bucket.list("files")}
        return download(folder, key, *more)

    monkeypatch.setattr(replica_module, "TRANSFERS", 1)
    monkeypatch.setattr(ObjectFolder, "download", late)
    reader = machine("b")
    assert open_generation(reader).number == 3


def test_interrupted_upload_goes_on_with_what_it_had_written(
    machine: Machine, bucket: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = ObjectFolder.write
    counted = lambda self, key, content: (written.append(key), write(self, key, content))  # noqa: E731
    monkeypatch.setattr(ObjectFolder, "write", counted)
    layout = machine("a")
    stones.publish_documents(layout, stones.document_ids(5))
    assert len(written) > 10
    bucket.delete(["CURRENT"])
    (layout.folder / "CURRENT").unlink()
    written.clear()
    with layout.writer_lock():
        assert layout.replica is not None
        layout.replica.push(1)
    assert [key for key in written if key.startswith("files/")] == []


def test_copy_of_a_collection_that_vanished_or_is_damaged_in_its_store_is_not_published_over_it(
    machine: Machine, bucket: ObjectFolder
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(5))
    bucket.delete(["CURRENT"])
    with pytest.raises(IntegrityError, match="got no CURRENT; restore it there, or remove the copy"):
        stones.publish_documents(machine("a"), stones.document_ids(5, "n"))
    for content in (b"", b"[]"):
        bucket.write("CURRENT", content)
        with pytest.raises(IntegrityError, match=r"^CURRENT of s3://cairn/indexes/stones must .*$"):
            open_generation(machine("b"))


def test_manifest_that_points_out_of_its_collection_is_refused(
    machine: Machine, bucket: ObjectFolder
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(5))
    manifest = json.loads((machine("a").generation_folder(1) / "MANIFEST.json").read_bytes())
    manifest["files"]["../../outside"] = manifest["files"]["context.arrow"]
    content = json.dumps(manifest).encode()
    record = FileRecord(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    bucket.write(key_of(record), content)
    bucket.write("CURRENT", Current({1: record.sha256}).to_bytes())
    with pytest.raises(DamageError, match="must lie in its collection"):
        open_generation(machine("b"))


def test_first_ingest_of_another_machine_is_building_while_it_holds_the_lease(machine: Machine) -> None:
    writer, reader = machine("a"), machine("b")
    reader.refresh()
    assert not reader.is_begun()
    assert not reader.folder.exists(), "looking leaves no trace"
    assert reader.first_ingest() is None
    with writer.writer_lock():
        assert (writer.first_ingest(), reader.first_ingest()) == ("building", "building")
        with pytest.raises(CollectionNotFoundError, match="has not finished yet"):
            reader.require_exists()
    assert (writer.first_ingest(), reader.first_ingest()) == ("unfinished", None)
