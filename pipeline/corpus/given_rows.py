"""What a caller of the Python library gives as documents, made one table.

Beside the files of stage 1: Arrow, pandas and polars keep their types; rows that are dictionaries get the
types of their values (``columns``). Everything is in memory at once. It does not check rows.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import reduce
from itertools import chain
from pathlib import PurePath
from typing import Any, Final, cast
from uuid import UUID

import numpy as np
import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import BIG_INTEGER, batch_of, is_list, joined, learned_field, types_of
from cairn.pipeline.corpus.formats.format import damage_of
from cairn.pipeline.errors import UsageError
from cairn.pipeline.options import shown
from cairn.pipeline.types import ArrowStream, Document

_PANDAS_INDEX: Final = re.compile(r"__index_level_\d+__")
"""How Arrow names a pandas index that has no name."""
_TIMES: Final = (np.datetime64, np.timedelta64)
_MISSING: Final = frozenset({"NaTType", "NAType"})


Row = Mapping[str, Any] | Document
GivenRows = ArrowStream | pa.RecordBatch | Row | Iterable[Row | pa.RecordBatch]
"""Documents as a table, as rows, or as batches of rows."""


def table_of(given: GivenRows, config: CorpusConfig) -> pa.Table:
    """Return documents as a table; ``config`` names the columns that a :class:`Document` goes into.

    Anything else raises :class:`UsageError`.
    """
    if isinstance(given, Mapping | Document):
        given = [given]
    if isinstance(given, pa.RecordBatch):
        return pa.Table.from_batches([given])
    if isinstance(given, ArrowStream):
        frame = cast("Any", given)
        try:
            table = _made(pa.table, given)
        except UsageError:  # of pandas, as objects of several kinds in a column
            if not (hasattr(frame, "iterrows") and frame.columns.is_unique):
                raise
            frame = frame if frame.index.name is None else frame.reset_index()
            return table_of(frame.to_dict("records"), config)
        return table.select([name for name in table.schema.names if not _PANDAS_INDEX.fullmatch(name)])
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise _refused(shown(given))
    rows = list(given)
    if rows and all(isinstance(row, pa.RecordBatch) for row in rows):
        return _made(pa.Table.from_batches, rows)
    return _table_of_rows([_fields(row, config) for row in rows], config)


def _made(make: Callable[[Any], pa.Table], given: object) -> pa.Table:
    try:
        return make(given)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise _refused(f"what Arrow does not take ({damage_of(error)})") from error


def _fields(row: object, config: CorpusConfig) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        if other := [name for name in cast("Mapping[object, Any]", row) if not isinstance(name, str)]:
            raise UsageError(f"the keys of a document must be texts, got {shown(other[0])}; convert it")
        return cast("Mapping[str, Any]", row)
    if not isinstance(row, Document):
        raise _refused(shown(row))
    title = {} if row.title is None else {config.title_column or "title": row.title}
    return {config.id_column: row.doc_id, **title, config.text_column: row.text, **row.metadata}


def _table_of_rows(rows: Sequence[Mapping[str, Any]], config: CorpusConfig) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    names = names or {config.id_column: None, config.text_column: None}
    columns = {name: _column(name, [_plain(row.get(name)) for row in rows]) for name in names}
    fields = [learned_field(name, column.type, met) for name, (column, met) in columns.items()]
    return pa.table([column for column, _ in columns.values()], schema=pa.schema(fields))


def _plain(value: Any) -> Any:
    """Return a value as Python has it; what pandas has for a missing one is None."""
    if (isinstance(value, float | Decimal) and math.isnan(value)) or type(value).__name__ in _MISSING:
        return None
    if isinstance(value, UUID | PurePath):
        return str(value)
    if isinstance(value, np.ndarray) and not value.ndim:
        return _plain(value[()])
    if isinstance(value, np.ndarray) and value.dtype.kind not in "mM":
        return value.tolist()
    if isinstance(value, np.ndarray) or (isinstance(value, list) and isinstance(_first(value), _TIMES)):
        return [_plain(each) for each in cast("Iterable[object]", value)]
    if isinstance(value, np.generic):
        item = value.item()  # of nanoseconds a bare number
        return value if isinstance(value, _TIMES) and isinstance(item, int) else _plain(item)
    return value


def _first(values: Sequence[object]) -> object:
    return next((each for each in values if each is not None), None)


def _column(name: str, values: Sequence[Any]) -> tuple[pa.Array, Sequence[pa.DataType]]:
    """Return values as a column, and their types where Arrow has none for all."""
    items = chain.from_iterable(value if isinstance(value, list | tuple) else (value,) for value in values)
    if len({*map(_kind, items)} - {None}) <= 1:  # of several, Arrow cuts times to dates, and the like
        with contextlib.suppress(pa.ArrowException, UnicodeEncodeError, OverflowError, TypeError):
            return pa.array(values), ()  # knows dates, decimals and numpy's numbers
    try:
        types = [found for value in values for found in types_of(value)]
        target = reduce(joined, types, pa.null())
        rows = [{name: value} for value in values]
        column, faults = batch_of(rows, {name: target}, ()).columns
        if faults.null_count < len(faults):  # as of a whole number that no double holds
            text = pa.list_(pa.string()) if is_list(target) else pa.string()
            column, faults = batch_of(rows, {name: text}, ()).columns
            types = [*types, BIG_INTEGER]
    except (pa.ArrowException, TypeError) as error:
        raise _unfit(name, damage_of(error)) from error
    if faults.null_count < len(faults):
        raise _unfit(name, "numbers that no type holds, or NaN beside texts")
    return column, types


def _kind(value: object) -> object:
    """Return what values have in common that Arrow may put into one column."""
    if isinstance(value, int | float | Decimal | np.number) and not isinstance(value, bool):
        return Decimal
    if isinstance(value, dt.datetime | np.datetime64):
        return dt.datetime, getattr(value, "tzinfo", None) is None
    return None if value is None else type(value)


def _unfit(name: str, got: str) -> UsageError:
    return UsageError(
        f"the values of {name!r} must be texts, numbers, booleans, or lists of one kind, got others: "
        f"{got}; convert them"
    )


def _refused(got: str) -> UsageError:
    return UsageError(
        "documents must be an Arrow table or batches of one schema, a pandas or polars frame, or "
        f"dictionaries, got {got}; give a list of dictionaries with an id and a text"
    )
