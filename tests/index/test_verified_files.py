"""Large files are hashed once on a machine, and again as soon as anything about them is another."""

from __future__ import annotations

import os
import time
from hashlib import sha256
from pathlib import Path

import pytest
from cairn.pipeline.errors import DamageError
from cairn.pipeline.index import files
from cairn.pipeline.index.files import SMALLEST, has_sha256
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import Checks, CollectionLayout
from cairn.pipeline.index.verify import verify_collection

from tests.damages import flip

CONTENT = bytes(range(256)) * (SMALLEST // 256)
HASH = sha256(CONTENT).hexdigest()
OLD = time.time() - 60


class Hashing:
    """The files that were hashed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        hashing = files.sha256_of_file

        def listening(path: Path) -> str:
            self.paths.append(path.name)
            return hashing(path)

        monkeypatch.setattr(files, "sha256_of_file", listening)

    def count(self, name: str = "vectors") -> int:
        return self.paths.count(name)


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Hashing:
    return Hashing(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "verified"


def write(path: Path, content: bytes = CONTENT, written: float = OLD) -> Path:
    path.write_bytes(content)
    os.utime(path, (written, written))
    return path


def test_file_is_hashed_once_as_long_as_its_note_is_whole(
    tmp_path: Path, folder: Path, hashing: Hashing
) -> None:
    path = write(tmp_path / "vectors")
    assert has_sha256(path, HASH)
    assert has_sha256(path, HASH)
    os.link(path, tmp_path / "shared")
    assert has_sha256(tmp_path / "shared", HASH)
    assert hashing.paths == ["vectors"]
    assert not has_sha256(path, "0" * 64), "another hash is not taken from what is known"
    assert has_sha256(path, HASH)
    assert hashing.count() == 2
    for note in folder.iterdir():
        note.write_bytes(b"no note")
    for _ in range(2):  # a damaged note is written again
        assert has_sha256(path, HASH)
    assert hashing.count() == 3


@pytest.mark.parametrize("is_replaced", [False, True])
def test_file_that_was_written_to_or_replaced_is_hashed_again(
    tmp_path: Path, folder: Path, hashing: Hashing, is_replaced: bool
) -> None:
    path = write(tmp_path / "vectors")
    assert has_sha256(path, HASH)
    flipped = bytearray(CONTENT)
    flipped[SMALLEST // 2] ^= 1
    if is_replaced:  # by another file of the same time
        write(tmp_path / "other", bytes(flipped)).replace(path)
    else:
        write(path, bytes(flipped), OLD + 1)
    assert not has_sha256(path, HASH)
    assert not has_sha256(path, HASH)
    assert hashing.count() == 3


@pytest.mark.parametrize(("content", "age"), [(CONTENT, 0.0), (CONTENT[1:], 60.0)], ids=["young", "small"])
def test_young_and_small_files_are_hashed_each_time(
    tmp_path: Path, folder: Path, hashing: Hashing, content: bytes, age: float
) -> None:
    path = write(tmp_path / "vectors", content, time.time() - age)
    for _ in range(2):
        assert has_sha256(path, sha256(content).hexdigest())
    assert hashing.count() == 2


def test_without_a_place_for_notes_files_are_hashed(
    tmp_path: Path, hashing: Hashing, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "vectors")
    (tmp_path / "no folder").write_bytes(b"")
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "no folder"))
    assert has_sha256(path, HASH)
    assert not has_sha256(path, "0" * 64)
    assert hashing.count() == 2


def test_notes_are_bounded(
    tmp_path: Path, folder: Path, hashing: Hashing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "KEPT_FILES", 4)
    for number in range(9):
        assert has_sha256(write(tmp_path / f"vectors{number}"), HASH)
        assert len(list(folder.iterdir())) <= 4


def test_second_opening_of_a_collection_hashes_no_large_file_and_verify_hashes_all(
    published: CollectionLayout, hashing: Hashing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(files, "SMALLEST", 1)
    monkeypatch.setattr(files, "SETTLED_SECONDS", 0.0)
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "cache"))
    open_generation(published)
    first = len(hashing.paths)
    open_generation(published)
    assert len(hashing.paths) == first > 5
    assert verify_collection(published) == []
    assert len(hashing.paths) >= 2 * first


def flip_unseen(path: Path) -> None:
    """Change a bit and nothing else, as a disk does."""
    found = path.stat()
    flip(path, found.st_size // 2)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_opening_that_verifies_finds_what_is_known_wrongly_and_forgets_it(
    published: CollectionLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(files, "SMALLEST", 1)
    monkeypatch.setattr(files, "SETTLED_SECONDS", 0.0)
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "cache"))
    open_generation(published, checks=Checks(verify=True))
    flip_unseen(published.generation_folder(1) / "chunks.faiss")
    open_generation(published)
    for checks in (Checks(verify=True), Checks()):
        with pytest.raises(DamageError, match=r"chunks\.faiss of generation 1 does not match its SHA-256"):
            open_generation(published, checks=checks)


def test_opening_that_verifies_hashes_rows_of_documents(published: CollectionLayout) -> None:
    (rows,) = (published.lance_folder / "documents.lance" / "data").iterdir()
    flip_unseen(rows)
    open_generation(published)
    with pytest.raises(DamageError, match=rows.name):
        open_generation(published, checks=Checks(verify=True))
