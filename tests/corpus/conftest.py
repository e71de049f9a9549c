"""Small Parquet corpora made in code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

WriteCorpus = Callable[..., Path]


@pytest.fixture
def write_corpus(tmp_path: Path) -> WriteCorpus:
    """Write columns to ``corpus/<name>`` below a fresh folder and return the file."""

    def write(name: str = "a.parquet", /, *, options: dict[str, Any] | None = None, **columns: Any) -> Path:
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path, **(options or {}))
        return path

    return write
