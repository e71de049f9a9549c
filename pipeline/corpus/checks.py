"""Judge decoded rows: each is staged with its content hash, or quarantined with a reason.

Last step of the reading side of stage 1. Sizes are judged before strings are made plain, everything else on
plain columns, vectorised; single rows are looked at only where a whole column failed. A row carries the first
reason found, in the order of the checks below. Ids are compared as they are: no trimming, no Unicode
normalisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.content_hash import content_hashes
from cairn.pipeline.corpus.plain_columns import pieces, plain, value_bytes, without_views
from cairn.pipeline.corpus.quarantine import SHOWN_ID_CHARACTERS, Reason, rejected_rows, shown_id
from cairn.pipeline.types import staged_schema
from jaxtyping import Bool, Int64

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers
ROLES = ("doc_id", "title", "text", "query")
REASONS = ("", *map(str, Reason))
Mask = Bool[np.ndarray, " N"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedBatch:
    """Consecutive rows of one file from ``first_row`` on, judged.

    ``num_rows == rows.num_rows + rejected.num_rows``.
    """

    rows: pa.RecordBatch
    rejected: pa.RecordBatch
    num_rows: int
    first_row: int = 0

    def __post_init__(self) -> None:
        assert self.num_rows == self.rows.num_rows + self.rejected.num_rows

    def row_indices(self) -> Int64[np.ndarray, " N"]:
        """Return where each row of ``rows`` stands in its file."""
        everywhere = np.arange(self.first_row, self.first_row + self.num_rows)
        return np.setdiff1d(everywhere, np.asarray(self.rejected.column("row_index")), assume_unique=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChecker:
    """The checks of one file.

    ``sources`` maps a stored column to the source column it is read from. ``constants`` are what
    every row of the file shares: partition values, and nulls of columns that the file lacks.
    """

    source_file: str
    sources: Mapping[str, str]
    constants: Mapping[str, pa.Scalar]
    metadata_fields: tuple[pa.Field, ...]
    config: CorpusConfig

    def check(self, raw: pa.RecordBatch, first_row: int) -> Iterator[CheckedBatch]:
        """Judge decoded rows; ``first_row`` is the index in the file of the first one."""
        raw = pa.RecordBatch.from_arrays(
            [without_views(column) for column in raw.columns], names=raw.schema.names
        )
        lengths = {stored: value_bytes(raw.column(source)) for stored, source in self.sources.items()}
        verdict = _Verdict(raw.num_rows)
        verdict.reject(
            ~np.asarray(raw.column(self.sources["doc_id"]).is_valid()), Reason.NULL_ID, "the id is null"
        )
        self._check_sizes(verdict, lengths)
        total = np.where(verdict.is_good, np.sum([*lengths.values()], axis=0, dtype=np.int64), 0)
        for start, stop in pieces(total, self.config.batch_bytes):
            yield self._check_piece(
                raw.slice(start, stop - start), verdict.slice(start, stop), first_row + start
            )

    def _check_sizes(self, verdict: _Verdict, lengths: Mapping[str, Int64[np.ndarray, " N"]]) -> None:
        limit = self.config.max_document_bytes
        for stored, sizes in lengths.items():
            if stored == "doc_id":
                # A character takes four bytes at most; what is near the limit is counted exactly once it is
                # known to be valid UTF-8.
                allowed, reason, what = 4 * self.config.max_id_characters, Reason.LONG_ID, "the id"
            elif stored == "text":
                allowed, reason, what = limit, Reason.OVERSIZED_TEXT, "the text"
            else:
                allowed, reason, what = limit, Reason.OVERSIZED_FIELD, f"column {self.sources[stored]!r}"
            too_large = sizes > allowed
            if too_large.any():
                details = {
                    int(row): f"{what} has {sizes[row]} bytes, more than {allowed}"
                    for row in np.flatnonzero(too_large)
                }
                verdict.reject(too_large, reason, details)

    def _check_piece(self, raw: pa.RecordBatch, verdict: _Verdict, first_row: int) -> CheckedBatch:
        ids = raw.column(self.sources["doc_id"])
        columns = self._plain_columns(raw.filter(pa.array(verdict.is_good)))
        for name, column in columns.items():
            # Arrow's reader trusts that strings are UTF-8.
            self._check_utf8(verdict, name, column)
        columns = verdict.narrowed(columns)
        self._check_values(verdict, columns)
        columns = verdict.narrowed(columns)
        rows = self._staged(columns, int(verdict.is_good.sum()))
        rejected = verdict.rejected_rows(self.source_file, first_row, ids)
        return CheckedBatch(rows=rows, rejected=rejected, num_rows=raw.num_rows, first_row=first_row)

    def _plain_columns(self, raw: pa.RecordBatch) -> dict[str, pa.Array]:
        types = self.stored_types
        return {stored: plain(raw.column(source), types[stored]) for stored, source in self.sources.items()}

    @property
    def stored_types(self) -> Mapping[str, pa.DataType]:
        """The type of each stored column."""
        return {field.name: field.type for field in staged_schema(self.metadata_fields)}

    def _check_utf8(self, verdict: _Verdict, name: str, column: pa.Array) -> None:
        if name not in ROLES and not _holds_strings(column.type):
            return
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            faults = [_utf8_fault(value) for value in _raw_values(column)]
            for reason, detail in (
                (Reason.LONE_SURROGATE, "holds a lone surrogate"),
                (Reason.INVALID_UTF8, "is not valid UTF-8"),
            ):
                verdict.reject_kept(
                    np.array([fault == reason for fault in faults], bool),
                    reason,
                    f"column {self.sources[name]!r} {detail}",
                )

    def _check_values(self, verdict: _Verdict, columns: Mapping[str, pa.Array]) -> None:
        for name in ROLES:
            if name in columns and _has_zero_byte(columns[name]):
                verdict.reject_kept(
                    _mask(pc.match_substring(columns[name], "\0")),
                    Reason.NUL_CHARACTER,
                    f"column {self.sources[name]!r} holds a NUL character",
                )
        ids, text = columns["doc_id"], columns["text"]
        verdict.reject_kept(_is_blank(ids), Reason.EMPTY_ID, "the id is empty")
        limit = self.config.max_id_characters
        verdict.reject_kept(
            _mask(pc.greater(pc.utf8_length(ids), limit)),
            Reason.LONG_ID,
            f"the id has more than {limit} characters",
        )
        verdict.reject_kept(_mask(text.is_null()), Reason.NULL_TEXT, "the text is null")
        verdict.reject_kept(_is_blank(text), Reason.EMPTY_TEXT, "the text is empty")
        for field in self.metadata_fields:
            if field.name in columns:
                verdict.reject_kept(
                    _has_non_finite(columns[field.name]),
                    Reason.NAN_METADATA,
                    f"column {self.sources[field.name]!r} holds NaN or infinity",
                )

    def _staged(self, columns: Mapping[str, pa.Array], num_rows: int) -> pa.RecordBatch:
        complete = {**columns, **{name: pa.repeat(value, num_rows) for name, value in self.constants.items()}}
        hashes = content_hashes({name: column for name, column in complete.items() if name != "doc_id"})
        complete["content_sha256"] = pa.array(hashes, pa.string())
        complete["source_file"] = pa.repeat(pa.scalar(self.source_file), num_rows)
        schema = staged_schema(self.metadata_fields)
        arrays = [
            complete[field.name] if field.name in complete else pa.nulls(num_rows, field.type)
            for field in schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


class _Verdict:
    """The reason found for each row of a batch, first one wins.

    ``kept`` are the rows a column still holds.
    """

    def __init__(self, num_rows: int) -> None:
        self.codes = np.zeros(num_rows, np.int8)
        self.details = np.full(num_rows, "", object)
        self.kept = np.arange(num_rows)

    @property
    def is_good(self) -> Mask:
        return self.codes == 0

    def slice(self, start: int, stop: int) -> _Verdict:
        part = _Verdict(stop - start)
        part.codes = self.codes[start:stop].copy()
        part.details = self.details[start:stop].copy()
        part.kept = np.flatnonzero(part.is_good)
        return part

    def reject(self, mask: Mask, reason: str, detail: str | Mapping[int, str]) -> None:
        rows = np.flatnonzero(mask & self.is_good)
        if not len(rows):
            return
        self.codes[rows] = REASONS.index(reason)
        self.details[rows] = detail if isinstance(detail, str) else [detail[row] for row in rows.tolist()]

    def reject_kept(self, mask: Mask, reason: str, detail: str) -> None:
        """Reject by a mask over the rows that columns still hold."""
        if mask.any():
            whole = np.zeros(len(self.codes), bool)
            whole[self.kept[mask]] = True
            self.reject(whole, reason, detail)

    def narrowed(self, columns: dict[str, pa.Array]) -> dict[str, pa.Array]:
        """Drop rejected rows from ``kept`` and from the columns that hold them."""
        is_kept = self.is_good[self.kept]
        if is_kept.all():
            return columns
        self.kept = self.kept[is_kept]
        mask = pa.array(is_kept)
        return {name: column.filter(mask) for name, column in columns.items()}

    def rejected_rows(self, source_file: str, first_row: int, ids: pa.Array) -> pa.RecordBatch:
        rows = np.flatnonzero(~self.is_good)
        return rejected_rows(
            source_file,
            rows + first_row,
            pa.array(np.array(REASONS, object)[self.codes[rows]], pa.string()),
            pa.array(self.details[rows], pa.string()),
            _shown_ids(ids, rows),
        )


def _shown_ids(ids: pa.Array, rows: Int64[np.ndarray, " N"]) -> pa.Array:
    if pa.types.is_integer(ids.type) or ids.null_count == len(ids):
        return ids.take(pa.array(rows)).cast(pa.string())
    is_named = ids.is_valid().to_pylist()
    return pa.array(
        [shown_id(_id_bytes(ids, row)) if is_named[row] else None for row in rows.tolist()], pa.string()
    )


def _id_bytes(ids: pa.Array, row: int) -> bytes:
    value = ids.dictionary[ids.indices[row].as_py()] if pa.types.is_dictionary(ids.type) else ids[row]
    return value.as_buffer()[: SHOWN_ID_CHARACTERS * 4].to_pybytes()


def _holds_strings(arrow_type: pa.DataType) -> bool:
    return pa.types.is_string(arrow_type.value_type if pa.types.is_list(arrow_type) else arrow_type)


def _mask(values: pa.Array) -> Mask:
    return np.asarray(pc.fill_null(values, False))


def _is_blank(column: pa.Array) -> Mask:
    return _mask(pc.or_(pc.equal(pc.binary_length(column), 0), pc.utf8_is_space(column)))


def _has_zero_byte(column: pa.Array) -> bool:
    data = column.buffers()[2]
    return data is not None and not np.frombuffer(data, np.uint8).all()


def _has_non_finite(column: pa.Array) -> Mask:
    arrow_type = column.type
    if pa.types.is_floating(arrow_type):
        values = column.cast(pa.float32()) if pa.types.is_float16(arrow_type) else column
        return _mask(pc.invert(pc.is_finite(values)))
    if pa.types.is_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type):
        bad = np.flatnonzero(_has_non_finite(column.flatten()))
        result = np.zeros(len(column), bool)
        result[np.asarray(pc.list_parent_indices(column))[bad]] = True
        return result
    return np.zeros(len(column), bool)


def _raw_values(column: pa.Array) -> Iterator[list[bytes]]:
    for value in column:
        if not value.is_valid:
            yield []
        elif isinstance(value, pa.ListScalar):
            yield [item.as_buffer().to_pybytes() for item in value.values if item.is_valid]
        else:
            yield [value.as_buffer().to_pybytes()]


def _utf8_fault(values: list[bytes]) -> str | None:
    try:
        for value in values:
            value.decode()
    except UnicodeDecodeError:
        try:
            for value in values:
                value.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return Reason.INVALID_UTF8
        return Reason.LONE_SURROGATE
    return None
