"""Texts to calibrate by."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture(scope="session")
def texts_path(tmp_path_factory):
    """Return a Parquet file of twelve short texts."""
    words = ["the", "old", "cat", "sat", "on", "a", "mat", "by", "river", "stone", "and", "path"]
    texts = [" ".join(words[start:] + words[:start]) for start in range(12)]
    path = tmp_path_factory.mktemp("texts") / "texts.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    return path
