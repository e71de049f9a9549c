"""The documents of a file that was sent, as an ingest would read them from its folder.

A file of a kind that is a document gives one, a table gives one a row. What cannot be read is named: pages
and rows beside the others, or the whole file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats import READABLE
from cairn.pipeline.corpus.quarantine import place_in_file
from cairn.pipeline.corpus.scan import read_checked, scan_sources
from cairn.pipeline.corpus.schema import ColumnError
from cairn.pipeline.corpus.sources import format_of
from cairn.pipeline.corpus.staging import SAME_ID, guess_told
from cairn.pipeline.errors import SourceError, UsageError
from cairn.pipeline.line.written_rows import HIDDEN_ID, HIDDEN_IDS
from cairn.pipeline.types import staged_schema

MAX_ROW_BYTES: Final = 512 << 20
"""Of all documents of a file in memory."""


class UnreadKindError(SourceError):
    """Files of this kind are not read, or not on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRows:
    """Documents, and what of their file was refused; a file that ``is_document`` gives no id of its own.

    ``rows`` are as an ingest stages them.
    """

    rows: pa.Table
    is_document: bool
    refused: Sequence[str]
    warnings: Sequence[str]


def rows_of_file(path: Path, corpus: CorpusConfig, fields: Sequence[pa.Field[Any]]) -> FileRows:
    """Read a file beside the metadata columns that there are; its name tells its kind.

    Raises :class:`SourceError` where nothing of it can be read; no sentence has its folder.
    """
    found = format_of(path.name)
    if found is None:  # and not looked at: the metadata of a table would name files of this machine
        suffix = path.suffix or "no suffix"
        raise UnreadKindError(f"a file must be of a kind that is read ({READABLE}), got {suffix}; convert it")
    if missing := found.missing():
        raise UnreadKindError(f"{path.suffix} needs another package on the server; {missing}")
    try:
        scan = scan_sources([str(path)], corpus, None, fields)
    except UsageError as error:
        told = error.in_file if isinstance(error, ColumnError) else str(error)
        raise SourceError(_without_folder(told, path)) from error
    batches: list[pa.RecordBatch] = []
    refused: list[str] = []
    doc_ids, encodings = set[str](), set[str]()
    num_bytes = 0
    for batch in read_checked(scan, corpus):
        num_bytes += batch.rows.nbytes
        if num_bytes > MAX_ROW_BYTES:
            raise SourceError(f"a file must have at most {MAX_ROW_BYTES >> 20} MiB of rows, got more; cut it")
        rejected = batch.rejected.to_pylist()
        told = [(row["row_index"] or 0, ": ".join([*place_in_file(row), row["detail"]])) for row in rejected]
        are_kept: list[bool] = []
        for place, doc_id in enumerate(batch.rows.column("doc_id").to_pylist()):
            fault = SAME_ID if doc_id in doc_ids else HIDDEN_ID if doc_id in HIDDEN_IDS else None
            if fault is not None:
                row_index = int(batch.row_indices()[place])
                told.append((row_index, f"row {row_index:,}: {fault}"))
            are_kept.append(fault is None)
            doc_ids.add(doc_id)
        batches.append(batch.rows.filter(pa.array(are_kept, pa.bool_())))
        refused += [sentence for _, sentence in sorted(told)]
        encodings |= {batch.encoding} if batch.encoding else set()
    rows = pa.Table.from_batches(batches, staged_schema(scan.metadata_fields))
    if not rows.num_rows:
        told = refused[0] if refused else "it has no rows"
        raise SourceError(f"{path.name} must hold a document, got none: {_without_folder(told, path)}")
    return FileRows(
        rows=rows,
        is_document=found.is_document,
        refused=[_without_folder(each, path) for each in refused],
        warnings=[
            *(_without_folder(each, path) for each in scan.warnings),
            *(guess_told(each, [path.name]) for each in encodings),
        ],
    )


def _without_folder(sentence: str, path: Path) -> str:
    return sentence.replace(f"{path.parent}/", "")
