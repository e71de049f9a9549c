"""The token codes of several segments, read by position among the chunks that are left."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

import numpy as np
from cairn.pipeline.index.layout import ALL_TOKENS_ARROW
from cairn.pipeline.index.segments.deleted import DeletedRows, none_deleted
from cairn.pipeline.index.segments.segment import Segment
from cairn.pipeline.index.token_file import (
    TOKEN_FILE_COLUMNS,
    CodeColumn,
    TokenCodes,
    TokenRows,
    TokenVectors,
    open_token_file,
    open_token_projection,
)
from cairn.pipeline.ragged import ranges
from cairn.pipeline.token_vectors.projection import LATE_NAME
from jaxtyping import Int64


class JoinedCodes:
    """Columns of ``tokens.arrow`` of segments, in their order, each with its deleted chunks."""

    def __init__(self, parts: Sequence[tuple[CodeColumn, DeletedRows]]) -> None:
        self._parts = parts
        self._begin_S = np.cumsum([0, *(deleted.num_live for _, deleted in parts)])

    def read(self, chunk_C: Int64[np.ndarray, " C"]) -> TokenRows:
        """Return the tokens of some chunks, in the order asked."""
        segment_C = np.searchsorted(self._begin_S, chunk_C, side="right") - 1
        places = [np.flatnonzero(segment_C == segment) for segment in range(len(self._parts))]
        found = [
            column.read(deleted.stored_of(chunk_C[place] - begin))
            for (column, deleted), begin, place in zip(self._parts, self._begin_S[:-1], places, strict=True)
        ]
        # Laid out by segment; then in the order asked.
        size = np.concatenate([each.size_C for each in found])
        order = np.argsort(np.concatenate(places), kind="stable")
        token_T = ranges((np.cumsum(size) - size)[order], size[order])
        return TokenRows(
            codes=np.concatenate([each.codes for each in found])[token_T],
            step_T=np.concatenate([each.step_T for each in found])[token_T],
            size_C=size[order],
        )


def open_token_vectors(
    folder: Path, files: Container[str], segments: Sequence[Segment], late_folder: Path
) -> TokenVectors | None:
    """Return the token vectors of a generation, None where there are none.

    ``files`` names its files, ``late_folder`` holds the projection. Damage raises :class:`DamageError`.
    """
    if LATE_NAME not in files:
        return None
    if ALL_TOKENS_ARROW in files:
        num_chunks = sum(segment.rows.deleted_chunks.num_live for segment in segments)
        parts = [(open_token_file(folder / ALL_TOKENS_ARROW, num_chunks), none_deleted(num_chunks))]
    else:
        parts = [(each.tokens, each.rows.deleted_chunks) for each in segments if each.tokens is not None]
        if len(parts) < len(segments):
            return None
    projection = open_token_projection(late_folder)
    chunks, titles = (
        _joined(
            [
                (CodeColumn.of(rows.column(name), projection.codec.vector_bytes), deleted)
                for rows, deleted in parts
            ]
        )
        for name in TOKEN_FILE_COLUMNS
    )
    return TokenVectors(projection=projection, chunks=chunks, titles=titles)


def _joined(parts: Sequence[tuple[CodeColumn, DeletedRows]]) -> TokenCodes:
    """Return the one column as it is where there is just one, whole."""
    column, deleted = parts[0]
    return JoinedCodes(parts) if len(parts) > 1 or len(deleted.rows) else column
