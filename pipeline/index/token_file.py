"""``token_vectors.arrow``: the codes of every chunk's tokens, and of every title's, for late interaction.

    row m    vectors of chunk m    vectors of its document's title, in the first row of a document
    vector   codes of dims · bits / 8 bytes, then one byte: characters since the token before began

One record batch of two columns of bytes, whose offsets and data are mapped as they are. Rows stand in the
order of ``chunks.arrow``, so the codes of a window of chunks are one stretch of bytes. The file is derived:
each generation's is written from the ``chunks`` table. The projection that made the codes, and decodes them,
lies beside it as ``cairn_late.safetensors``. Codes of two files of one projection are joined without being
decoded.

    M chunks    T tokens
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Int64, UInt8

from pipeline.errors import DamageError, ModelError
from pipeline.index.position_files import ColumnSpool, open_positions
from pipeline.token_vectors.projection import LATE_NAME, TokenProjection, load_token_projection

TOKEN_FILE_SCHEMA = pa.schema(
    [
        pa.field("token_codes", pa.large_binary(), nullable=False),
        pa.field("title_codes", pa.large_binary(), nullable=False),
    ]
)
TOKEN_FILE_COLUMNS = tuple(TOKEN_FILE_SCHEMA.names)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CodeColumn:
    """Vectors of rows laid end to end, mapped; row ``m`` owns ``offsets_M1[m]:offsets_M1[m + 1]``.

    ``steps_T`` are the characters from one token to the next, the first counted from its chunk's start.
    """

    codes: UInt8[np.ndarray, "T bytes"]
    steps_T: UInt8[np.ndarray, " T"]
    offsets_M1: Int64[np.ndarray, " M1"]

    @classmethod
    def of_rows(
        cls, rows: UInt8[np.ndarray, "T row_bytes"], offsets_M1: Int64[np.ndarray, " M1"]
    ) -> CodeColumn:
        """View rows as an encoder makes them."""
        return cls(codes=rows[:, :-1], steps_T=rows[:, -1], offsets_M1=offsets_M1)

    @classmethod
    def of(cls, column: pa.LargeBinaryArray, vector_bytes: int) -> CodeColumn:
        """View a column; one whose rows are not whole vectors raises :class:`DamageError`."""
        row_bytes = vector_bytes + 1
        _, offsets, content = column.buffers()
        ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
        ends = ends if len(ends) else np.zeros(1, np.int64)
        if np.any(ends % row_bytes):
            raise DamageError(f"token vectors must have {row_bytes} bytes each, got others")
        num_bytes = int(ends[-1])
        codes = np.frombuffer(content, np.uint8, num_bytes) if num_bytes else np.zeros(0, np.uint8)
        return cls.of_rows(codes.reshape(-1, row_bytes), ends // row_bytes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenVectors:
    """The token vectors of a generation: codes of chunks and titles, and the projection that made them."""

    projection: TokenProjection
    chunks: CodeColumn
    titles: CodeColumn


def write_token_vectors(rows: Iterable[pa.RecordBatch], path: Path) -> pa.RecordBatch:
    """Write the file from a scan of :data:`TOKEN_FILE_COLUMNS`; return it, mapped. Null is no codes."""
    spool = ColumnSpool(TOKEN_FILE_SCHEMA, path)
    try:
        for batch in rows:
            spool.append(**{name: _without_nulls(batch.column(name)) for name in TOKEN_FILE_COLUMNS})
        return spool.finish()
    finally:
        spool.close()


def open_token_vectors(folder: Path, path: Path, num_chunks: int) -> TokenVectors:
    """Map the file at ``path`` with the projection in ``folder``; others raise :class:`DamageError`."""
    rows = open_positions(path, TOKEN_FILE_SCHEMA)
    if rows.num_rows != num_chunks:
        raise DamageError(f"{path.name} must hold {num_chunks} chunks, got {rows.num_rows}")
    try:
        projection = load_token_projection(folder / LATE_NAME)
    except ModelError as error:
        raise DamageError(f"{LATE_NAME} cannot be read") from error
    vector_bytes = projection.codec.vector_bytes
    return TokenVectors(
        projection=projection,
        chunks=CodeColumn.of(rows.column("token_codes"), vector_bytes),
        titles=CodeColumn.of(rows.column("title_codes"), vector_bytes),
    )


def _without_nulls(column: pa.Array) -> pa.Array:
    return column.fill_null(b"") if column.null_count else column
