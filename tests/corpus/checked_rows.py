"""A corpus read whole: its staged and its rejected rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.scan import Scan, read_checked, scan_sources

CONFIG = CorpusConfig()


class Checked(NamedTuple):
    """What a corpus gave: staged and rejected rows, and the doubt or the guess of each batch that has one."""

    scan: Scan
    rows: list[dict[str, Any]]
    rejected: list[dict[str, Any]]
    doubts: list[str]
    encodings: list[str | None]


def checked(
    *sources: Any, config: CorpusConfig = CONFIG, stored: Sequence[pa.Field] | None = None
) -> Checked:
    """Read a corpus whole."""
    named = [str(source) if isinstance(source, Path) else source for source in sources]
    found = Checked(scan_sources(named, config, None, stored), [], [], [], [])
    for batch in read_checked(found.scan, config):
        batch.rows.validate(full=True)
        batch.rejected.validate(full=True)
        found.rows.extend(batch.rows.to_pylist())
        found.rejected.extend(batch.rejected.to_pylist())
        found.doubts.extend([batch.doubt] if batch.doubt else [])
        found.encodings.append(batch.encoding)
    return found


def read(
    *sources: Path | str, config: CorpusConfig = CONFIG
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return all staged and all rejected rows."""
    found = checked(*sources, config=config)
    return found.rows, found.rejected


def reasons(rejected: Iterable[dict[str, Any]]) -> list[tuple[int | None, str]]:
    return [(row["row_index"], row["reason"]) for row in rejected]
