"""The interface of a source format, which ``cairn.pipeline.corpus.scan`` reads every file through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.decode import DECODE_ERRORS
from cairn.pipeline.corpus.source_record import Footer
from cairn.pipeline.corpus.sources import SourceFile

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Undecoded:
    """Rows that are in a file by its footer but not decoded.

    Such as a refused row group, or the rest of the file (``num_rows`` None).
    """

    num_rows: int | None
    detail: str


class SourceFormat(Protocol):
    """Reads files of one format.

    Damage raises one of ``decode.DECODE_ERRORS``, or is an :class:`Undecoded`.
    """

    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Return the columns and the number of rows; rows are not kept."""
        ...

    def decode(
        self, file: SourceFile, num_rows: int, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        """Yield the columns that ``types`` names, in batches of at most ``batch_rows`` rows.

        ``num_rows`` is the footer's. A type is what all files agreed on: a format whose files have no types
        of their own makes values of it, others may leave them as they are.
        """
        ...


def damage_reported(file: SourceFile, items: Iterator[_Item | Undecoded]) -> Iterator[_Item | Undecoded]:
    """End a stream that fails to decode with the damage.

    A fault of ours further on, or of a store, is not mistaken for one.
    """
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except DECODE_ERRORS as error:
            file.require_reachable(error)
            yield Undecoded(num_rows=None, detail=damage_of(error))
            return
        yield item


def damage_of(error: BaseException) -> str:
    """Say in a phrase what an error of reading says of a file."""
    if isinstance(error, FileNotFoundError):
        return "it is gone"
    if isinstance(error, PermissionError):
        return "permission denied"
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def check_names(schema: pa.Schema) -> None:
    """Read every name and time zone once.

    A damaged one is not valid UTF-8 and raises here instead of half-way.
    """
    for field in schema:
        arrow_type = field.type
        while hasattr(arrow_type, "value_type"):
            arrow_type = arrow_type.value_type
        _ = field.name, arrow_type.tz if pa.types.is_timestamp(arrow_type) else None
