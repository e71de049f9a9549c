"""Named arrays and JSON facts in one Arrow IPC file: how clusters and context lie on disk.

Deterministic: equal content gives equal bytes. One row an array: name, dtype, shape, bytes. The facts and a
hash of the whole content stand in the schema's metadata, so damage is found here even before a generation's
manifest is asked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from cairn.pipeline import durable
from cairn.pipeline.errors import DamageError
from cairn.pipeline.manifest import fingerprint
from pyarrow import ipc

_HEADER_KEY = b"cairn"
_DTYPES = ("float32", "float64", "int32", "int64")
_SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("data", pa.large_binary(), nullable=False),
    ]
)


def sha256_of(array: np.ndarray) -> str:
    """Return the hash of an array's bytes, row by row."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def content_fingerprint(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> str:
    """Identify every array and fact."""
    hashes = {name: [str(each.dtype), list(each.shape), sha256_of(each)] for name, each in arrays.items()}
    return fingerprint(arrays=hashes, **facts)


def write_arrow_file(
    path: Path, arrays: Mapping[str, np.ndarray], *, kind: str, facts: Mapping[str, Any]
) -> None:
    """Write arrays and facts durably."""
    header = {"kind": kind, "facts": facts, "fingerprint": content_fingerprint(arrays, facts)}
    table = pa.table(
        {
            "name": list(arrays),
            "dtype": [str(array.dtype) for array in arrays.values()],
            "shape": [list(array.shape) for array in arrays.values()],
            "data": [np.ascontiguousarray(array).tobytes() for array in arrays.values()],
        },
        schema=_SCHEMA.with_metadata(
            {_HEADER_KEY: json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)}
        ),
    )
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with durable.storage_errors(f"writing {path.name}"):
        durable.write_bytes(path, sink.getvalue().to_pybytes())


def read_arrow_file(path: Path, *, kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read arrays and facts back, bit for bit, in memory of their own.

    A missing, damaged or foreign file raises :class:`DamageError`.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DamageError(f"{path.name} must exist, got nothing") from None
    except OSError as error:
        durable.raise_storage_error(error, f"reading {path.name}")
    try:
        with ipc.open_file(pa.BufferReader(content)) as reader:
            table = reader.read_all()
        table.validate(full=True)
        header = json.loads((table.schema.metadata or {})[_HEADER_KEY])
        arrays = {row["name"]: _decode(row) for row in table.to_pylist()}
        facts: dict[str, Any] = header["facts"]
        is_intact = header["kind"] == kind and header["fingerprint"] == content_fingerprint(arrays, facts)
    except (pa.ArrowException, OSError, MemoryError, LookupError, ValueError, TypeError) as error:
        raise DamageError(
            f"{path.name} must be a whole Arrow file of kind {kind}, got a damaged one"
        ) from error
    if not is_intact:
        raise DamageError(f"{path.name} must be of kind {kind} and match its own hash, got other content")
    return arrays, facts


def _decode(row: Mapping[str, Any]) -> np.ndarray:
    if row["dtype"] not in _DTYPES:
        raise ValueError(row["dtype"])
    return np.frombuffer(row["data"], dtype=row["dtype"]).reshape(row["shape"])
