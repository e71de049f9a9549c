from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cairn.pipeline import durable
from cairn.pipeline.errors import DiskFullError, StorageError, TryAgainError
from safetensors import SafetensorError

from tests.damages import KINDS, put


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "old.txt").write_text("old")
    return tmp_path / "taken"


@pytest.fixture
def seen(folder: Path) -> Iterator[list[str]]:
    """Record what stands in the folder's place at every commit point."""
    found: list[str] = []

    def observe(name: str) -> None:
        if name == "folder.replaced":
            found.extend(path.name for path in folder.iterdir())

    durable.observe_commit_points(observe)
    yield found
    durable._observers.remove(observe)


def put_new(folder: Path) -> None:
    with durable.replacing_folder(folder) as temporary:
        (temporary / "inside").mkdir()
        (temporary / "new.txt").write_text("new")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names under which files and folders are flushed to the disk."""
    found: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: found.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
    )
    return found


def test_file_and_folder_are_flushed_with_all_they_hold_before_they_take_their_place(
    folder: Path, flushed: list[str]
):
    durable.write_bytes(folder / "old.txt", b"new")
    assert flushed == [f".old.txt.{os.getpid()}.tmp", "taken"], "its folder once it has its own name"
    flushed.clear()
    put_new(folder)
    assert flushed == ["inside", "new.txt", f".taken.{os.getpid()}.tmp", *[folder.parent.name] * 2]


@pytest.mark.parametrize("has_exchange", [True, False])
def test_replacing_folder_puts_the_new_one_in_the_place_of_all_that_stood_there(
    folder: Path, seen: list[str], has_exchange: bool, monkeypatch: pytest.MonkeyPatch
):
    if not has_exchange:
        monkeypatch.setattr(durable, "_exchange", lambda *_: False)
    with pytest.raises(ZeroDivisionError), durable.replacing_folder(folder) as temporary:
        (temporary / "half.txt").write_text(str(1 / 0))
    assert (names(folder), names(folder.parent)) == (["old.txt"], ["taken"]), "one that fails leaves nothing"
    put_new(folder)
    assert names(folder) == sorted(seen) == ["inside", "new.txt"]
    put_new(folder.parent / "far" / "away")
    assert (names(folder.parent), names(folder.parent / "far")) == (["far", "taken"], ["away"])


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EACCES])
def test_replacing_folder_falls_back_only_where_the_exchange_is_unknown(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
):
    class Library:
        @staticmethod
        def renameat2(*_: object) -> int:
            return -1

    monkeypatch.setattr(durable.ctypes, "CDLL", lambda *_, **__: Library)
    monkeypatch.setattr(durable.ctypes, "get_errno", lambda: number)
    if number == errno.EINVAL:
        put_new(folder)
        assert names(folder) == ["inside", "new.txt"]
    else:
        with pytest.raises(PermissionError):
            put_new(folder)
        assert names(folder) == ["old.txt"]


@pytest.mark.parametrize(
    ("sentence", "error"),
    [
        ("Error while serializing: I/O error: No space left on device (os error 28)", DiskFullError),
        ("Error while serializing: I/O error: Input/output error (os error 5)", StorageError),
        ("Error while deserializing: header too small", SafetensorError),
    ],
)
def test_storage_errors_reads_the_system_error_that_safetensors_writes_out(
    sentence: str, error: type[Exception]
):
    with (
        pytest.raises(error, match=r"while writing|writing .* failed|header too small"),
        durable.storage_errors("writing the model"),
    ):
        raise SafetensorError(sentence)
    with (
        pytest.raises(StorageError, match=r"^mending failed: Is a directory: a/b$"),
        durable.storage_errors("mending", Path("/x")),
    ):
        raise IsADirectoryError(21, "Is a directory", "/x/a/b")


def test_lock_is_seen_while_it_is_held_and_looking_makes_no_file(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    assert not durable.is_locked(path)
    assert not path.exists()
    with durable.exclusive_lock(path, "the lock", TryAgainError):
        assert durable.is_locked(path)
        with (
            pytest.raises(TryAgainError, match=r"process \d+"),
            durable.exclusive_lock(path, "the lock", TryAgainError),
        ):
            pass
    assert not durable.is_locked(path)


@pytest.mark.parametrize("leaves", ["holder", "child"])
def test_lock_is_let_go_by_its_holder_alone_though_a_child_has_its_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    path = tmp_path / ".lock"
    with durable.exclusive_lock(path, "the lock", TryAgainError):
        # as a child has it that is being started, until it runs another program
        entries = Path("/proc/self/fd").iterdir()
        (of_holder,) = [int(entry.name) for entry in entries if entry.resolve() == path.resolve()]
        of_child = os.dup(of_holder)
        if leaves == "child":
            monkeypatch.setattr(os, "getpid", lambda: 0)
    assert durable.is_locked(path) is (leaves == "child")
    os.close(of_child)


def test_who_looks_at_a_lock_keeps_no_writer_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".lock"
    path.touch()
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    monkeypatch.setattr("cairn.pipeline.durable.time.sleep", lambda _: fcntl.flock(descriptor, fcntl.LOCK_UN))
    with durable.exclusive_lock(path, "the lock", TryAgainError):
        assert durable.is_locked(path)
    os.close(descriptor)


def test_who_waits_for_a_lock_gets_it_from_a_process_that_dies(tmp_path: Path) -> None:
    path, looks = tmp_path / ".lock", [True, True, False]
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    def is_alive() -> bool:  # until its other lock is gone, just before this one
        if not looks[0]:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        return looks.pop(0)

    with durable.exclusive_lock(path, "the lock", TryAgainError, is_alive):
        assert durable.is_locked(path)
    os.close(descriptor)


def test_remove_folder_killed_in_the_middle_leaves_nothing_under_its_name_and_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    def die(name: str) -> None:
        if name == "folder.set-aside":
            raise KilledError

    folder = tmp_path / "00000001"
    folder.mkdir()
    (folder / "file").write_bytes(b"x")
    monkeypatch.setattr(durable, "_observers", [die])
    with pytest.raises(KilledError):
        durable.remove_folder(folder)
    assert not folder.exists()
    durable.clear_temporary(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("leftover", KINDS)
def test_remove_folder_removes_what_stands_in_its_place(tmp_path: Path, kind: str, leftover: str) -> None:
    (tmp_path / "x").mkdir()
    put(tmp_path / "x" / "00000001", kind)
    put(tmp_path / "x" / ".00000001.removed.tmp", leftover)
    durable.remove_folder(tmp_path / "x" / "00000001")
    assert list((tmp_path / "x").iterdir()) == []
    put(tmp_path / "x" / ".x.tmp", kind)
    durable.clear_temporary(tmp_path / "x")
    assert list((tmp_path / "x").iterdir()) == []
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    durable.remove_folder(tmp_path / "link")
    assert names(tmp_path) == ["elsewhere", "x"], "what a link leads to stays"


@pytest.mark.parametrize("kind", KINDS)
def test_file_is_written_where_something_else_stood(tmp_path: Path, kind: str) -> None:
    put(tmp_path / "x", kind)
    durable.clear_way(tmp_path / "x")
    durable.write_bytes(tmp_path / "x", b"whole")
    assert (tmp_path / "x").read_bytes() == b"whole"


def test_file_in_the_way_of_folders_is_removed_and_a_link_is_left(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    durable.clear_way(tmp_path / "a" / "b" / "x")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "disk").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        durable.clear_way(tmp_path / "disk" / "x")
    assert (tmp_path / "disk").is_symlink()


@pytest.mark.parametrize("kind", ["folder", "link to itself", "FIFO"])
def test_read_bytes_of_another_kind_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    put(tmp_path / "x", kind)
    with pytest.raises(OSError, match=r"it is no file|Too many levels"):
        durable.read_bytes(tmp_path / "x")
