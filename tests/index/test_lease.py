from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
from cairn.pipeline.errors import CollectionBusyError
from cairn.pipeline.index import replica as lease_module
from cairn.pipeline.index.object_folder import ObjectFolder
from cairn.pipeline.index.replica import LEASE_KEY, Lease

if TYPE_CHECKING:
    from tests.object_stores import ObjectStore


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
    with Lease(folder, "c").held():
        pass


def test_lease_is_renewed_beyond_its_time(folder: ObjectFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "LEASE_SECONDS", 300.0)
    monkeypatch.setattr(lease_module, "RENEWALS", 3_000)
    with Lease(folder, "c").held():
        first = holder(folder)
        while (later := holder(folder)) == first:
            time.sleep(0.01)
        assert later["token"] == first["token"]
        assert later["until"] > first["until"]
        with pytest.raises(CollectionBusyError):
            Lease(folder, "c").held().__enter__()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"holder": "x"}', b'{"holder": "x", "until": "2020-01-01T00:00:00+00:00"}']
)
def test_lease_that_expired_or_says_nothing_is_taken_over(folder: ObjectFolder, content: bytes) -> None:
    folder.write(LEASE_KEY, content)
    with Lease(folder, "c").held():
        pass


def test_lease_that_was_taken_over_is_not_released(folder: ObjectFolder) -> None:
    with Lease(folder, "c").held():
        folder.write(
            LEASE_KEY,
            json.dumps({"token": "another", "holder": "x", "until": "2999-01-01T00:00:00+00:00"}).encode(),
        )
    assert folder.read(LEASE_KEY) is not None


@pytest.mark.parametrize("fault", ["refuse", "lose-reply"])
def test_lease_is_taken_though_the_store_refuses_or_loses_a_reply(
    folder: ObjectFolder, object_store: ObjectStore, fault: str
) -> None:
    object_store.fault("PUT", LEASE_KEY, fault)
    with Lease(folder, "c").held():
        assert folder.read(LEASE_KEY) is not None


def test_lease_is_held_until_it_is_given_back(folder: ObjectFolder) -> None:
    assert not Lease(folder, "c").is_held()
    with Lease(folder, "c").held():
        assert Lease(folder, "c").is_held()
    assert not Lease(folder, "c").is_held()
