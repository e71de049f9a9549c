"""Read a corpus: footers and schemas first, then checked rows as a bounded stream.

Stage 1, source side. :func:`scan_sources` touches footers only and refuses a wrong corpus before any work;
:func:`read_checked` yields every row once, staged or rejected. A file that cannot be opened is quarantined as
a file and counts as one row; what turns out damaged quarantines its rows, by the footer's count. Formats are
``cairn.pipeline.corpus.formats``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.checks import CheckedBatch, RowChecker
from cairn.pipeline.corpus.file_identity import file_identities
from cairn.pipeline.corpus.formats.format import DECODE_ERRORS, SourceFile, damage_of, damage_reported
from cairn.pipeline.corpus.quarantine import Reason, rejected_rows
from cairn.pipeline.corpus.schema import CorpusSchema, agree_on_schema, is_read
from cairn.pipeline.corpus.source_record import Footer, recorded_footers
from cairn.pipeline.corpus.sources import Source, resolve_sources
from cairn.pipeline.errors import SourceError, TryAgainError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.types import staged_schema

REJECTED_BATCH_ROWS = 65_536
SHOWN_SUFFIXES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """A corpus whose footers have been read.

    ``num_rows`` is the total of the readable files' footers; ``damaged_files`` come on top, one quarantined
    row each. ``identities`` are those of :mod:`cairn.pipeline.corpus.file_identity`, taken before the
    footers. ``unread`` counts files of other kinds by suffix. ``faults`` say what of some files cannot be
    read while their rows can; these files are read each time.
    """

    files: tuple[SourceFile, ...]
    file_rows: tuple[int, ...]
    schemas: tuple[pa.Schema, ...]
    identities: tuple[str | None, ...]
    schema: CorpusSchema
    damaged_files: tuple[tuple[SourceFile, str], ...]
    unread: Mapping[str, int]
    faults: tuple[tuple[SourceFile, str], ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of all readable files, by their footers."""
        return sum(self.file_rows)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Name what was read as the user named it: the folder or the glob, not each of its files."""
        return tuple(dict.fromkeys(file.source for file in self.files))

    @property
    def metadata_fields(self) -> tuple[pa.Field, ...]:
        """Metadata columns as they are stored, in order."""
        return self.schema.metadata_fields

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was left out or overridden, one sentence each."""
        return (*_fault_warnings(self.faults), *self.schema.warnings, *_unread_warnings(self.unread))

    @property
    def schema_fingerprint(self) -> str:
        """Identify the stored columns: two scans that agree here may go into the same collection."""
        return fingerprint(metadata=[[field.name, str(field.type)] for field in self.metadata_fields])


def _unread_warnings(unread: Mapping[str, int]) -> Iterator[str]:
    if unread:
        counts = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(unread.items())[:SHOWN_SUFFIXES])
        yield (
            f"files of other kinds were not read: {counts}; a folder is read as the first that it holds of "
            "Parquet, Arrow, JSON lines, CSV, and text with HTML: name others by a glob"
        )


def _fault_warnings(faults: Sequence[tuple[SourceFile, str]]) -> Iterator[str]:
    if faults:
        (file, fault), *others = faults
        also = f" and of {len(others):,} more files" if others else ""
        yield (
            f"the front matter of {file.name}{also} is not YAML and was left in the text: {fault}; "
            "put a value with a colon into quotes"
        )


def scan_sources(
    sources: Sequence[Source],
    config: CorpusConfig,
    record: Path | None = None,
    stored: Sequence[pa.Field] | None = None,
) -> Scan:
    """Read every footer and agree on one schema; no row is decoded.

    The footers of files that are as they were when they were recorded come from the ``record``. ``stored``
    are the metadata columns of the collection, None where nothing is published. Raises
    :class:`SourceError` when there is nothing to read and :class:`SchemaError` when the columns are not what
    the settings say.
    """
    unread = Counter[str]()
    found = resolve_sources(sources, unread)
    damaged = [(file, file.fault) for file in found if file.fault is not None]
    files = [file for file in found if file.fault is None]
    identities = dict(zip((file.address for file in files), file_identities(files), strict=True))
    recorded = {} if record is None else recorded_footers(record, identities)
    footers: list[tuple[SourceFile, Footer]] = []
    for file in files:
        try:
            footer = recorded.get(file.address) or file.format.read_footer(file, config)
            footers.append((file, footer))
        except DECODE_ERRORS as error:
            file.require_reachable(error)
            damaged.append((file, damage_of(error)))
    if not footers:
        others = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        raise SourceError(
            f"{damaged[0][0].name}{others} is not a file that can be read: {damaged[0][1]}; "
            "check the path or write the file again"
        )
    if not any(footer.num_rows for _, footer in footers):
        raise SourceError(
            f"a corpus must have at least one row, got none in {footers[0][0].name}"
            + (f" and {len(footers) - 1} more" if len(footers) > 1 else "")
        )
    # A file of JSON lines without a line has no columns.
    schemas = [(file, footer.schema) for file, footer in footers if footer.schema.names]
    if not schemas:
        named = next(file.name for file, footer in footers if footer.num_rows)
        raise SourceError(
            f"a corpus must have columns, got none in any row of {named}; "
            f"each row must have {config.id_column!r} and {config.text_column!r}"
        )
    schema = agree_on_schema(schemas, config, stored)
    faults = tuple((file, footer.fault) for file, footer in footers if footer.fault is not None)
    identities.update({file.address: None for file, _ in faults})
    return Scan(
        files=tuple(file for file, _ in footers),
        file_rows=tuple(footer.num_rows for _, footer in footers),
        schemas=tuple(footer.schema for _, footer in footers),
        identities=tuple(identities[file.address] for file, _ in footers),
        schema=schema,
        damaged_files=tuple(damaged),
        unread=unread,
        faults=faults,
    )


