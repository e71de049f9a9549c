"""Fault matrix 8-10: a disk that is full or refuses to write.

CURRENT unchanged, one sentence, nothing doubled afterwards.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cairn.pipeline.errors import CairnError, DiskFullError, StorageError
from cairn.pipeline.index import publish, tiers
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.segments import writer
from cairn.pipeline.index.verify import verify_collection

from tests.faults.test_ingest_kills import ingest, old_and_both
from tests.index import stones
from tests.nightly.forks import forked
from tests.stored_collections import same, stored

DISK_BYTES = 64 << 20
FREE_KIB = (140, 180, 220, 260, 300, 340, 380)
"""The merged segment has no room with most of them, CURRENT alone with the last."""


def change_limited(root: Path, limit_bytes: int, is_merge: bool) -> None:
    """Publish where no file may grow beyond so many bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if is_merge:
        tiers.WHOLE_CHUNKS, tiers.FACTOR, tiers.tier_of = 0, 2, lambda rows: 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    try:
        stones.publish_change(CollectionLayout(root, "stones"), "n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture
def published(tmp_path: Path) -> CollectionLayout:
    layout = CollectionLayout(tmp_path, "stones")
    stones.publish_documents(layout, stones.document_ids(20))
    return layout


def assert_unchanged_and_converges(layout: CollectionLayout) -> None:
    assert layout.current_generation_number() == 1
    assert stones.served(layout) == sorted(stones.document_ids(20))
    stones.publish_change(layout, "n")
    assert stones.served(layout) == sorted([*stones.document_ids(20), *stones.document_ids(10, "n")])
    assert verify_collection(layout) == []


@pytest.mark.parametrize(
    ("module", "step"),
    [
        (writer, "write_index"),
        (writer, "write_document_positions"),
        (writer, "write_chunk_positions"),
        (publish, "record_lance_files"),
        (publish, "_copy_side_files"),
    ],
)
def test_full_disk_while_building_leaves_the_old_generation(
    published: CollectionLayout,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    step: str,
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(module, step, fail)
        with pytest.raises(DiskFullError, match="no space left while publishing generation 2") as caught:
            stones.publish_change(published, "n")
    assert caught.value.exit_code == 75
    assert list(published.generations_folder.glob(".*.tmp")) == []
    assert_unchanged_and_converges(published)


@pytest.mark.parametrize(
    "free_kib", [pytest.param(kib, marks=() if kib in (140, 300) else pytest.mark.slow) for kib in FREE_KIB]
)
def test_disk_that_fills_up_in_a_merge_leaves_the_old_generation_served(
    disk: Path, monkeypatch: pytest.MonkeyPatch, free_kib: int
) -> None:
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    layout = CollectionLayout(disk, "stones")
    old, new = stones.document_ids(200), stones.document_ids(200, "n")
    stones.publish_documents(layout, old, with_tokens=True)
    held = open_generation(layout)
    monkeypatch.setattr(tiers, "FACTOR", 2)
    monkeypatch.setattr(tiers, "tier_of", lambda _: 0)
    filler, status = disk / "filler", os.statvfs(disk)
    filler.write_bytes(b"\0" * (status.f_bavail * status.f_frsize - (free_kib << 10)))
    with pytest.raises(DiskFullError, match="no space left while publishing generation 2") as caught:
        stones.publish_documents(layout, new, with_tokens=True)
    assert str(disk) not in str(caught.value)
    assert layout.current_generation_number() == 1
    assert held.chunks.reconstruct(held.chunk_documents[:5]).any()
    assert stones.served_ids(layout) == old
    filler.unlink()
    # Where CURRENT alone had no room, the next writer serves the new generation first.
    stones.publish_documents(layout, new, replaced=new, with_tokens=True)
    assert stones.served_ids(layout) == [*old, *new]
    assert len(open_generation(layout).segments) == 1
    assert verify_collection(layout) == []


@pytest.mark.parametrize("call", [1, 2])
def test_failing_rename_leaves_the_old_generation(
    published: CollectionLayout, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Renames of a publication: MANIFEST.json, CURRENT."""
    replace, calls = os.replace, 0

    def fail(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(StorageError, match="failed: Input/output error"):
            stones.publish_change(published, "n")
    assert_unchanged_and_converges(published)


@pytest.mark.slow
@pytest.mark.parametrize("limit_bytes", [0, 1_500, 2_600, 4_000])
@pytest.mark.parametrize("is_merge", [False, True])
def test_files_that_may_not_grow_give_one_sentence_and_leave_the_old_generation(
    published: CollectionLayout, limit_bytes: int, is_merge: bool
) -> None:
    outcome = forked(change_limited, published.root, limit_bytes, is_merge)
    assert outcome.exit_code == 1
    assert outcome.refusal is not None
    assert "File too large" in outcome.refusal or "inside LanceDB" in outcome.refusal  # Lance hides the cause
    assert str(published.root) not in outcome.refusal
    assert_unchanged_and_converges(published)


INGEST_FREE_KIB = (8, 32, 64, 96, 128, 160, 192, 256)
"""From no room for the ledger to almost enough for everything.

The disk fills at a different step each time.
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("disk-world")
    new = old_and_both(folder, tiny_model_folder, num_new=60)
    seen = {name: stored(folder / name) for name in ("old", "both")}
    return {"folder": folder, "model": tiny_model_folder, "new": new, **seen}


@pytest.mark.parametrize(
    "free_kib",
    [pytest.param(kib, marks=() if kib in (8, 128) else pytest.mark.slow) for kib in INGEST_FREE_KIB],
)
def test_ingest_on_a_full_disk_keeps_the_published_and_converges_with_room(
    world: dict[str, Any], disk: Path, free_kib: int
) -> None:
    root = disk / "root"
    shutil.copytree(world["folder"] / "old", root)
    filler = disk / "filler"
    status = os.statvfs(disk)
    filler.write_bytes(b"\0" * (status.f_bavail * status.f_frsize - (free_kib << 10)))
    with pytest.raises(CairnError) as caught:
        ingest(root, world["model"], world["new"])
    assert caught.value.exit_code in (1, 75)
    assert str(disk) not in str(caught.value)
    assert CollectionLayout(root, "c").current_generation_number() == 1
    assert same(stored(root), world["old"])
    filler.unlink()
    ingest(root, world["model"], world["new"])
    assert same(stored(root), world["both"])
    assert verify_collection(CollectionLayout(root, "c")) == []
