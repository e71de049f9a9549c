"""A store that refuses, answers late, loses replies or does not let us in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cairn.pipeline.errors import CollectionBusyError, ConfigError, StorageError, TryAgainError
from cairn.pipeline.index import replica as replica_module
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout, list_collections
from cairn.pipeline.index.object_folder import ObjectFolder
from cairn.pipeline.index.replica import LEASE_KEY, Lease
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.manifest import MANIFEST_NAME, record_file

from tests.index import stones
from tests.index.stones import served
from tests.served_stones import wait_until

if TYPE_CHECKING:
    from tests.object_stores import ObjectStore
ROOT = "s3://cairn/indexes"
Machine = Callable[[str], CollectionLayout]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have requests time out in half the time that a stalled answer takes, instead of half a minute."""
    monkeypatch.setattr("cairn.pipeline.index.object_folder.REQUEST_SECONDS", 3.0)
    monkeypatch.setattr("cairn.pipeline.index.object_folder.PIECE_SECONDS", 3.0)


REQUESTS = [("PUT", "/files/"), ("PUT", "/CURRENT"), ("GET", "/stones"), ("PUT", "/LEASE")]


@pytest.mark.parametrize(
    ("method", "path", "fault"),
    [
        *((*each, fault) for each in REQUESTS for fault in ("refuse", "lose-reply")),
        *((*each, "stall") for each in REQUESTS[:3]),
    ],
)
def test_store_that_refuses_or_loses_replies_or_answers_too_late_publishes_once(
    machine: Machine,
    object_store: ObjectStore,
    request: pytest.FixtureRequest,
    method: str,
    path: str,
    fault: str,
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(5))
    if fault == "stall":
        request.getfixturevalue("impatient")
    object_store.fault(method, path, fault, times=1 if fault == "stall" else 2, seconds=6.0)
    stones.publish_documents(machine("a"), stones.document_ids(5, "n"))
    object_store.request("PUT", "/-/faults", b"[]")
    reader = machine("b")
    assert served(reader) == sorted([*stones.document_ids(5), *stones.document_ids(5, "n")])
    assert reader.current_generation_number() == 2
    assert verify_collection(reader) == []


def test_older_generation_damaged_in_the_store_does_not_stop_a_publication(machine: Machine) -> None:
    writer = machine("a")
    for prefix in ("d", "n"):
        stones.publish_documents(writer, stones.document_ids(3, prefix))
    key = f"files/{record_file(writer.generation_folder(1) / MANIFEST_NAME).sha256}"
    ObjectFolder(f"{ROOT}/stones").write(key, b"x")
    stones.publish_documents(machine("b"), stones.document_ids(3, "o"))
    assert served(machine("c")) == sorted(each for prefix in "dno" for each in stones.document_ids(3, prefix))
    assert verify_collection(machine("c")) == []


