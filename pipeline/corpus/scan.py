"""Read a corpus: footers and schemas first, then checked rows as a bounded stream.

Stage 1, source side. :func:`scan_sources` touches footers only and refuses a wrong corpus before any work;
:func:`read_checked` yields every row once, staged or rejected. A file that cannot be opened is quarantined as
a file and counts as one row; what turns out damaged quarantines its rows, by the footer's count. Formats are
``cairn.pipeline.corpus.formats``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.checks import CheckedBatch, RowChecker
from cairn.pipeline.corpus.columns import fitted
from cairn.pipeline.corpus.file_identity import file_identities
from cairn.pipeline.corpus.formats.format import (
    DECODE_ERRORS,
    ENCODING,
    Footer,
    SourceFile,
    Undecoded,
    damage_reported,
)
from cairn.pipeline.corpus.given_vectors import first_width, read_type
from cairn.pipeline.corpus.quarantine import Reason, rejected_rows
from cairn.pipeline.corpus.schema import CorpusSchema, agree_on_schema, stored_name
from cairn.pipeline.corpus.source_record import recorded_footers
from cairn.pipeline.corpus.sources import LeftOut, Source, resolve_sources
from cairn.pipeline.counted import counted
from cairn.pipeline.errors import SourceError, TryAgainError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.types import GIVEN_VECTORS, staged_schema
from cairn.pipeline.version import installed_version

REJECTED_BATCH_ROWS = 65_536
SHOWN_FAULTS: Final = 20
"""Files whose front matter cannot be read that a warning names."""


class ScannedFile(NamedTuple):
    """A file whose footer was read; ``columns`` has the source column of each stored one.

    ``identity`` is that of :mod:`cairn.pipeline.corpus.file_identity`, taken before the footer. A file whose
    footer has a fault has none, so it is read each time.
    """

    file: SourceFile
    footer: Footer
    columns: Mapping[str, str]
    identity: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """A corpus whose footers have been read.

    ``num_rows`` is the total of the readable files' footers; ``damaged_files`` come on top, one quarantined
    row each. ``vector_dim`` is the width of the vectors that rows bring.
    """

    files: tuple[ScannedFile, ...]
    schema: CorpusSchema
    damaged_files: tuple[tuple[SourceFile, str], ...]
    left_out: LeftOut
    vector_dim: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of all readable files, by their footers."""
        return sum(each.footer.num_rows for each in self.files)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Name what was read as the user named it: the folder or the glob, not each of its files."""
        return tuple(dict.fromkeys(each.file.source for each in self.files))

    @property
    def metadata_fields(self) -> tuple[pa.Field, ...]:
        """Metadata columns as they are stored, in order."""
        return self.schema.metadata_fields

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was left out or overridden, one sentence each."""
        return (*_fault_warnings(self.files), *self.schema.warnings, *self.left_out.warnings())

    @property
    def schema_fingerprint(self) -> str:
        """Identify the stored columns: two scans that agree here may go into the same collection."""
        return fingerprint(metadata=[[field.name, str(field.type)] for field in self.metadata_fields])

    def keys(self, config: CorpusConfig) -> list[str]:
        """Name all that the rows of each file are read by."""
        common = fingerprint(
            release=installed_version(), settings=asdict(config), metadata=self.schema_fingerprint
        )
        return [
            fingerprint(
                common=common,
                columns=each.columns,
                folders=each.file.partitions,
                doc_id=each.file.doc_id(config) if each.file.format.is_document else None,
            )
            for each in self.files
        ]


def _fault_warnings(files: Sequence[ScannedFile]) -> Iterator[str]:
    faults = [f"{each.file.name}: {each.footer.fault}" for each in files if each.footer.fault is not None]
    if faults:
        num_more = len(faults) - SHOWN_FAULTS
        more = f"; and {counted(num_more, 'file')} more" if num_more > 0 else ""
        shown = "; ".join(faults[:SHOWN_FAULTS])
        yield f"front matter that cannot be read was left in the text: {shown}{more}"


def scan_sources(
    sources: Sequence[Source],
    config: CorpusConfig,
    record: Path | None = None,
    stored: Sequence[pa.Field] | None = None,
) -> Scan:
    """Read every footer and agree on one schema; no row is decoded.

    The footers of files that are as they were when they were recorded come from the ``record``. ``stored``
    are the metadata columns of the collection, None where nothing is published: then there must be a row.
    Raises :class:`SourceError` when there is nothing to read and :class:`SchemaError` when the columns are
    not what the settings say.
    """
    left_out = LeftOut()
    found = resolve_sources(sources, left_out)
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
            damaged.append((file, file.damage(error)))
    if not footers:
        others = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        file, fault = damaged[0]
        is_advice = fault.startswith("it is ") or "; " in fault
        advice = "" if is_advice else "; check the path or write the file again"
        raise SourceError(f"{file.name}{others} is not a file that can be read: {fault}{advice}")
    if stored is None:
        _require_rows(footers, config)
    # A CSV or a file of JSON lines without a line may be one whose writer failed.
    damaged += [
        (file, "the file is empty or has no columns") for file, footer in footers if not footer.schema.names
    ]
    footers = [(file, footer) for file, footer in footers if footer.schema.names]
    schema = agree_on_schema([(file, footer.schema) for file, footer in footers], config, stored)
    for file, reason in schema.left_out:
        left_out.add(reason, file.name)
    files = (
        ScannedFile(file, footer, columns, None if footer.fault else identities[file.address])
        for (file, footer), columns in zip(footers, schema.columns, strict=True)
        if columns is not None
    )
    damaged += schema.unusable
    return Scan(files=tuple(files), schema=schema, damaged_files=tuple(damaged), left_out=left_out)


