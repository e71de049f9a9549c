"""Which documents a checked filter matches, by position.

LanceDB's expressions know neither lists nor nulls. A column that is asked about those is read, and tested in
Arrow; such tests and expressions are combined as sets of positions.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
from cairn.pipeline.errors import CairnError, StorageError, TryAgainError, is_panic
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.layout import CollectionLayout
from jaxtyping import Bool, Int64

if TYPE_CHECKING:
    from lancedb.expr import Expr

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers


@contextlib.contextmanager
def table_errors(action: str, layout: CollectionLayout | None = None) -> Generator[None]:
    """Report what Lance raises while a search reads tables in one sentence, without its text.

    That may hold paths and values. ``action`` reads like "reading the answer's documents".
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, CairnError) or not (
            isinstance(error, RuntimeError | OSError | ValueError) or is_panic(error)
        ):
            raise
        if "timeout" in str(error).lower():
            raise TryAgainError(f"{action} did not finish in time; try again, or ask for less") from error
        advice = f"; run `{layout.command('verify')}`" if layout else ""
        raise StorageError(f"{action} failed{advice}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class IsNull:
    """A column has no value; ``is_negated`` asks for those that have one."""

    column: str
    is_negated: bool

    def matches(self, column_N: pa.Array) -> Bool[np.ndarray, " N"]:
        """Tell of each row whether it matches."""
        return np.asarray(column_N.is_valid() if self.is_negated else column_N.is_null())


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldsAny:
    """A list holds at least one of ``values``, or none of them. A null matches neither."""

    column: str
    values: pa.Array
    is_negated: bool

    def matches(self, column_N: pa.ListArray) -> Bool[np.ndarray, " N"]:
        """Tell of each row whether it matches."""
        is_one = pc.is_in(column_N.flatten().cast(self.values.type), value_set=self.values)
        holds_N = np.zeros(len(column_N), np.bool_)
        holds_N[np.asarray(pc.list_parent_indices(column_N))[np.asarray(is_one)]] = True
        return np.asarray(column_N.is_valid()) & (~holds_N if self.is_negated else holds_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class Combined:
    """Conditions of which all or any must match."""

    kind: Literal["and", "or"]
    parts: Sequence[Condition]


Condition: TypeAlias = "Expr | IsNull | HoldsAny | Combined"


def combined(kind: Literal["and", "or"], parts: Sequence[Condition]) -> Condition:
    """Return one condition of several; expressions become one, which Lance answers at once."""
    tests = [part for part in parts if isinstance(part, IsNull | HoldsAny | Combined)]
    expressions = [part for part in parts if not isinstance(part, IsNull | HoldsAny | Combined)]
    if expressions:
        joined = reduce(lambda one, other: one & other if kind == "and" else one | other, expressions)
        if not tests:
            return joined
        return Combined(kind=kind, parts=[joined, *tests])
    return tests[0] if len(tests) == 1 else Combined(kind=kind, parts=tests)


def allowed_documents(
    generation: Generation, condition: Condition, timeout: dt.timedelta | None
) -> Int64[np.ndarray, " A"]:
    """Return the positions of all documents that a condition matches, ascending."""
    if not generation.num_documents:
        return np.empty(0, dtype=np.int64)
    if isinstance(condition, Combined):
        found = [allowed_documents(generation, part, timeout) for part in condition.parts]
        return reduce(np.intersect1d if condition.kind == "and" else np.union1d, found)
    with table_errors("reading the filter's documents", generation.layout):
        search = generation.document_table.search()
        is_test = isinstance(condition, IsNull | HoldsAny)
        rows = (
            (search if is_test else search.where(condition))
            .with_row_id(True)
            .select(["_rowid", condition.column] if is_test else ["_rowid"])
            .limit(generation.num_documents)
            .to_arrow(timeout=timeout)
        )
    row_ids = rows.column("_rowid").to_numpy()
    if is_test:
        row_ids = row_ids[condition.matches(rows.column(condition.column).combine_chunks())]
    return np.sort(generation.position_of_row_ids(row_ids))
