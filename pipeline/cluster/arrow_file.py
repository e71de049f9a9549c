"""One table and one JSON header in one Arrow IPC file: how clusters and context lie on disk.

Deterministic: equal tables and headers give equal bytes. What a table means, and whether its content is
intact, is its owner's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from cairn.pipeline import durable
from cairn.pipeline.errors import DamageError
from pyarrow import ipc

_HEADER_KEY = b"cairn"


def write_arrow_file(path: Path, table: pa.Table, *, kind: str, header: Mapping[str, Any]) -> None:
    """Write a table durably as one uncompressed batch, the header in its schema's metadata."""
    content = json.dumps(
        {**header, "kind": kind}, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()
    whole = table.combine_chunks().replace_schema_metadata({_HEADER_KEY: content})
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, whole.schema) as writer:
        writer.write_table(whole)
    with durable.storage_errors(f"writing {path.name}"):
        durable.write_bytes(path, sink.getvalue().to_pybytes())


def read_arrow_file(
    path: Path, *, kind: str, schema: pa.Schema | None = None
) -> tuple[pa.Table, dict[str, Any]]:
    """Read table and header back into memory, checked to be whole and of this kind.

    Anything else raises :class:`IntegrityError`.
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
        is_ours = header.pop("kind") == kind and (schema is None or table.schema.equals(schema))
    except (
        pa.ArrowException,
        OSError,
        MemoryError,
        KeyError,
        ValueError,
        AttributeError,
        TypeError,
    ) as error:
        raise DamageError(
            f"{path.name} must be a whole Arrow file of kind {kind}, got a damaged one"
        ) from error
    if not is_ours:
        raise DamageError(f"{path.name} must be of kind {kind}, got another table")
    return table, header
