"""What a caller of the Python library gives as documents, made one source.

Beside the files of stage 1: Arrow, pandas and polars keep their types; rows that are dictionaries, and frames
of pandas with objects that are not all texts or all arrays, are read as lines of JSON are (``formats.rows``).
Everything is in memory at once. It does not check rows.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from decimal import Decimal
from typing import Any, Final, TypeVar, cast
from uuid import UUID

import numpy as np
import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import learned_column
from cairn.pipeline.corpus.formats.format import damage_of, is_utf8
from cairn.pipeline.corpus.sources import TableSource
from cairn.pipeline.errors import UsageError
from cairn.pipeline.options import shown
from cairn.pipeline.types import ArrowStream, Document, read_frame

_PANDAS_INDEX: Final = re.compile(r"__index_level_\d+__")
"""How Arrow names a pandas index that has no name."""
_TIMES: Final = (np.datetime64, np.timedelta64)
_MISSING: Final = frozenset({"NaTType", "NAType"})
_PLAIN: Final = {str, int, bool, type(None)}
_ELEMENTS: Final = _PLAIN | {float}


_Made = TypeVar("_Made")
Row = Mapping[str, Any] | Document
GivenRows = ArrowStream | pa.RecordBatch | Row | Iterable[Row | pa.RecordBatch]
"""Documents as a table, as rows, or as batches of rows."""


def source_of(given: GivenRows, config: CorpusConfig) -> TableSource:
    """Return documents as a source; ``config`` names the columns that a :class:`Document` goes into.

    Anything else raises :class:`UsageError`.
    """
    if isinstance(given, Mapping | Document):
        given = [given]
    if isinstance(given, pa.RecordBatch):
        return TableSource(table=pa.Table.from_batches([given]))
    if isinstance(given, ArrowStream):
        made = _made(_of_polars if hasattr(given, "to_dicts") else read_frame, given)
        return _source_of_rows(made, config) if isinstance(made, list) else _source_of_table(made)
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise _refused(shown(given))
    rows = list(given)
    if rows and all(isinstance(row, pa.RecordBatch) for row in rows):
        return TableSource(table=_made(pa.Table.from_batches, rows))
    return _source_of_rows(rows, config)


def _source_of_table(table: pa.Table) -> TableSource:
    names = [name for name in table.schema.names if not _PANDAS_INDEX.fullmatch(name)]
    return TableSource(table=table.select(names))


def _of_polars(frame: Any) -> pa.Table:
    """Make a table of a frame of polars; of integers of 128 bits, which Arrow does not have, as of rows."""
    columns, fields = list[Any](), list[pa.Field]()
    for series in frame:
        if "Int128" in repr(series.dtype):
            field, column, _ = learned_column(series.name, series.to_list())
        else:
            column = pa.chunked_array(series)
            field = pa.field(series.name, column.type)
        columns.append(column)
        fields.append(field)
    return pa.table(columns, pa.schema(fields))


def _source_of_rows(rows: Iterable[object], config: CorpusConfig) -> TableSource:
    made = [{name: _plain(value) for name, value in _fields(row, config).items()} for row in rows]
    if not any(made):  # of which each is a row without an id
        made = [{config.id_column: None, config.text_column: None} for _ in made]
    return TableSource(table=made)


def _made(make: Callable[[Any], _Made], given: object) -> _Made:
    try:
        return make(given)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise _refused(f"what Arrow does not take ({damage_of(error)})") from error


def _fields(row: object, config: CorpusConfig) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        if other := [name for name in cast("Mapping[object, Any]", row) if not isinstance(name, str)]:
            raise UsageError(f"the keys of a document must be texts, got {shown(other[0])}; convert it")
        if not is_utf8("".join(cast("Mapping[str, Any]", row))):
            raise UsageError("the keys of a document must be valid Unicode, got half a character; convert it")
        return cast("Mapping[str, Any]", row)
    if not isinstance(row, Document):
        raise _refused(shown(row))
    title = {} if row.title is None else {config.title_column or "title": row.title}
    return {config.id_column: row.doc_id, **title, config.text_column: row.text, **row.metadata}


def _plain(value: Any) -> Any:
    """Return a value as Python has it; what pandas has for a missing one is None."""
    if type(value) in _PLAIN:
        return value
    if (isinstance(value, float | Decimal) and math.isnan(value)) or type(value).__name__ in _MISSING:
        return None
    return _element(value)


def _element(value: Any) -> Any:
    """Return a value as Python has it, also one in a list, where NaN is none that is missing."""
    if isinstance(value, list | tuple | set | frozenset):
        items = cast("Collection[object]", value)
        items = sorted(items, key=repr) if isinstance(items, set | frozenset) else items
        return items if set(map(type, items)) <= _ELEMENTS else [_element(each) for each in items]
    if isinstance(value, np.ndarray):
        return _element(
            value.tolist() if value.dtype.kind not in "mM" else [*value] if value.ndim else value[()]
        )
    if isinstance(value, np.generic):
        item = value.item()  # of nanoseconds a bare number
        is_fine = isinstance(value, _TIMES) and isinstance(item, int)
        return item if not is_fine else None if np.isnat(value) else value
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    if isinstance(value, Decimal) and not value.is_finite():
        return float(value)
    return None if type(value).__name__ in _MISSING else value


def _refused(got: str) -> UsageError:
    return UsageError(
        "documents must be an Arrow table or batches of one schema, a pandas or polars frame, or "
        f"dictionaries, got {got}; give a list of dictionaries with an id and a text"
    )
