"""Judge decoded rows: each is staged with its content hash, or quarantined with a reason.

Last step of the reading side of stage 1. Sizes are judged before strings are made plain, everything else on
plain columns, vectorised; single rows are looked at only where a whole column failed. A row carries the first
reason found, in the order of the checks below. Ids are compared as they are: no trimming, no Unicode
normalisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import (
    FAULT,
    Mask,
    fitted,
    is_list,
    is_text,
    not_showable,
    of_elements,
    pieces,
    plain_type,
    unfit,
    value_bytes,
    without_views,
)
from cairn.pipeline.corpus.content_hash import content_hashes
from cairn.pipeline.corpus.given_vectors import packed
from cairn.pipeline.corpus.quarantine import SHOWN_ID_CHARACTERS, Reason, rejected_rows, shown_id
from cairn.pipeline.types import GIVEN_VECTORS, staged_schema
from jaxtyping import Int64, Shaped

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers
ROLES = ("doc_id", "title", "text", "query")
Verdict = Shaped[np.ndarray, " N"]
"""Why each row is refused, a reason, a blank and details; empty where it is not. The first one wins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedBatch:
    """Consecutive rows of one file from ``first_row`` on, judged.

    ``num_rows == rows.num_rows + rejected.num_rows``. ``doubt`` says why rows may stand in others. An
    ``encoding`` is a guess.
    """

    rows: pa.RecordBatch
    rejected: pa.RecordBatch
    num_rows: int
    first_row: int = 0
    doubt: str | None = None
    encoding: str | None = None

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
    every row of the file shares: partition values, and nulls of columns that the file lacks. Vectors that
    rows bring must have ``vector_dim`` numbers.
    """

    source_file: str
    sources: Mapping[str, str]
    constants: Mapping[str, pa.Scalar]
    metadata_fields: tuple[pa.Field, ...]
    config: CorpusConfig
    vector_dim: int = 0

    def check(self, raw: pa.RecordBatch, first_row: int) -> Iterator[CheckedBatch]:
        """Judge decoded rows; ``first_row`` is the index in the file of the first one."""
        told = raw.column(FAULT).to_pylist() if FAULT in raw.schema.names else [None] * raw.num_rows
        verdict = np.array([fault or "" for fault in told], object)
        vectors = raw.column(self.sources[GIVEN_VECTORS]) if GIVEN_VECTORS in self.sources else None
        others = {stored: name for stored, name in self.sources.items() if stored != GIVEN_VECTORS}
        raw = pa.RecordBatch.from_arrays(
            [without_views(raw.column(name)) for name in others.values()], names=[*others]
        )
        lengths = {name: value_bytes(column) for name, column in zip(others, raw.columns, strict=True)}
        _reject(verdict, ~np.asarray(raw.column("doc_id").is_valid()), Reason.NULL_ID, "the id is null")
        self._check_sizes(verdict, lengths)
        total = np.where(verdict == "", np.sum([*lengths.values()], axis=0, dtype=np.int64), 0)
        for start, stop in pieces(total, self.config.batch_bytes):
            own = None if vectors is None else vectors.slice(start, stop - start)
            yield self._check_piece(
                raw.slice(start, stop - start), own, verdict[start:stop], first_row + start
            )

    def _check_sizes(self, verdict: Verdict, lengths: Mapping[str, Int64[np.ndarray, " N"]]) -> None:
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
            for row in np.flatnonzero(sizes > allowed).tolist():
                verdict[row] = verdict[row] or f"{reason} {what} has {sizes[row]} bytes, more than {allowed}"

    def _check_piece(
        self, raw: pa.RecordBatch, vectors: pa.Array | None, verdict: Verdict, first_row: int
    ) -> CheckedBatch:
        columns: dict[str, pa.Array] = {}
        types = self.stored_types()
        for name, column in zip(raw.schema.names, _without(raw.columns, verdict), strict=True):
            columns[name], bad = fitted(column, types[name])
            if bad is not None:
                own = column.type
                if pa.types.is_string(own):  # of CSV, which has texts alone
                    own = plain_type(column.filter(pa.array(bad)))
                reason, _, detail = unfit(self.sources[name], columns[name].type, own).partition(" ")
                _reject(verdict, bad, reason, detail)
        for name, column in columns.items():
            # Arrow's reader trusts that strings are UTF-8.
            if (name in ROLES or _holds_strings(column.type)) and not _is_utf8(column):
                bad = np.array([not _is_utf8(column.slice(row, 1)) for row in range(len(column))], bool)
                _reject(
                    verdict, bad, Reason.INVALID_UTF8, f"column {self.sources[name]!r} is not valid UTF-8"
                )
        columns = dict(zip(columns, _without([*columns.values()], verdict), strict=True))
        self._check_values(verdict, columns)
        if vectors is not None:
            columns[GIVEN_VECTORS] = self._packed(verdict, vectors, columns["text"])
        is_good = verdict == ""
        rows = self._staged({name: column.filter(pa.array(is_good)) for name, column in columns.items()})
        bad_rows = np.flatnonzero(~is_good)
        faults = [fault.partition(" ") for fault in verdict[bad_rows]]
        rejected = rejected_rows(
            self.source_file,
            bad_rows + first_row,
            pa.array([reason for reason, _, _ in faults], pa.string()),
            pa.array([detail for _, _, detail in faults], pa.string()),
            _shown_ids(raw.column("doc_id"), bad_rows),
        )
        return CheckedBatch(rows=rows, rejected=rejected, num_rows=raw.num_rows, first_row=first_row)

    def _packed(self, verdict: Verdict, vectors: pa.Array, texts: pa.Array) -> pa.Array:
        """Return the vectors that rows brought as they are staged, and refuse rows without fit ones."""
        length_N = np.asarray(pc.fill_null(pc.utf8_length(texts), 0)).astype(np.int64)
        column, faults = packed(vectors, length_N, self.vector_dim)
        what = f"column {self.sources[GIVEN_VECTORS]!r} must hold vectors of {self.vector_dim:,} numbers"
        for row in np.flatnonzero((faults != "") & (verdict == "")).tolist():
            verdict[row] = f"{Reason.UNFIT_VECTOR} {what}, got {faults[row]}"
        return column

    def stored_types(self) -> Mapping[str, pa.DataType]:
        """Return the type of each stored column."""
        return {field.name: field.type for field in staged_schema(self.metadata_fields)}

    def _check_values(self, verdict: Verdict, columns: Mapping[str, pa.Array]) -> None:
        for name in ROLES:
            if name in columns and _has_zero_byte(columns[name]):
                bad = _mask(pc.match_substring(columns[name], "\0"))
                _reject(
                    verdict, bad, Reason.NUL_CHARACTER, f"column {self.sources[name]!r} holds a NUL character"
                )
        ids, text = columns["doc_id"], columns["text"]
        limit = self.config.max_id_characters
        _reject(verdict, _is_blank(ids), Reason.EMPTY_ID, "the id is empty")
        long = _mask(pc.greater(pc.utf8_length(ids), limit))
        _reject(verdict, long, Reason.LONG_ID, f"the id has more than {limit} characters")
        _reject(verdict, _mask(text.is_null()), Reason.NULL_TEXT, "the text is null")
        _reject(verdict, _is_blank(text), Reason.EMPTY_TEXT, "the text is empty")
        for field in self.metadata_fields:
            if field.name in columns:
                column, what = columns[field.name], f"column {self.sources[field.name]!r} holds"
                _reject(verdict, _has_non_finite(column), Reason.NAN_METADATA, f"{what} NaN or infinity")
                hidden = not_showable(column)
                if hidden is not None:
                    detail = f"{what} a date beyond the years 1 to 9999 in its time zone"
                    _reject(verdict, hidden, Reason.UNSHOWABLE_DATE, detail)

    def _staged(self, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
        num_rows = len(columns["doc_id"])
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


def _reject(verdict: Verdict, mask: Mask, reason: str, detail: str) -> None:
    if mask.any():
        verdict[mask & (verdict == "")] = f"{reason} {detail}"


def _without(columns: Sequence[pa.Array], verdict: Verdict) -> Sequence[pa.Array]:
    """Return columns with nulls in the rows that are refused: nothing of them is looked at any more."""
    is_bad = verdict != ""
    rows = pa.array(np.arange(len(verdict)), mask=is_bad)
    return [column.take(rows) for column in columns] if is_bad.any() else columns


def _shown_ids(ids: pa.Array, rows: Int64[np.ndarray, " N"]) -> pa.Array:
    if not is_text(ids.type) or ids.null_count == len(ids):
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
    if is_list(arrow_type):
        return of_elements(column, _has_non_finite(column.flatten()))
    return np.zeros(len(column), bool)


def _is_utf8(column: pa.Array) -> bool:
    try:  # of a slice of lists, Arrow would look at the elements of all
        (column.flatten() if is_list(column.type) else column).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
