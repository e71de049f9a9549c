"""What formats without types of their own share: one pass that learns columns and counts rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import pyarrow as pa
from cairn.pipeline.corpus.decode import DECODE_ERRORS
from cairn.pipeline.corpus.formats.format import Undecoded
from cairn.pipeline.corpus.formats.values import joined
from cairn.pipeline.corpus.source_record import Footer
from cairn.pipeline.corpus.sources import SourceFile

MAX_COLUMNS: Final = 10_000


def footer_of(file: SourceFile, parts: Iterable[Mapping[str, pa.DataType] | int | Undecoded]) -> Footer:
    """Return the footer of what a pass yields: types of columns, numbers of rows, and what is damaged.

    A pass that fails has met the beginning of the file, and the rest counts as one row, which reading it
    quarantines. Where nothing was met, the error is raised: the file is damaged. So is one with more than
    ``MAX_COLUMNS`` columns, whose names and types would all be kept in memory: :class:`ValueError`.
    """
    types: dict[str, pa.DataType] = {}
    num_rows = 0
    try:
        for part in parts:
            if isinstance(part, int):
                num_rows += part
            elif isinstance(part, Undecoded):
                num_rows += part.num_rows or 1
            else:
                for name, arrow_type in part.items():
                    types[name] = joined(types.get(name, pa.null()), arrow_type)
            if len(types) > MAX_COLUMNS:
                break
    except DECODE_ERRORS as error:
        file.require_reachable(error)
        if not types:
            raise
        num_rows += 1
    if len(types) > MAX_COLUMNS:
        raise ValueError(f"a file must have at most {MAX_COLUMNS} columns, got more")
    return Footer(schema=pa.schema([*types.items()]), num_rows=num_rows)
