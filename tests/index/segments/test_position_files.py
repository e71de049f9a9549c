from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.index.segments import writer
from cairn.pipeline.index.segments.segment import (
    CHUNK_POSITIONS_SCHEMA,
    DOCUMENT_POSITIONS_SCHEMA,
    LENGTHS_SCHEMA,
    open_positions,
)
from cairn.pipeline.index.segments.writer import (
    ColumnSpool,
    write_chunk_positions,
    write_document_positions,
)

from tests.index import stones


@pytest.fixture
def documents() -> pa.Table:
    return pa.Table.from_batches([stones.document_rows(stones.document_ids(30))])


@pytest.fixture
def chunks() -> pa.Table:
    return pa.Table.from_batches([stones.chunk_rows(stones.document_ids(30))])


def batches(table: pa.Table, rows: int) -> Iterator[pa.RecordBatch]:
    return iter(table.to_batches(max_chunksize=rows))


@pytest.mark.parametrize("rows", [1, 7, 1_000])
def test_positions_are_those_of_the_tables_whatever_the_batches(
    tmp_path: Path, documents: pa.Table, chunks: pa.Table, rows: int
) -> None:
    written = write_document_positions(batches(documents, rows), tmp_path / "documents.arrow")
    ids, num_chunks = written.column("doc_id").to_pylist(), documents.column("num_chunks").to_pylist()
    assert ids == documents.column("doc_id").to_pylist()
    assert written.column("chunk_offset").to_pylist() == [sum(num_chunks[:i]) for i in range(30)]
    spans = write_chunk_positions(batches(chunks, rows), written, tmp_path / "chunks.arrow")
    owners = [ids[position] for position in spans.column("document_position").to_pylist()]
    assert owners == chunks.column("doc_id").to_pylist()
    assert spans.column("end_char").to_pylist() == chunks.column("end_char").to_pylist()


def test_document_positions_know_the_order_of_the_ids_of_which_each_is_there_once(
    tmp_path: Path, documents: pa.Table
) -> None:
    ids = ["ü", "\U0001f600", "Z", "a/10", "a/9", "\uffff", *(f"d{i}" for i in range(24, 0, -1))]
    table = documents.set_column(
        documents.schema.get_field_index("doc_id"), "doc_id", pa.array(ids, pa.large_string())
    )
    written = write_document_positions(batches(table, 7), tmp_path / "documents.arrow")
    assert [ids[row] for row in written.column("by_id").to_pylist()] == sorted(ids)
    with pytest.raises(IntegrityError, match="must hold one batch"):
        open_positions(tmp_path / "documents.arrow", CHUNK_POSITIONS_SCHEMA)
    repeated = pa.concat_tables([table, table.slice(3, 1)])
    with pytest.raises(IntegrityError, match="each doc_id once, got 1 repeated"):
        write_document_positions(batches(repeated, 7), tmp_path / "documents.arrow")
    empty = write_document_positions(iter([]), tmp_path / "documents.arrow")
    assert write_chunk_positions(iter([]), empty, tmp_path / "chunks.arrow").num_rows == 0


def with_column(table: pa.Table, name: str, values: list[object]) -> pa.Table:
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(name), pa.array(values, table.schema.field(name).type))


@pytest.mark.parametrize("fault", ["order", "ordinal", "gap", "first", "missing", "extra"])
def test_chunk_positions_of_rows_that_do_not_fit_are_refused(
    tmp_path: Path, documents: pa.Table, chunks: pa.Table, fault: str
) -> None:
    positions = write_document_positions(batches(documents, 30), tmp_path / "documents.arrow")
    starts, ordinals = chunks.column("start_char").to_pylist(), chunks.column("ordinal").to_pylist()
    inner = next(i for i, ordinal in enumerate(ordinals) if ordinal == 1)
    broken = {
        "order": lambda: (
            chunks.take([1, 0, *range(2, len(chunks))])
            if ordinals[1] == 0
            else chunks.take([*range(1, len(chunks)), 0])
        ),
        "ordinal": lambda: with_column(
            chunks, "ordinal", [5 if i == inner else value for i, value in enumerate(ordinals)]
        ),
        "gap": lambda: with_column(
            chunks, "start_char", [value + (i == inner) for i, value in enumerate(starts)]
        ),
        "first": lambda: with_column(chunks, "start_char", [1, *starts[1:]]),
        "missing": lambda: chunks.slice(0, len(chunks) - 1),
        "extra": lambda: pa.concat_tables([chunks, chunks.slice(0, 1)]),
    }[fault]()
    with pytest.raises(IntegrityError, match="table `chunks` must hold"):
        write_chunk_positions(batches(broken, 7), positions, tmp_path / "chunks.arrow")


def test_spool_on_a_full_disk_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[IO[bytes]] = []

    def full(_: Path) -> IO[bytes]:
        files.append(Path("/dev/full").open("r+b"))  # noqa: SIM115 - the spool closes it
        return files[-1]

    monkeypatch.setattr(writer, "unnamed_file", full)
    spool = ColumnSpool(LENGTHS_SCHEMA, tmp_path / "lengths.arrow")
    spool.append(text_words=np.ones(1), title_words=np.ones(1), language=np.ones(1))
    with pytest.raises(OSError, match="No space left"):
        spool.close()
    assert len(files) == 3
    assert all(each.closed for each in files)


def test_position_file_under_another_name_is_the_same_and_one_that_is_written_over_is_read_again(
    tmp_path: Path, documents: pa.Table
) -> None:
    path, link = tmp_path / "documents.arrow", tmp_path / "linked.arrow"
    written = write_document_positions(batches(documents, 30), path)
    link.hardlink_to(path)
    assert open_positions(link, DOCUMENT_POSITIONS_SCHEMA) is written
    write_document_positions(batches(documents.slice(0, 7), 7), path)
    assert open_positions(path, DOCUMENT_POSITIONS_SCHEMA).num_rows == 7


@pytest.mark.parametrize(("moment", "num_rows"), [("before", 7), ("after", 30)])
def test_position_file_replaced_while_it_is_mapped_is_not_taken_for_the_other(
    tmp_path: Path, documents: pa.Table, monkeypatch: pytest.MonkeyPatch, moment: str, num_rows: int
) -> None:
    path, older, newer = (tmp_path / name for name in ("documents.arrow", "older.arrow", "newer.arrow"))
    write_document_positions(batches(documents, 30), path)
    write_document_positions(batches(documents.slice(0, 7), 7), newer)
    older.hardlink_to(path)
    memory_map = pa.memory_map

    def replaced(name: str) -> pa.MemoryMappedFile:
        if moment == "after":
            found = memory_map(name)
            newer.replace(path)
            return found
        newer.replace(path)
        return memory_map(name)

    with monkeypatch.context() as patched:
        patched.setattr(pa, "memory_map", replaced)
        opened = open_positions(path, DOCUMENT_POSITIONS_SCHEMA)
    assert opened.num_rows == num_rows
    assert open_positions(path, DOCUMENT_POSITIONS_SCHEMA).num_rows == 7
    assert open_positions(older, DOCUMENT_POSITIONS_SCHEMA).num_rows == 30
