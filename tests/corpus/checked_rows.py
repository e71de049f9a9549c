"""A corpus read whole: its staged and its rejected rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.scan import read_checked, scan_sources

CONFIG = CorpusConfig()


def read(
    *sources: Path | str, config: CorpusConfig = CONFIG
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return all staged and all rejected rows."""
    rows, rejected = list[dict[str, Any]](), list[dict[str, Any]]()
    for batch in read_checked(scan_sources([str(source) for source in sources], config), config):
        batch.rows.validate(full=True)
        batch.rejected.validate(full=True)
        rows += batch.rows.to_pylist()
        rejected += batch.rejected.to_pylist()
    return rows, rejected


def raw_strings(*values: bytes | None) -> pa.Array:
    return pa.array(values, pa.binary()).view(pa.string())


def reasons(rejected: Iterable[dict[str, Any]]) -> list[tuple[int | None, str]]:
    return [(row["row_index"], row["reason"]) for row in rejected]