def test_upload_takes_longer_than_a_small_request_may(
    object_store: ObjectStore, bucket: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.pipeline.index.object_folder.REQUEST_SECONDS", 1.0)
    monkeypatch.setattr("cairn.pipeline.index.object_folder.RETRIES", 0)
    slow = ObjectFolder(bucket.uri)
    object_store.fault("PUT", "/files/", "stall")
    slow.write("files/a", b"content")
    object_store.fault("GET", "/files/", "stall")
    with pytest.raises(TryAgainError, match="does not answer when files/a is read"):
        slow.read("files/a")


def test_store_that_refuses_for_long_keeps_the_old_generation_and_the_same_run_later_publishes(
    machine: Machine, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.pipeline.index.object_folder.RETRIES", 1)
    stones.publish_documents(machine("a"), stones.document_ids(5))
    object_store.fault("PUT", "/CURRENT", "refuse", times=100)
    with pytest.raises(TryAgainError, match="does not answer when CURRENT is written"):
        stones.publish_documents(machine("a"), stones.document_ids(5, "n"))
    object_store.request("PUT", "/-/faults", b"[]")
    assert served(machine("a")) == served(machine("b")) == sorted(stones.document_ids(5))
    stones.publish_documents(machine("a"), stones.document_ids(5, "n"))
    assert len(served(machine("b"))) == 10


def test_reader_goes_on_with_its_copy_while_the_store_does_not_answer(
    machine: Machine, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.pipeline.index.object_folder.RETRIES", 0)
    stones.publish_documents(machine("a"), stones.document_ids(5))
    open_generation(machine("b"))
    object_store.kill()
    generation = open_generation(machine("b"))
    assert (generation.num_documents, "does not answer" in str(generation.warning)) == (5, True)
    with pytest.raises(TryAgainError, match="does not answer"):
        open_generation(machine("c"))
    with pytest.raises(TryAgainError, match="does not answer"):
        stones.publish_documents(machine("a"), stones.document_ids(5, "n"))


def test_root_in_a_bucket_that_is_not_there_is_one_sentence(machine: Machine) -> None:
    with pytest.raises(ConfigError, match="the bucket of s3://nobody/x/stones must exist"):
        stones.publish_documents(CollectionLayout.at(Path("s3://nobody/x"), "stones"), stones.document_ids(5))


def test_store_that_refuses_our_keys_is_one_sentence(machine: Machine, object_store: ObjectStore) -> None:
    object_store.fault("GET", "/stones", "forbid", times=100)
    with pytest.raises(StorageError, match="check its keys"):
        machine("a").exists()


def test_outage_is_logged_once_and_when_it_is_over(
    machine: Machine, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("cairn.pipeline.index.object_folder.RETRIES", 0)
    monkeypatch.setattr(replica_module, "_out", {})
    monkeypatch.setattr(replica_module.log, "warning", lambda text, *_: told.append(text.partition(" ")[0]))
    stones.publish_documents(machine("a"), stones.document_ids(3))
    served(machine("b"))
    object_store.fault("GET", "/stones", "refuse", times=10_000)
    for layout in (machine("b"), machine("b")):
        for _ in range(3):
            assert len(served(layout)) == 3
    object_store.request("PUT", "/-/faults", b"[]")
    for _ in range(3):
        served(machine("b"))
    assert told == ["replica.not_refreshed", "replica.refreshed_again"]


def test_collections_of_a_store_are_listed_once_they_are_published(
    machine: Machine, bucket: ObjectFolder
) -> None:
    ObjectFolder(f"{ROOT}/unfinished").write("files/x", b"")
    stones.publish_documents(machine("a"), stones.document_ids(5))
    assert list_collections(Path(ROOT)) == list_collections(ROOT) == ["stones"]


@pytest.fixture
def folder(object_store: ObjectStore) -> ObjectFolder:
    return ObjectFolder("s3://cairn/c")


def holder(folder: ObjectFolder) -> dict[str, str]:
    found = folder.read(LEASE_KEY)
    assert found is not None
    return json.loads(found.content)


def test_lease_is_refused_to_others_while_it_is_held_and_free_afterwards(folder: ObjectFolder) -> None:
    with (
        Lease(folder, "c").held(),
        pytest.raises(CollectionBusyError, match=r"being written by another run \(process \d+ on .*\)"),
    ):
        Lease(folder, "c").held().__enter__()
    assert folder.read(LEASE_KEY) is None
    assert not Lease(folder, "c").is_held()
    with Lease(folder, "c").held():
        assert Lease(folder, "c").is_held()
        other = {"token": "another", "holder": "x", "until": "2999-01-01T00:00:00+00:00"}
        folder.write(LEASE_KEY, json.dumps(other).encode())
    assert folder.read(LEASE_KEY) is not None, "one that was taken over is not released"


def test_lease_is_renewed_beyond_its_time_also_after_a_lost_reply(
    folder: ObjectFolder, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "LEASE_SECONDS", 300.0)
    monkeypatch.setattr(replica_module, "RENEWALS", 3_000)
    with Lease(folder, "c").held():
        object_store.fault("PUT", "/LEASE", "lose-reply")
        for _ in range(3):
            before = holder(folder)
            wait_until(lambda before=before: holder(folder) != before)
            later = holder(folder)
            assert later["token"] == before["token"]
            assert later["until"] > before["until"]
        with pytest.raises(CollectionBusyError):
            Lease(folder, "c").held().__enter__()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"holder": "x"}', b'{"holder": "x", "until": "2020-01-01T00:00:00+00:00"}']
)
def test_lease_that_expired_or_says_nothing_is_taken_over(folder: ObjectFolder, content: bytes) -> None:
    folder.write(LEASE_KEY, content)
    with Lease(folder, "c").held():
        pass
