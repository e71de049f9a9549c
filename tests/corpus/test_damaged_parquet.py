"""Files with flipped, missing and foreign bytes: what is quarantined, and what is read all the same."""

from __future__ import annotations

import base64
import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.scan import read_checked, scan_sources
from cairn.pipeline.errors import SchemaError

from tests.corpus.checked_rows import CONFIG, read, reasons

WriteCorpus = Callable[..., Path]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "text": lambda content: b"id,text\n1,hello\n",
    "truncated": lambda content: content[: len(content) // 2],
    "bad magic": lambda content: content[:-4] + b"XXXX",
    "footer length": lambda content: content[:-8] + b"\xff\xff\xff\x7f" + content[-4:],
    "footer bytes": lambda content: content[:-40] + b"\xff" * 32 + content[-8:],
}


def test_file_with_a_damaged_time_zone_is_quarantined(write_corpus: WriteCorpus) -> None:
    bad = write_corpus(
        "b.parquet",
        id=["b"],
        text=["y"],
        at=pa.array([1], pa.timestamp("s", "Europe/Berlin")),
        options={"version": "1.0"},
    )
    schema = pa.ipc.read_schema(
        pa.py_buffer(base64.b64decode(pq.read_metadata(bad).metadata[b"ARROW:schema"]))
    )
    stored = pq.read_metadata(bad).metadata[b"ARROW:schema"]
    damaged = base64.b64encode(
        schema.serialize().to_pybytes().replace(b"Europe/Berlin", b"Europe/\xff\xffrlin")
    )
    assert len(stored) == len(damaged)
    bad.write_bytes(bad.read_bytes().replace(stored, damaged))
    good = write_corpus(
        "a.parquet", id=["a"], text=["x"], at=pa.array([1], pa.timestamp("s", "Europe/Berlin"))
    )
    rows, rejected = read(good.parent)
    assert [row["doc_id"] for row in rows] == ["a"]
    assert reasons(rejected) == [(None, "damaged_file")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_quarantined_and_the_others_go_on(write_corpus: WriteCorpus, damage: str) -> None:
    bad = write_corpus("b.parquet", id=["b"], text=["y"])
    bad.write_bytes(DAMAGES[damage](bad.read_bytes()))
    good = write_corpus("a.parquet", id=["a"], text=["x"])
    rows, rejected = read(good.parent)
    assert [row["doc_id"] for row in rows] == ["a"]
    assert [(row["source_file"], row["row_index"], row["reason"]) for row in rejected] == [
        (str(bad), None, "damaged_file")
    ]


@pytest.mark.parametrize(("page_rows", "damaged"), [(25, range(50, 75)), (5, range(60, 75))])
def test_damaged_page_quarantines_the_rest_of_its_row_group(
    write_corpus: WriteCorpus, page_rows: int, damaged: range
) -> None:
    names = [f"id-{i:04d}" for i in range(100)]
    options = {
        "row_group_size": 25,
        "write_batch_size": page_rows,
        "data_page_size": 1,
        "write_statistics": False,
        "compression": "none",
        "use_dictionary": False,
        "write_page_checksum": True,
    }
    bad = write_corpus("a.parquet", id=names, text=[f"text {name}" for name in names], options=options)
    content = bytearray(bad.read_bytes())
    content[content.index(b"text id-0060")] ^= 1
    bad.write_bytes(content)
    write_corpus("b.parquet", id=["later"], text=["x"])
    rows, rejected = read(bad.parent, config=CorpusConfig(batch_rows=page_rows))
    assert [row["doc_id"] for row in rows] == [*names[: damaged.start], *names[75:], "later"]
    assert reasons(rejected) == [(row, "damaged_rows") for row in damaged]


def test_every_bit_flip_keeps_the_row_equation(write_corpus: WriteCorpus) -> None:
    path = write_corpus(
        "a.parquet",
        id=[*range(40)],
        text=[f"some text {i}" for i in range(40)],
        tags=[["a", "b"]] * 40,
        options={"row_group_size": 16},
    )
    write_corpus("good.parquet", id=[100], text=["x"], tags=[["a"]])
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    finished = 0
    for position in generator.choice(len(content), 150, replace=False):
        flipped = bytearray(content)
        flipped[position] ^= 1 << int(generator.integers(8))
        path.write_bytes(flipped)
        try:
            scan = scan_sources([str(path.parent)], CONFIG)
        except SchemaError:
            continue  # the flip renamed or retyped a column
        batches = list(read_checked(scan, CONFIG))
        assert sum(batch.num_rows for batch in batches) == scan.num_rows + len(scan.damaged_files)
        finished += 1
    assert finished > 100


def test_names_that_cannot_be_read_are_quarantined_and_the_others_go_on(
    write_corpus: WriteCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = write_corpus("a.parquet", id=["a"], text=["x"])
    folder, scandir = good.parent, os.scandir
    for name in ("closed", os.fsdecode(b"sub\xff")):
        (folder / name).mkdir()
    for name in (b"caf\xe9.parquet", b"sub\xff/b.parquet"):
        (folder / os.fsdecode(name)).write_bytes(good.read_bytes())
    (folder / "lost.parquet").symlink_to("/nowhere")
    os.mkfifo(folder / "pipe.parquet")

    def refuse(place: str) -> object:
        if place.endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refuse)
    for source in (folder, f"{folder}/*", f"{folder}/**/*.parquet"):
        rows, rejected = read(source)
        assert [row["doc_id"] for row in rows] == ["a"]
        assert {Path(row["source_file"]).name: row["detail"] for row in rejected} == {
            "closed": "it cannot be listed: Permission denied",
            "caf\ufffd.parquet": "its name must be UTF-8; rename it",
            "b.parquet": "its name must be UTF-8; rename it",
            "lost.parquet": "it is a link that leads nowhere",
            "pipe.parquet": "it is neither a file nor a folder",
        }
