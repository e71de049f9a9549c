"""What tells two states of a file apart on file systems that are neither local nor of Arrow."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest
from cairn.pipeline.corpus.file_identity import SETTLED_SECONDS, file_identities
from cairn.pipeline.corpus.formats import PARQUET
from cairn.pipeline.corpus.formats.format import SourceFile
from cairn.pipeline.corpus.sources import resolve_sources
from pyarrow.fs import FSSpecHandler, PyFileSystem


class Told(fsspec.AbstractFileSystem):
    """A file system that says of each file what it was given."""

    def __init__(self, **told: Any) -> None:
        super().__init__()
        self.told = told

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": 7, "type": "file", **self.told}


def identity(**told: Any) -> str | None:
    filesystem = PyFileSystem(FSSpecHandler(Told(**told, skip_instance_cache=True)))
    file = SourceFile(filesystem=filesystem, path="a", name="a", source="a", format=PARQUET)
    return file_identities([file])[0]


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ({"ETag": "one", "mtime": 1.0}, {"etag": "one", "mtime": 2.0}, True),
        ({"ETag": "one"}, {"ETag": "two"}, False),
        ({"mtime": 1.0}, {"mtime": 2.0}, False),
        ({"mtime": datetime(2020, 1, 1, tzinfo=UTC)}, {"mtime": 2.0}, False),
    ],
)
def test_file_is_told_by_its_tag_or_else_by_its_time(
    first: dict[str, Any], second: dict[str, Any], is_same: bool
) -> None:
    assert None not in (identity(**first), identity(**second))
    assert (identity(**first) == identity(**second)) == is_same


def test_file_written_a_moment_ago_without_a_tag_has_no_identity() -> None:
    assert identity(mtime=time.time()) is None


def test_local_file_has_an_identity_once_it_is_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"1")
    os.utime(tmp_path / "a.parquet", (1, 1))  # the time of the last change of its status is now
    files = resolve_sources([str(tmp_path)])
    assert file_identities(files) == [None]
    later = time.time() + SETTLED_SECONDS
    monkeypatch.setattr(time, "time", lambda: later)
    assert file_identities(files) != [None]