def read_checked(
    scan: Scan, config: CorpusConfig, passed_over: Collection[int] = ()
) -> Iterator[CheckedBatch]:
    """Yield every row of the corpus once, in file order, then row order.

    Batches have at most ``batch_rows`` rows and about ``batch_bytes`` bytes. Files whose places are
    ``passed_over`` are left out.
    """
    yield from read_damaged_files(scan)
    for place in range(len(scan.files)):
        if place not in passed_over:
            yield from read_file(scan, place, config)


def read_damaged_files(scan: Scan) -> Iterator[CheckedBatch]:
    """Yield one rejected row for each file that cannot be read."""
    for file, reason in scan.damaged_files:
        yield _rejected(scan, file, [None], Reason.DAMAGED_FILE, reason)


def read_file(scan: Scan, place: int, config: CorpusConfig) -> Iterator[CheckedBatch]:
    """Yield every row of the file at a place of ``scan.files``, as :func:`read_checked` does.

    Raises :class:`TryAgainError` where the file does not have as many rows as it had when they were counted:
    a row that is not delivered would count as deleted.
    """
    file, num_rows = scan.files[place], scan.file_rows[place]
    checker = _checker(scan, place, config)
    done, is_cut = 0, False
    types = {column: checker.stored_types[stored] for stored, column in checker.sources.items()}
    for item in damage_reported(file, file.format.read(file, types, config)):
        if isinstance(item, pa.RecordBatch):
            for batch in checker.check(item, done):
                yield batch
                done += batch.num_rows
        else:
            is_cut = is_cut or item.num_rows is None
            # Where the file ends damaged behind its last row, it is one row more: it was not read whole.
            stop = max(num_rows, done + 1) if item.num_rows is None else done + item.num_rows
            yield from _damaged_rows(scan, file, done, stop, item.detail)
            done = stop
    if done != num_rows and not is_cut:
        raise TryAgainError(
            f"{file.name} must not change while it is read, got {done} rows where {num_rows} were counted; "
            "run the command again"
        )


def _checker(scan: Scan, place: int, config: CorpusConfig) -> RowChecker:
    file = scan.files[place]
    values = dict(file.partitions)
    from_files: dict[str, str] = {}
    constants: dict[str, pa.Scalar] = {}
    for field in scan.metadata_fields:
        if field.name not in scan.schema.partition_keys:
            if is_read(file, scan.schemas[place], field):
                from_files[field.name] = field.name
            else:
                constants[field.name] = pa.scalar(None, field.type)
        else:
            value = values[field.name]
            constants[field.name] = pa.scalar(
                None if value is None else (int(value) if pa.types.is_integer(field.type) else value),
                field.type,
            )
    return RowChecker(
        source_file=file.name,
        sources={**scan.schema.roles, **from_files},
        constants=constants,
        metadata_fields=scan.metadata_fields,
        config=config,
    )


def _damaged_rows(scan: Scan, file: SourceFile, start: int, stop: int, detail: str) -> Iterator[CheckedBatch]:
    for first in range(start, stop, REJECTED_BATCH_ROWS):
        yield _rejected(
            scan,
            file,
            np.arange(first, min(first + REJECTED_BATCH_ROWS, stop)),
            Reason.DAMAGED_ROWS,
            detail,
        )


def _rejected(
    scan: Scan, file: SourceFile, indices: Sequence[None] | np.ndarray, reason: str, detail: str
) -> CheckedBatch:
    rejected = rejected_rows(file.name, indices, reason, detail)
    no_rows = pa.RecordBatch.from_pylist([], schema=staged_schema(scan.metadata_fields))
    return CheckedBatch(rows=no_rows, rejected=rejected, num_rows=len(indices))
