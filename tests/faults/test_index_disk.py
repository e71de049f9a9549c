"""Fault matrix 8-10: a disk that is full or refuses to write; CURRENT unchanged, one sentence, nothing doubled afterwards."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.errors import CairnError, DiskFullError, StorageError
from pipeline.index import publish
from pipeline.index.layout import CollectionLayout
from pipeline.index.maintenance import verify_collection

STONES = Path(__file__).parents[1] / "index" / "stones.py"


@pytest.fixture(scope="module")
def stones() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stones_of_disk", STONES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def published(tmp_path: Path, stones: ModuleType) -> CollectionLayout:
    layout = CollectionLayout(tmp_path, "stones")
    stones.publish_documents(layout, stones.document_ids(20))
    return layout


def assert_unchanged_and_converges(layout: CollectionLayout, stones: ModuleType) -> None:
    assert layout.current_generation_number() == 1
    assert sorted(stones.served_ids(layout)) == sorted(stones.document_ids(20))
    stones.publish_change(layout, "n")
    assert sorted(stones.served_ids(layout)) == sorted([*stones.document_ids(20), *stones.document_ids(10, "n")])
    assert verify_collection(layout) == []


@pytest.mark.parametrize(
    "step", ["build_faiss_index", "write_document_positions", "write_chunk_positions", "record_lance_files", "write_lance_files"]
)
def test_full_disk_while_building_leaves_the_old_generation(
    published: CollectionLayout, stones: ModuleType, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(publish, step, fail)
        with pytest.raises(DiskFullError, match="no space left while publishing generation 2") as caught:
            stones.publish_change(published, "n")
    assert caught.value.exit_code == 75
    assert list(published.generations_folder.glob(".*.tmp")) == []
    assert_unchanged_and_converges(published, stones)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_failing_rename_leaves_the_old_generation(
    published: CollectionLayout, stones: ModuleType, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Renames of a publication: lance_files.json, MANIFEST.json, CURRENT."""
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
    assert_unchanged_and_converges(published, stones)


@pytest.mark.parametrize("limit_bytes", [0, 1_500, 2_600, 4_000])
def test_files_that_may_not_grow_give_one_sentence_and_leave_the_old_generation(
    published: CollectionLayout, stones: ModuleType, limit_bytes: int
) -> None:
    code = (
        "import resource, runpy, sys\n"
        f"stones = runpy.run_path({str(STONES)!r})\n"
        "from pipeline.index.layout import CollectionLayout\n"
        "from pipeline.errors import CairnError\n"
        f"layout = CollectionLayout({str(published.root)!r}, 'stones')\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes}, {limit_bytes}))\n"
        "try: stones['publish_change'](layout, 'n')\n"
        "except CairnError as error: sys.stdout.write(f'{error.exit_code} {error}')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("1 ")
    assert "File too large" in result.stdout or "inside LanceDB" in result.stdout  # its text indexer hides the system's error
    assert str(published.root) not in result.stdout
    assert_unchanged_and_converges(published, stones)


def test_folder_that_cannot_be_written_gives_one_sentence(published: CollectionLayout, stones: ModuleType) -> None:
    published.lock_path.unlink()
    published.lock_path.mkdir()  # refused to every user, root included, as a read-only folder is to most
    with pytest.raises(CairnError, match="opening the lock of collection 'stones' failed") as caught:
        stones.publish_change(published, "n")
    assert caught.value.exit_code == 1
    published.lock_path.rmdir()
    assert_unchanged_and_converges(published, stones)
