"""``tokens.arrow``: the codes of every chunk's tokens, and of every title's, for late interaction.

    row m    vectors of chunk m    vectors of its document's title, in the first row of a document
    vector   codes of dims · bits / 8 bytes, then one byte: characters since the token before began

One record batch of two columns of bytes, whose offsets and data are mapped as they are. Rows stand in the
order of ``chunks.arrow``, so the codes of a window of chunks are one stretch of bytes. The file is derived:
each segment's is written from the ``chunks`` table. The projection that made the codes, and decodes them,
lies beside the segments as ``cairn_late.safetensors``. Codes of two files of one projection are joined
without being decoded.

    M chunks    T tokens
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from cairn.pipeline.errors import DamageError, ModelError
from cairn.pipeline.index.position_files import ColumnSpool, open_positions
from cairn.pipeline.ragged import ranges
from cairn.pipeline.token_vectors.projection import LATE_NAME, TokenProjection, load_token_projection
from jaxtyping import Int64, UInt8

TOKEN_FILE_SCHEMA = pa.schema(
    [
        pa.field("token_codes", pa.large_binary(), nullable=False),
        pa.field("title_codes", pa.large_binary(), nullable=False),
    ]
)
TOKEN_FILE_COLUMNS = tuple(TOKEN_FILE_SCHEMA.names)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkTokens:
    """The tokens of some chunks, laid end to end.

    ``size_C`` are the tokens of each chunk. ``step_T`` are the characters from one token to the next, the
    first counted from its chunk's start.
    """

    codes: UInt8[np.ndarray, "T bytes"]
    step_T: UInt8[np.ndarray, " T"]
    size_C: Int64[np.ndarray, " C"]


class TokenCodes(Protocol):
    """Where the tokens of chunks, or of titles, are read."""

    def read(self, chunk_C: Int64[np.ndarray, " C"]) -> ChunkTokens:
        """Return the tokens of some chunks, in the order asked."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CodeColumn:
    """Rows of tokens in memory or mapped: chunk ``m`` owns ``offsets_M1[m] // unit`` to the next.

    ``unit`` is the size of a token in the unit of the offsets: a mapped file counts bytes.
    """

    rows: UInt8[np.ndarray, "T row_bytes"]
    offsets_M1: Int64[np.ndarray, " M1"]
    unit: int = 1

    @classmethod
    def of(cls, column: pa.LargeBinaryArray, vector_bytes: int) -> CodeColumn:
        """View a column; one that does not hold whole vectors raises :class:`DamageError`."""
        row_bytes = vector_bytes + 1
        _, offsets, content = column.buffers()
        ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
        ends = ends if len(ends) else np.zeros(1, np.int64)
        num_bytes = int(ends[-1])
        if num_bytes % row_bytes:
            raise DamageError(f"token vectors must have {row_bytes} bytes each, got others")
        codes = np.frombuffer(content, np.uint8, num_bytes) if num_bytes else np.zeros(0, np.uint8)
        return cls(rows=codes.reshape(-1, row_bytes), offsets_M1=ends, unit=row_bytes)

    def read(self, chunk_C: Int64[np.ndarray, " C"]) -> ChunkTokens:
        """Return the tokens of some chunks, in the order asked."""
        start_C = self.offsets_M1[chunk_C] // self.unit
        size_C = self.offsets_M1[chunk_C + 1] // self.unit - start_C
        tokens = self.rows[ranges(start_C, size_C)]
        return ChunkTokens(codes=tokens[:, :-1], step_T=tokens[:, -1], size_C=size_C)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenVectors:
    """The token vectors of a generation: codes of chunks and titles, and the projection that made them."""

    projection: TokenProjection
    chunks: TokenCodes
    titles: TokenCodes


def write_token_vectors(rows: Iterable[pa.RecordBatch], path: Path) -> pa.RecordBatch:
    """Write the file from a scan of :data:`TOKEN_FILE_COLUMNS`; return it, mapped. Null is no codes."""
    spool = ColumnSpool(TOKEN_FILE_SCHEMA, path)
    try:
        for batch in rows:
            spool.append(**{name: _without_nulls(batch.column(name)) for name in TOKEN_FILE_COLUMNS})
        return spool.finish()
    finally:
        spool.close()


def open_token_file(path: Path, num_chunks: int) -> pa.RecordBatch:
    """Map a file; one that holds another number of chunks raises :class:`DamageError`."""
    rows = open_positions(path, TOKEN_FILE_SCHEMA)
    if rows.num_rows != num_chunks:
        raise DamageError(f"{path.name} must hold {num_chunks} chunks, got {rows.num_rows}")
    return rows


def open_token_projection(folder: Path) -> TokenProjection:
    """Load the projection of a generation; a broken one raises :class:`DamageError`."""
    try:
        return load_token_projection(folder / LATE_NAME)
    except ModelError as error:
        raise DamageError(f"{LATE_NAME} cannot be read") from error


def _without_nulls(column: pa.Array) -> pa.Array:
    return column.fill_null(b"") if column.null_count else column
