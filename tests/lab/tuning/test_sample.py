from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline.lab.tuning.sample import draw_sample

LONG = "the cat sat on the mat number {}. " + "old stones mark a way. " * 12


def collection(texts: Sequence[str]) -> SimpleNamespace:
    """Return what a sample reads of a generation."""
    rows = pa.table(
        {"doc_id": [f"d{n}" for n in range(len(texts))], "title": [None] * len(texts), "text": texts}
    )

    def fetch_documents(positions: np.ndarray, columns: Sequence[str]) -> pa.Table:
        return rows.take(pa.array(positions)).select(list(columns))

    return SimpleNamespace(
        num_documents=len(texts),
        fetch_documents=fetch_documents,
    )


def test_known_items_are_cut_out_of_drawn_documents():
    sample = draw_sample(
        collection([LONG.format(n) for n in range(60)]),
        None,
        name="walks",
        max_documents=40,
        max_queries=30,
        seed=0,
    )

    assert (len(sample.doc_ids), len(sample.query_ids)) == (40, 30)
    for query, document in zip(sample.queries, sample.judgements.document_J.tolist(), strict=True):
        assert query not in sample.texts[document]


def test_judged_documents_are_always_among_the_drawn(tmp_path):
    wanted = [f"d{n}" for n in range(30)]
    pq.write_table(
        pa.table({"id": [f"q{n}" for n in range(30)], "text": ["a cat"] * 30}), tmp_path / "queries.parquet"
    )
    pq.write_table(
        pa.table({"query_id": [f"q{n}" for n in range(30)], "doc_id": wanted, "score": [1] * 30}),
        tmp_path / "qrels.parquet",
    )
    sample = draw_sample(
        collection([LONG.format(n) for n in range(60)]),
        tmp_path,
        name="walks",
        max_documents=35,
        max_queries=30,
        seed=1,
    )

    assert len(sample.doc_ids) == 35
    assert set(wanted) <= set(sample.doc_ids)
