"""Parquet: the footer first, then row groups, each by itself: the next is read where one is damaged.

A row group is decoded in bounded steps, whatever its few bytes claim to expand to. A small file can hold
gigabytes: one long string behind a dictionary, a run of equal list elements, a page of zeros under a strong
codec, prefixes that repeat the value before. Hence the rows of a read follow from the footer and from the
longest entry of each dictionary, read first; a small dictionary with long entries is kept as one; a row group
whose single pages or rows could exceed the budget is refused before it is touched. Footers are believed where
they size a read: a crafted footer that understates its pages is the limit of this protection, since Arrow
allocates what a page header asks for.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import value_bytes
from cairn.pipeline.corpus.formats.file_kind import PARQUET
from cairn.pipeline.corpus.formats.format import (
    DECODE_ERRORS,
    Footer,
    Format,
    SourceFile,
    Undecoded,
    check_names,
    damage_of,
)
from typing_extensions import override

THRIFT_STRING_BYTES = 32 << 20
THRIFT_CONTAINER_ITEMS = 1 << 20
"""Limits on a footer: above any honest one (pandas metadata, a million column chunks), far below memory."""

GROUP_BUDGET_BATCHES = 4
"""A column chunk that decodes to more than this many batches may be one page or one row.

It must not look like a bomb.
"""
SUSPECT_EXPANSION = 200
"""Decoded over stored bytes: prose compresses 3 to 5 times, logs 20 to 50, a bomb ten thousand."""
SKEWED_READ_ROWS = 256
"""Rows a read of a large column chunk takes at most.

