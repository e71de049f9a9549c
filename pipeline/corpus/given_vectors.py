"""Vectors that a corpus brings in a column of its own, checked and packed.

    a list of numbers                    the document's vector
    a list of {start, end, vector}       a vector a chunk; spans are characters of the text

Rows of both become bytes, a record of :func:`vector_records` a vector, which are staged and hashed as any
content; no table stores them. Vectors are normalised here, and a row that cannot be used is told why.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
from cairn.pipeline.corpus.columns import OBJECT, OBJECTS, is_list, is_number
from jaxtyping import Float32, Int64, Shaped

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers

WHOLE: Final = -1
"""The end of a vector that stands for its whole document."""
_FIELDS: Final = ("start", "end", "vector")
_VECTOR: Final = pa.list_(pa.float64())
_CHUNKS: Final = pa.list_(pa.struct([("start", pa.int64()), ("end", pa.int64()), ("vector", _VECTOR)]))
_LEAST_NORM: Final = 1e-30
"""A shorter vector has no direction in float32."""
_CANCELLED: Final = 1e-5
"""The length of a mean of unit vectors in float32 that is nothing but rounding."""

Faults = Shaped[np.ndarray, " M"]
"""What is wrong with each of some vectors or rows, empty where nothing is."""


def vector_records(vector_dim: int) -> np.dtype[np.void]:
    """Return the record of one vector: its span, of which :data:`WHOLE` ends that of a document, and it."""
    return np.dtype([("start", "<i4"), ("end", "<i4"), ("vector", "<f4", (vector_dim,))])


def is_vector_column(arrow_type: pa.DataType) -> bool:
    """Tell whether values can be vectors, or chunks with vectors."""
    if not is_list(arrow_type):
        return arrow_type == OBJECT or pa.types.is_null(arrow_type)
    if not pa.types.is_struct(arrow_type.value_type):
        return _may_be_number(arrow_type.value_type)
    names = [field.name for field in arrow_type.value_type]
    if any(names.count(name) != 1 for name in _FIELDS):
        return False
    start, end, vector = (arrow_type.value_type.field(name).type for name in _FIELDS)
    are_spans = all(pa.types.is_integer(each) or pa.types.is_null(each) for each in (start, end))
    is_vector = pa.types.is_null(vector) or (is_list(vector) and _may_be_number(vector.value_type))
    return are_spans and is_vector


def _may_be_number(arrow_type: pa.DataType) -> bool:
    return is_number(arrow_type) or pa.types.is_null(arrow_type)


def read_type(field: pa.Field[Any]) -> pa.DataType:
    """Return what a column that :func:`is_vector_column` is read as, where its file has no types."""
    element = getattr(field.type, "value_type", pa.null())
    is_of_chunks = field.type == OBJECT or (OBJECTS in (field.metadata or {}) and pa.types.is_null(element))
    return _CHUNKS if is_of_chunks else _VECTOR


def _of_chunks(column: pa.Array) -> pa.Array | None:
    """Return all chunks of a column, None where its values are vectors themselves."""
    return column.flatten() if pa.types.is_struct(column.type.value_type) else None


def _vectors(column: pa.Array) -> pa.Array:
    chunks = _of_chunks(column)
    return column if chunks is None else pc.struct_field(chunks, "vector")


def first_width(column: pa.Array) -> int | None:
    """Return how many numbers the first vector has that has any, None where no value has one."""
    if not is_list(column.type):
        return None
    vectors = _vectors(column)
    if not is_list(vectors.type):
        return None
    lengths = pc.list_value_length(vectors).drop_null()
    return next((length for length in lengths.to_pylist() if length), None)


def packed(
    column: pa.Array, length_N: Int64[np.ndarray, " N"], vector_dim: int
) -> tuple[pa.LargeBinaryArray, Faults]:
    """Return the vectors of each row as bytes, and what each row has in place of vectors that can be used.

    ``length_N`` are the characters of the rows' texts. What stands in a row with a fault is of no use.
    """
    if not is_list(column.type):  # null throughout
        column = pa.nulls(len(column), _VECTOR)
    fault_N = np.where(np.asarray(column.is_null()), "null", "").astype(object)
    chunks = _of_chunks(column)
    unit_MV, fault_M = _normalised(_vectors(column), vector_dim)
    records_M = np.zeros(len(unit_MV), vector_records(vector_dim))
    records_M["vector"] = unit_MV
    if chunks is None:
        records_M["end"] = WHOLE
        count_N = np.ones(len(column), np.int64)
        fault_N[fault_N == ""] = fault_M[fault_N == ""]
    else:
        count_N = np.asarray(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)
        start_M, end_M = (_spans(pc.struct_field(chunks, name)) for name in ("start", "end"))
        records_M["start"], records_M["end"] = start_M.clip(-1, 2**31 - 1), end_M.clip(-1, 2**31 - 1)
        is_null_FM = np.array([pc.struct_field(chunks, name).is_null() for name in _FIELDS])
        for place in np.flatnonzero(is_null_FM.any(0)).tolist():
            names = [
                repr(name) for name, is_null_M in zip(_FIELDS, is_null_FM, strict=True) if is_null_M[place]
            ]
            fault_M[place] = f"a chunk without {' and '.join(names)}"
        fault_M = _span_faults(fault_M, start_M, end_M, count_N, length_N)
        fault_N = _row_faults(fault_N, fault_M, count_N, unit_MV)
    offsets = np.concatenate([[0], np.cumsum(count_N)]) * records_M.dtype.itemsize
    buffers = [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(records_M.tobytes())]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(column), buffers), fault_N


def _normalised(vectors: pa.Array, vector_dim: int) -> tuple[Float32[np.ndarray, "M V"], Faults]:
    """Return unit vectors, zeros where there is a fault, and the faults."""
    if not is_list(vectors.type):
        vectors = pa.nulls(len(vectors), _VECTOR)
    length_M = np.asarray(pc.fill_null(pc.list_value_length(vectors), -1))
    fault_M = np.full(len(vectors), "", object)
    fault_M[length_M != vector_dim] = [f"one of {length:,}" for length in length_M[length_M != vector_dim]]
    fault_M[length_M == -1] = "null"
    fits_M = length_M == vector_dim
    numbers = vectors.filter(pa.array(fits_M)).flatten().cast(pa.float64(), safe=False)
    wide_mV = np.asarray(pc.fill_null(numbers, float("nan"))).reshape(-1, vector_dim)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        norm_m = np.linalg.norm(wide_mV, axis=1)
        unit_mV = wide_mV / norm_m[:, None]
    fault_m = np.full(len(norm_m), "", object)
    fault_m[norm_m < _LEAST_NORM] = "a zero vector"
    fault_m[~np.isfinite(norm_m)] = "one with null, NaN, infinity or too large a number"
    fault_M[fits_M] = fault_m
    unit_MV = np.zeros((len(vectors), vector_dim), np.float32)
    unit_MV[fault_M == ""] = unit_mV[fault_m == ""]
    return unit_MV, fault_M


def _spans(column: pa.Array) -> Int64[np.ndarray, " M"]:
    return np.asarray(pc.fill_null(column.cast(pa.int64(), safe=False), -1))


def _span_faults(
    fault_M: Faults,
    start_M: Int64[np.ndarray, " M"],
    end_M: Int64[np.ndarray, " M"],
    count_N: Int64[np.ndarray, " N"],
    length_N: Int64[np.ndarray, " N"],
) -> Faults:
    """Add the faults of spans: within the text, none empty, each begins behind the one before."""
    length_M = np.repeat(length_N, count_N)
    before_M = np.concatenate([[-1], start_M[:-1]])
    before_M[(np.cumsum(count_N) - count_N)[count_N > 0]] = -1
    is_outside_M = (start_M < 0) | (end_M <= start_M) | (end_M > length_M)
    for place in np.flatnonzero((fault_M == "") & (is_outside_M | (start_M <= before_M))).tolist():
        where = f"in a text of {length_M[place]:,} characters" if is_outside_M[place] else "out of order"
        fault_M[place] = f"a chunk from {start_M[place]:,} to {end_M[place]:,} {where}"
    return fault_M


def _row_faults(
    fault_N: Faults, fault_M: Faults, count_N: Int64[np.ndarray, " N"], unit_MV: Float32[np.ndarray, "M V"]
) -> Faults:
    """Return the first fault of each row's chunks, and say where there are none, or they cancel out."""
    fault_N[(count_N == 0) & (fault_N == "")] = "no chunk"
    filled = np.flatnonzero(count_N)
    firsts = (np.cumsum(count_N) - count_N)[filled]
    if len(filled):
        sums_nV = np.add.reduceat(unit_MV, firsts, axis=0)
        are_left = np.linalg.norm(sums_nV, axis=1) > _CANCELLED * count_N[filled]
        fault_N[filled[~are_left]] = "chunks whose vectors cancel out"
    owner_M = np.repeat(np.arange(len(count_N)), count_N)
    for place in reversed(np.flatnonzero(fault_M != "").tolist()):
        fault_N[owner_M[place]] = fault_M[place]
    return fault_N
