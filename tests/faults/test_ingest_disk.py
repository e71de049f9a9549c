"""Fault 8: the disk fills up somewhere in an ingest.

What is published stays, one error says so, and with room again a rerun converges.

A small tmpfs is the disk; without the right to mount one, these tests are skipped.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.errors import CairnError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.verify import verify_collection

from tests.faults.test_ingest_kills import corpus, ingest, same, visible

DISK_BYTES = 64 << 20
FREE_KIB = (8, 32, 64, 96, 128, 160, 192, 256)
"""From no room for the ledger to almost enough for everything.

The disk fills at a different step each time.
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("disk-world")
    old = corpus(folder / "old.parquet", dict.fromkeys(range(14), 0))
    new = corpus(folder / "new.parquet", {**dict.fromkeys(range(1, 60), 0), 3: 1, 7: 1})
    ingest(folder / "old", tiny_model_folder, old)
    shutil.copytree(folder / "old", folder / "both")
    ingest(folder / "both", tiny_model_folder, new)
    seen = {name: visible(folder / name) for name in ("old", "both")}
    return {"folder": folder, "model": tiny_model_folder, "new": new, **seen}


@pytest.mark.parametrize(
    "free_kib", [pytest.param(kib, marks=() if kib in (8, 128) else pytest.mark.slow) for kib in FREE_KIB]
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
    assert same(visible(root), world["old"])
    filler.unlink()
    ingest(root, world["model"], world["new"])
    assert same(visible(root), world["both"])
    assert verify_collection(CollectionLayout(root, "c")) == []