Its average says nothing about a tail of long documents.
"""
PROBE_ROWS = 64


class ParquetFormat(Format):
    """Reads Parquet files."""

    suffixes = (".parquet", ".pq")
    kinds = (PARQUET,)

    @override
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Read the footer, and no row."""
        with file.open() as stream, open_parquet(stream) as parquet:
            metadata, schema = parquet.metadata, parquet.schema_arrow
            groups = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
            if min(groups, default=0) < 0 or sum(groups) != metadata.num_rows:
                raise ValueError(f"the footer counts {metadata.num_rows} rows, its row groups {sum(groups)}")
            check_names(schema)
            uuids = _uuids(leaves_of(metadata, schema.names), schema)
            return Footer(schema=_with_types(schema, uuids), num_rows=metadata.num_rows)

    @override
    def read(
        self, file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        """Yield the rows of each row group, or what is wrong with it."""
        with file.open() as stream, open_parquet(stream) as footer:
            metadata = footer.metadata
            leaves = leaves_of(metadata, [*types])
            uuids = _uuids(leaves, footer.schema_arrow)
            for index in range(metadata.num_row_groups):
                group, done = metadata.row_group(index), 0
                try:
                    check_column_metadata(stream, metadata, index, leaves)
                    refused = refusal(group, leaves, config)
                    if refused is not None:
                        yield Undecoded(num_rows=group.num_rows, detail=refused)
                        continue
                    for batch in decode_row_group(stream, metadata, index, leaves, config):
                        done += batch.num_rows
                        yield batch.cast(_with_types(batch.schema, uuids)) if uuids else batch
                except DECODE_ERRORS as error:  # the groups behind it have pages of their own
                    file.require_reachable(error)
                    yield Undecoded(num_rows=group.num_rows - done, detail=damage_of(error))


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One physical column of a wanted source column."""

    index: int
    path: str
    column: str
    is_string: bool
    is_uuid: bool
    is_repeated: bool
    value_bytes: int


def _uuids(leaves: Sequence[Leaf], schema: pa.Schema) -> Mapping[str, pa.DataType]:
    """Return the types of columns of UUIDs, and of lists of them, where no schema of Arrow tells them.

    Arrow's own way to tell them reads no column of JSON as dictionary.
    """
    names = {leaf.column for leaf in leaves if leaf.is_uuid and schema.names.count(leaf.column) == 1}
    told = {pa.binary(16): pa.uuid(), pa.list_(pa.binary(16)): pa.list_(pa.uuid())}
    found = ((name, schema.field(name).type, *each) for name in names for each in told.items())
    return {name: uuids for name, own, plain, uuids in found if own == plain}


def _with_types(schema: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    fields = [field.with_type(types.get(field.name, field.type)) for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def open_parquet(
    stream: pa.NativeFile, metadata: pq.FileMetaData | None = None, as_dictionary: Sequence[str] = ()
) -> pq.ParquetFile:
    """Open a Parquet file, reading nothing but its footer, and not even that when ``metadata`` is given."""
    try:
        return pq.ParquetFile(
            stream,
            metadata=metadata,
            read_dictionary=list(as_dictionary) or None,
            buffer_size=1 << 16,  # stream pages instead of holding whole column chunks
            pre_buffer=False,
            thrift_string_size_limit=THRIFT_STRING_BYTES,
            thrift_container_size_limit=THRIFT_CONTAINER_ITEMS,
            page_checksum_verification=True,
            arrow_extensions_enabled=False,
        )
    except pa.ArrowNotImplementedError as error:
        if metadata is None:
            with contextlib.suppress(pa.ArrowNotImplementedError):
                return open_parquet(stream, _without_arrow_schema(stream), as_dictionary)
        raise ValueError(f"{damage_of(error)}; without such columns, write it again") from error


def _without_arrow_schema(stream: pa.NativeFile) -> pq.FileMetaData:
    """Return a footer without the schema of Arrow in it, which cannot be read with integers of 128 bits.

    Columns are then what Parquet has them as, those integers bytes, and durations numbers.
    """
    stream.seek(stream.size() - 8)
    length = int.from_bytes(stream.read(4), "little")
    stream.seek(stream.size() - 8 - length)
    return pq.read_metadata(
        pa.BufferReader(b"PAR1" + stream.read().replace(b"ARROW:schema", b"ARROW:unread"))
    )


def leaves_of(metadata: pq.FileMetaData, columns: Sequence[str]) -> tuple[Leaf, ...]:
    """List the physical columns that reading ``columns`` touches."""
    wanted = set(columns)
    found: list[Leaf] = []
    for index in range(metadata.num_columns):
        column = metadata.schema.column(index)
        name = column.path.split(".", 1)[0]
        if name in wanted:
            narrow = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "BYTE_ARRAY": 4}
            is_binary = column.physical_type == "BYTE_ARRAY"
            found.append(
                Leaf(
                    index=index,
                    path=column.path,
                    column=name,
                    is_string=is_binary and column.logical_type.type != "DECIMAL",
                    is_uuid=column.logical_type.type == "UUID",
                    is_repeated=column.max_repetition_level > 0,
                    value_bytes=narrow.get(column.physical_type, max(8, column.length or 0)),
                )
            )
    return tuple(found)


class _Unread(io.RawIOBase):
    """A file of the right size that refuses to be read."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self._size_bytes, self._position = size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size_bytes)[whence]
        return self._position

    def read(self, _size: int = -1) -> bytes:
        raise _PageReachedError


class _PageReachedError(Exception):
    pass


def check_column_metadata(
    stream: pa.NativeFile, metadata: pq.FileMetaData, index: int, leaves: Sequence[Leaf]
) -> None:
    """Raise one of ``DECODE_ERRORS`` where the footer is damaged in what it says of a row group's columns.

    Must come before ``group.column``: that ends the process on such damage, by an exception that escapes from
    C++. Opening the column readers makes the same checks and reports them. They are opened on a file without
    content, so that no page is decoded.
    """
    columns = list(dict.fromkeys(leaf.column for leaf in leaves))
    unread = pa.PythonFile(_Unread(stream.size()), mode="r")
    with open_parquet(unread, metadata) as parquet, contextlib.suppress(_PageReachedError):
        next(parquet.iter_batches(batch_size=1, row_groups=[index], columns=columns, use_threads=False), None)


def decode_row_group(
    stream: pa.NativeFile, metadata: pq.FileMetaData, index: int, leaves: Sequence[Leaf], config: CorpusConfig
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a row group that :func:`refusal` has nothing against.

    Raises one of ``DECODE_ERRORS`` where the bytes are damaged.
    """
    batch_rows, as_dictionary = plan_reads(stream, metadata, index, leaves, config)
    columns = list(dict.fromkeys(leaf.column for leaf in leaves))
    num_rows, done = metadata.row_group(index).num_rows, 0
    with open_parquet(stream, metadata, as_dictionary) as parquet:
        # One thread: several would each hold a decoded column chunk.
        for batch in parquet.iter_batches(
            batch_size=batch_rows, row_groups=[index], columns=columns, use_threads=False
        ):
            done += batch.num_rows
            if done > num_rows:
                raise ValueError(f"row group {index} holds more than {num_rows} rows")
            yield batch
    missing = num_rows - done
    if missing:
        raise ValueError(f"row group {index} ends {missing} rows early")


def refusal(group: pq.RowGroupMetaData, leaves: Sequence[Leaf], config: CorpusConfig) -> str | None:
    """Say why a row group must not be decoded at all, None when it may."""
    budget = GROUP_BUDGET_BATCHES * config.batch_bytes
    for leaf in leaves:
        column = group.column(leaf.index)
        decoded, stored = column.total_uncompressed_size, max(column.total_compressed_size, 1)
        if decoded > budget and decoded > SUSPECT_EXPANSION * stored:
            return f"column {leaf.path!r} expands from {stored} to {decoded} bytes in one row group"
        if leaf.is_string and decoded > max(budget, group.num_rows * config.max_document_bytes):
            return (
                f"column {leaf.path!r} holds {decoded} bytes in {group.num_rows} rows, more than "
                "max_document_bytes a row"
            )
        expanded = column.num_values * leaf.value_bytes
        if leaf.is_repeated and expanded > budget and expanded > SUSPECT_EXPANSION * max(decoded, 1):
            return (
                f"column {leaf.path!r} expands from {decoded} bytes to {column.num_values} list "
                "elements in one row group"
            )
    return None


def plan_reads(
    stream: pa.NativeFile, metadata: pq.FileMetaData, index: int, leaves: Sequence[Leaf], config: CorpusConfig
) -> tuple[int, Sequence[str]]:
    """Choose the rows of a read so that it decodes to about ``batch_bytes``, and what stays a dictionary.

    Behind a dictionary it decodes to twice that at most.
    """
    group = metadata.row_group(index)
    num_rows = max(group.num_rows, 1)
    rows, as_dictionary = config.batch_rows, list[str]()
    for leaf in leaves:
        column = group.column(leaf.index)
        decoded, values_per_row = max(column.total_uncompressed_size, 1), column.num_values / num_rows
        row_bytes = max(decoded / num_rows, values_per_row * leaf.value_bytes if leaf.is_repeated else 0.0)
        if leaf.is_string and "DELTA_BYTE_ARRAY" in column.encodings:
            row_bytes = float(decoded)  # every row may repeat all that the chunk holds
        elif leaf.is_string and any("DICTIONARY" in encoding for encoding in column.encodings):
            entry_bytes = _longest_entry(stream, metadata, index, leaf)
            worst_values = column.num_values if leaf.is_repeated else min(config.batch_rows, num_rows)
            if entry_bytes * worst_values > 2 * config.batch_bytes:
                # Arrow holds a chunk read as dictionary about five times over, so only a small one is.
                if decoded <= config.batch_bytes:
                    as_dictionary.append(leaf.path)
                else:
                    row_bytes = max(row_bytes, entry_bytes * max(values_per_row, 1.0) / 2)
        if decoded > GROUP_BUDGET_BATCHES * config.batch_bytes:
            rows = min(rows, SKEWED_READ_ROWS)
        rows = min(rows, int(config.batch_bytes / row_bytes)) if row_bytes else rows
    return max(rows, 1), as_dictionary


def _longest_entry(stream: pa.NativeFile, metadata: pq.FileMetaData, index: int, leaf: Leaf) -> int:
    """Return the byte length of a column chunk's longest dictionary entry.

    The first read that meets a value brings them all.
    """
    with open_parquet(stream, metadata, [leaf.path]) as parquet:
        for batch in parquet.iter_batches(
            batch_size=PROBE_ROWS, row_groups=[index], columns=[leaf.column], use_threads=False
        ):
            column = batch.column(0)
            entries = (column if pa.types.is_dictionary(column.type) else column.flatten()).dictionary
            if len(entries):
                return int(value_bytes(entries).max())
    return 0
