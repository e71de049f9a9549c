"""Rows of Python values, whether a line of JSON held each or a caller gave them: one reading of both.

Every row is read once for the columns and their types, as ``columns`` has them, and again for its values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import Learned, batch_of, role_names
from cairn.pipeline.corpus.formats.format import (
    Footer,
    Format,
    SourceFile,
    Undecoded,
    batched,
    learned_footer,
)
from typing_extensions import override

Row = Mapping[str, Any] | str
"""A row, or what is wrong with it."""


class RowsFormat(Format):
    """Reads rows whose values have the types of their columns."""

    is_typed = False

    @abstractmethod
    def rows(self, file: SourceFile, config: CorpusConfig) -> Iterator[tuple[Row, int]]:
        """Yield each row and about how many bytes it takes."""

    @override
    def read_footer(self, file: SourceFile, config: CorpusConfig) -> Footer:
        """Read every row once for the columns and their types."""
        learned = Learned()

        def counts() -> Iterator[int]:
            fault, has_rows = "", False
            for row, _ in self.rows(file, config):
                if isinstance(row, str):
                    fault = fault or row
                else:
                    has_rows = True
                    for name, value in row.items():
                        learned.add_value(name, value)
                yield 1
            if fault and not has_rows:
                raise ValueError(fault)

        return learned_footer(file, learned, counts())

    @override
    def read(
        self, file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
    ) -> Iterator[pa.RecordBatch | Undecoded]:
        """Yield the rows, the damaged ones among them."""
        rows = (
            (row if isinstance(row, str) else {name: row[name] for name in types if name in row}, num_bytes)
            for row, num_bytes in self.rows(file, config)
        )
        yield from batched(file, rows, lambda some: batch_of(some, types, role_names(config)), config)


class GivenRowsFormat(RowsFormat):
    """Reads the rows that a caller gave."""

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        self._given = given

    @override
    def rows(self, file: SourceFile, config: CorpusConfig) -> Iterator[tuple[Row, int]]:
        for row in self._given:
            yield row, sum(len(value) for value in row.values() if isinstance(value, str))
