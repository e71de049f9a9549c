"""Batches on their way into a Lance table, checked: Lance silently accepts what would be found much later."""

# pyright: reportAttributeAccessIssue=false
# pyarrow makes its compute functions at import time, where no type checker sees them.

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.errors import CairnError, IntegrityError


class CheckedBatches:
    """Batches of a reader, checked for missing columns and vectors that are not finite.

    Either raises :class:`IntegrityError`. Lance hides what its source raises, so ``error`` keeps it.
    """

    def __init__(self, name: str, schema: pa.Schema, reader: pa.RecordBatchReader) -> None:
        self.error: CairnError | None = None
        self._name = name
        self._schema = schema
        self._reader = reader

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            if self._reader.schema.names != self._schema.names:
                raise IntegrityError(
                    f"rows of table `{self._name}` must have the columns {', '.join(self._schema.names)}, "
                    f"got {', '.join(self._reader.schema.names)}"
                )
            for batch in self._reader:
                vectors = batch.column("vector")
                if vectors.null_count or pc.any(pc.invert(pc.is_finite(vectors.flatten()))).as_py():
                    raise IntegrityError(
                        f"vectors of table `{self._name}` must be finite numbers, got a null, NaN or "
                        "infinity; "
                        "the encoder is at fault, nothing was published"
                    )
                yield pa.RecordBatch.from_arrays(batch.columns, schema=self._schema)
        except CairnError as error:
            self.error = error
            raise