def _require_rows(footers: Sequence[tuple[SourceFile, Footer]], config: CorpusConfig) -> None:
    with_rows = [file for file, footer in footers if footer.num_rows]
    if not with_rows:
        raise SourceError(
            f"a corpus must have at least one row, got none in {footers[0][0].name}"
            + (f" and {len(footers) - 1} more" if len(footers) > 1 else "")
        )
    if not any(footer.schema.names for _, footer in footers):
        raise SourceError(
            f"a corpus must have columns, got none in any row of {with_rows[0].name}; "
            f"each row must have {config.id_column!r} and {config.text_column!r}"
        )


def read_checked(
    scan: Scan, config: CorpusConfig, passed_over: Collection[int] = ()
) -> Iterator[CheckedBatch]:
    """Yield every row of the corpus once, in file order, then row order.

    Batches have at most ``batch_rows`` rows and about ``batch_bytes`` bytes. Files whose places are
    ``passed_over`` are left out.
    """
    yield from read_damaged_files(scan)
    for place, scanned in enumerate(scan.files):
        if place not in passed_over:
            yield from read_file(scan, scanned, config)


def read_damaged_files(scan: Scan) -> Iterator[CheckedBatch]:
    """Yield one rejected row for each file that cannot be read."""
    for file, reason in scan.damaged_files:
        yield _rejected(scan, file, [None], Reason.DAMAGED_FILE, reason)


def read_file(scan: Scan, scanned: ScannedFile, config: CorpusConfig) -> Iterator[CheckedBatch]:
    """Yield every row of a file of a scan, as :func:`read_checked` does.

    A document may have more rows: its pages that were refused. Raises :class:`TryAgainError` where a table
    does not have as many rows as it had when they were counted:
    a row that is not delivered would count as deleted.
    """
    file, num_rows = scanned.file, scanned.footer.num_rows
    checker = _checker(scan, scanned, config)
    done, is_cut = 0, False
    stored_types = checker.stored_types()
    types = {
        column: _vector_type(scanned) if stored == GIVEN_VECTORS else stored_types[stored]
        for stored, column in checker.sources.items()
    }
    for item in damage_reported(file, file.format.read(file, types, config)):
        if not isinstance(item, Undecoded):
            guess = (item.schema.metadata or {}).get(ENCODING)
            for batch in checker.check(item, done):
                yield batch if guess is None else replace(batch, encoding=guess.decode())
                done += batch.num_rows
        elif item.num_rows == 0:
            yield _rejected(scan, file, [], "", "", doubt=f"{file.name}: {item.detail}")
        else:
            is_cut = is_cut or item.num_rows is None
            # Where the file ends damaged behind its last row, it is one row more: it was not read whole.
            stop = max(num_rows, done + 1) if item.num_rows is None else done + item.num_rows
            for first in range(done, stop, REJECTED_BATCH_ROWS):
                rows = np.arange(first, min(first + REJECTED_BATCH_ROWS, stop))
                yield _rejected(scan, file, rows, Reason.DAMAGED_ROWS, item.detail)
            done = stop
    if done != num_rows and not is_cut and not file.format.is_document:
        raise TryAgainError(
            f"{file.name} must not change while it is read, got {done} rows where {num_rows} were counted; "
            "run the command again"
        )


def _vector_type(scanned: ScannedFile) -> pa.DataType:
    return read_type(scanned.footer.schema.field(scanned.columns[GIVEN_VECTORS]))


def first_vector_dim(scan: Scan, config: CorpusConfig) -> int:
    """Return the width of the first vector that a row brings; :class:`SourceError` where none does."""
    for scanned in scan.files:
        file, column = scanned.file, scanned.columns[GIVEN_VECTORS]
        for item in damage_reported(file, file.format.read(file, {column: _vector_type(scanned)}, config)):
            width = None if isinstance(item, Undecoded) else first_width(item.column(column))
            if width is not None:
                return width
    raise SourceError(
        f"vector column {config.vector_column!r} must hold a vector in some row, got none; name another with "
        "--vector-column"
    )


def _checker(scan: Scan, scanned: ScannedFile, config: CorpusConfig) -> RowChecker:
    """Return the checks of a file, with the values that its folders give to every row."""
    file, columns = scanned.file, scanned.columns
    folders = {stored_name(key): value for key, value in file.partitions}
    constants: dict[str, pa.Scalar] = {}
    for field in scan.metadata_fields:
        if field.name not in columns:
            value, _ = fitted(pa.array([folders.get(field.name)], pa.string()), field.type)
            constants[field.name] = value[0]
    return RowChecker(
        source_file=file.name,
        sources=columns,
        constants=constants,
        metadata_fields=scan.metadata_fields,
        config=config,
        vector_dim=scan.vector_dim,
    )


def _rejected(
    scan: Scan,
    file: SourceFile,
    indices: Sequence[None] | np.ndarray,
    reason: str,
    detail: str,
    doubt: str | None = None,
) -> CheckedBatch:
    rejected = rejected_rows(file.name, indices, reason, detail)
    no_rows = pa.RecordBatch.from_pylist([], schema=staged_schema(scan.metadata_fields))
    return CheckedBatch(rows=no_rows, rejected=rejected, num_rows=len(indices), doubt=doubt)
