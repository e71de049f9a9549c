from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.cluster.sampling import hash_keys, hash_order, sample_rows
from cairn.pipeline.errors import SourceError


def rows(num_rows: int = 200) -> pa.Table:
    return pa.table(
        {
            "doc_id": [f"doc-{row}" for row in range(num_rows)],
            "text": pa.array([f"text of {row} " * 10 for row in range(num_rows)], pa.large_string()),
            "title": pa.array([None] * num_rows, pa.string()),
        }
    )


def test_hash_keys_are_uniform_over_their_range() -> None:
    shares = hash_keys([str(row) for row in range(4_000)], seed=0)[:, 0] / 2.0**64
    assert np.abs(np.quantile(shares, [0.25, 0.5, 0.75]) - [0.25, 0.5, 0.75]).max() < 0.04


def test_sample_rows_holds_the_smallest_keys_of_the_stream() -> None:
    table = rows()
    ids = table.column("doc_id").to_pylist()
    sample = sample_rows(table.to_batches(max_chunksize=7), 30, seed=1)
    assert sample.column("doc_id").to_pylist() == [ids[row] for row in hash_order(ids, seed=1)[:30]]
    backwards = table.take(pa.array(np.arange(200)[::-1].copy()))
    assert sample.equals(sample_rows([backwards], 30, seed=1)), "whatever the order and the batches"
    with pytest.raises(SourceError, match="at least one table"):
        sample_rows([], 30, seed=1)


def test_sample_rows_cuts_texts_and_nothing_else() -> None:
    long = rows(5)
    long = long.set_column(1, long.schema.field(1), pa.array(["text" * 1_000] * 5, pa.large_string()))
    sample = sample_rows([long], 30, seed=1)
    assert set(sample.column("text").to_pylist()) == {"text" * 512}
    assert sample.schema.equals(long.schema)
