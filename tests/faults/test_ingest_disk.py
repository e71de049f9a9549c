"""Fault 8: the disk fills up somewhere in an ingest.

What is published stays, one error says so, and with room again a rerun converges.

A small tmpfs is the disk; without the right to mount one, the same claims are made of a process that may
write no file beyond a size.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cairn.pipeline.errors import CairnError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import verify_collection
from cairn.pipeline.line.build_index import build_index

KILLS = Path(__file__).with_name("test_ingest_kills.py")
DISK_BYTES = 64 << 20
FREE_KIB = (8, 32, 64, 96, 128, 160, 192, 256)
"""From no room for the ledger to almost enough for everything.

The disk fills at a different step each time.
"""

# Ingest where no file may grow beyond so many bytes, and write down what went wrong.
LIMITED_INGEST = """
import resource
import cairn.pipeline.encode.documents, cairn.pipeline.model.backbone_loader, cairn.pipeline.line.publish
from test_ingest_kills import settings
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.errors import CairnError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def work(root, corpus, model, limit_bytes, said):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit_bytes), int(limit_bytes)))
    try:
        build_index([corpus], root, "c", settings(Path(model)))
    except CairnError as error:
        Path(said).write_text(str(error))
        os._exit(error.exit_code)
"""


@pytest.fixture(scope="module")
def kills() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kills_of_disk", KILLS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def world(
    kills: ModuleType, tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("disk-world")
    old = kills.corpus(folder / "old.parquet", dict.fromkeys(range(14), 0))
    new = kills.corpus(folder / "new.parquet", {**dict.fromkeys(range(1, 60), 0), 3: 1, 7: 1})
    config = kills.settings(tiny_model_folder)
    build_index([old], folder / "old", "c", config)
    shutil.copytree(folder / "old", folder / "both")
    build_index([new], folder / "both", "c", config)
    return {
        "folder": folder,
        "new": new,
        "config": config,
        "old": kills.visible(folder / "old"),
        "both": kills.visible(folder / "both"),
    }


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(mounted)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(
            "needs the right to mount a tmpfs; test_ingest_limited_to_small_files makes the same claims "
            "without"
        )
    yield mounted
    subprocess.run(
        ["umount", "--lazy", str(mounted)], check=True
    )  # readers of this process still map its files


@pytest.mark.parametrize("free_kib", FREE_KIB)
def test_ingest_on_a_full_disk_keeps_the_published_and_converges_with_room(
    kills: ModuleType, world: dict[str, Any], disk: Path, free_kib: int
) -> None:
    root = disk / "root"
    shutil.copytree(world["folder"] / "old", root)
    filler = disk / "filler"
    status = os.statvfs(disk)
    filler.write_bytes(b"\0" * (status.f_bavail * status.f_frsize - (free_kib << 10)))
    with pytest.raises(CairnError) as caught:
        build_index([world["new"]], root, "c", world["config"])
    assert caught.value.exit_code in (1, 75)
    assert str(disk) not in str(caught.value)
    assert CollectionLayout(root, "c").current_generation_number() == 1
    assert kills.visible(root) == world["old"]
    filler.unlink()
    build_index([world["new"]], root, "c", world["config"])
    assert kills.visible(root) == world["both"]
    assert verify_collection(CollectionLayout(root, "c")) == []


@pytest.fixture(scope="module")
def limited_ingest(start_forks: Callable[[str], Callable[..., int]]) -> Callable[..., int]:
    return start_forks(LIMITED_INGEST)


@pytest.mark.slow
@pytest.mark.parametrize("limit_bytes", [2_000, 6_000, 12_000])
def test_ingest_limited_to_small_files_keeps_the_published_and_converges_without_the_limit(
    kills: ModuleType,
    world: dict[str, Any],
    limited_ingest: Callable[..., int],
    tmp_path: Path,
    limit_bytes: int,
) -> None:
    root, said = tmp_path / "root", tmp_path / "said"
    shutil.copytree(world["folder"] / "old", root)
    model = world["config"].encoder.model
    assert limited_ingest("no-point", str(root), world["new"], model, str(limit_bytes), str(said)) in (1, 75)
    assert len(said.read_text().splitlines()) == 1
    assert kills.visible(root) == world["old"]
    build_index([world["new"]], root, "c", world["config"])
    assert kills.visible(root) == world["both"]
