"""Ways in which stored files can be damaged: entries of another kind, flipped bits, and a small disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

KINDS = ("file", "folder", "dangling link", "link to itself", "link to a device", "FIFO")


def in_turn(kinds: Sequence[Any], harms: Sequence[Any]) -> list[Any]:
    """Return all pairs as parameters: each kind with one of the harms for every run, the rest for faults."""
    return [
        pytest.param(kind, harm, marks=() if place == number % len(harms) else (pytest.mark.faults,))
        for number, kind in enumerate(kinds)
        for place, harm in enumerate(harms)
    ]


def put(path: Path, kind: str) -> None:
    """Put an entry of a kind in the place of whatever stands at ``path``."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
        (path / "inside").touch()
    elif kind == "file":
        path.touch()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        targets = {"dangling link": "nowhere", "link to itself": path.name, "link to a device": "/dev/zero"}
        path.symlink_to(targets[kind])


def flip(path: Path, place: int = -1, bits: int = 1) -> None:
    """Flip the lowest bit of a byte of a file, or others of its bits."""
    content = bytearray(path.read_bytes())
    content[place] ^= bits
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Leave the first third of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


def flipped_bits(content: bytes) -> Iterator[bytes]:
    """Yield a content once for each of its bits, with that bit flipped."""
    for position in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            yield bytes(flipped)


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with the ``DISK_BYTES`` of the test's module, which can be filled up."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    size = f"size={request.module.DISK_BYTES}"
    command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(mounted)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs; other tests make the claims without")
    yield mounted
    subprocess.run(["umount", "--lazy", str(mounted)], check=True)  # readers here still map its files
