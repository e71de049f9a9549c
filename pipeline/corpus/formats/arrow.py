"""Arrow IPC: files (Feather) and streams, which Hugging Face datasets keep; told apart by their first bytes.

A batch is believed when its buffers are as long as its offsets say. What is damaged ends the file. Columns
that are not wanted are not decompressed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats.file_kind import ARROW, HEAD, kind_of
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

_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
"""What stands behind the last batch of a stream; one that was cut between two batches can be read without."""


class ArrowFormat(Format):
    """Reads Arrow files and streams."""

    suffixes = (".arrow", ".feather")
    kinds = (ARROW,)

    @override
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Read the schema, and count the rows; a stream is read for it, a file's footer is enough."""
        with _opened(file) as reader:
            check_names(reader.schema)
            if isinstance(reader, pa.RecordBatchFileReader):
                return Footer(schema=reader.schema, num_rows=reader.count_rows())
            num_rows = 0
            try:
                for batch in reader:
                    num_rows += batch.num_rows
            except DECODE_ERRORS as error:
                file.require_reachable(error)
                left_out = f"; the {num_rows:,} rows of whole batches before it are left out as well"
                also = left_out if num_rows else ""
                raise ValueError(f"{damage_of(error)}{also}; write it again") from error
            return Footer(schema=reader.schema, num_rows=num_rows)

    @override
    def read(
        self, file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        with _opened(file) as reader:
            indices = [reader.schema.get_field_index(name) for name in types]
        with _opened(file, pa.ipc.IpcReadOptions(included_fields=indices)) as reader:
            for batch in _batches(reader):
                chosen = batch.select([*types])
                for column in chosen.columns:
                    _as_binary(column).validate(full=True)
                for start in range(0, batch.num_rows, config.batch_rows):
                    yield chosen.slice(start, config.batch_rows)
            is_stream = isinstance(reader, pa.RecordBatchStreamReader)
        if is_stream and not _is_ended(file):
            yield Undecoded(num_rows=0, detail="nothing marks its end, so it may be cut; write it again")


@contextmanager
def _opened(
    file: SourceFile, options: pa.ipc.IpcReadOptions | None = None
) -> Generator[pa.RecordBatchFileReader | pa.RecordBatchStreamReader]:
    with file.open() as stream:
        head = stream.read(HEAD)
        if head.startswith(b"FEA1"):
            raise ValueError("it is Feather of version 1; write it again as version 2, or as Parquet")
        stream.seek(0)
        opened = pa.ipc.open_file if kind_of(head) == ARROW else pa.ipc.open_stream
        try:
            reader = opened(stream, options=options)
        except pa.ArrowNotImplementedError as error:
            raise ValueError(f"{damage_of(error)}; without such columns, write it again") from error
        with reader:
            yield reader


def _is_ended(file: SourceFile) -> bool:
    with file.open() as stream:
        stream.seek(max(stream.size() - len(_END), 0))
        return bytes(stream.read()) == _END


def _batches(reader: pa.RecordBatchFileReader | pa.RecordBatchStreamReader) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.RecordBatchFileReader):
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)
    else:
        yield from reader


def _as_binary(column: pa.Array) -> pa.Array:
    """View texts as bytes: whether they are UTF-8 is judged row by row."""
    if pa.types.is_string(column.type):
        return column.view(pa.binary())
    return column.view(pa.large_binary()) if pa.types.is_large_string(column.type) else column
