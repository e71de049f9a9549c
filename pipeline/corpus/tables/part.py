"""A data file of one version of a table, whichever library reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa


class TablePart(Protocol):
    """Rows of a table that stay as they are: changed rows of a later version are in other parts.

    ``name`` is its path below the table. ``identity`` differs from that of the same path with other rows.
    ``schema`` is that of the table, so files from before a column was added have it, too. Damage raises what
    the library does.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def identity(self) -> str: ...  # noqa: D102

    @property
    def schema(self) -> pa.Schema: ...  # noqa: D102

    def count_rows(self) -> int:
        """Count the rows that are not deleted."""
        ...

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield these columns of the rows; the caller cuts batches that are too large."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NoRows:
    """The one part of a version without rows."""

    schema: pa.Schema
    name: str = ""
    identity: str = ""

    def count_rows(self) -> int:
        """Return 0."""
        return 0

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Yield nothing."""
        return iter(())
