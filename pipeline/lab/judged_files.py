"""Columns of files that are read whole: those of a judged set, or all documents of a small corpus.

    corpus     id, text, title (may be missing)
    queries    id, text
    qrels      query_id, doc_id, score; start, end (may be missing)

A file of a judged set has one of these names and the suffix of any format of a source with columns. BEIR's
layout is read, too: ``_id``, ``query-id`` and ``corpus-id`` for the ids, and ``qrels/test.tsv``. A row that
cannot be read is an error here: a judged set has no quarantine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final, Literal

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import FAULT, fitted, is_list, stored_type, without_views
from cairn.pipeline.corpus.formats import FORMATS
from cairn.pipeline.corpus.formats.csv import CsvFormat
from cairn.pipeline.corpus.formats.format import (
    COMPRESSED,
    DECODE_ERRORS,
    SourceFile,
    Undecoded,
    damage_of,
    damage_reported,
)
from cairn.pipeline.corpus.given_vectors import is_vector_column, read_type
from cairn.pipeline.corpus.sources import resolve_sources
from cairn.pipeline.errors import SchemaError, SourceError

JudgedFile = Literal["corpus", "queries", "qrels"]

_REQUIRED: Final[Mapping[JudgedFile, Sequence[str]]] = {
    "corpus": ("id", "text"),
    "queries": ("id", "text"),
    "qrels": ("query_id", "doc_id", "score"),
}
_OPTIONAL: Final[Mapping[JudgedFile, Sequence[str]]] = {
    "corpus": ("title",),
    "queries": (),
    "qrels": ("start", "end"),
}
_ALSO_NAMED: Final = {"id": "_id", "query_id": "query-id", "doc_id": "corpus-id"}
_NUMBERS: Final = frozenset({"score", "start", "end"})
"""Columns whose fields in CSV are numbers; all others are texts, even if they look like numbers."""
_BEIR_SPLIT: Final = "test"
MAX_SHOWN: Final = 20
"""Columns that a sentence names."""


def find_judged_file(folder: Path, name: JudgedFile) -> Path | None:
    """Return a file of a judged set, or None; of several formats the first of ``FORMATS``."""
    places = [(folder, str(name))] + ([(folder / name, _BEIR_SPLIT)] if name == "qrels" else [])
    return next((path for place, stem in places for path in _in_any_format(place, stem)), None)


def read_judged_file(folder: Path, name: JudgedFile, only: str | None = None) -> pa.Table:
    """Read a file of a judged set, or one column; raises :class:`SourceError` or :class:`SchemaError`."""
    path = find_judged_file(folder, name)
    if path is None:
        beir = f" or {name}/{_BEIR_SPLIT}.tsv" if name == "qrels" else ""
        raise SourceError(
            f"a judged set must hold {name}.parquet, .arrow, .jsonl, .csv or .tsv{beir}, got none in "
            f"{str(folder)!r}; add it, or give documents alone and --known-items 300"
        )
    columns = (_REQUIRED[name], _OPTIONAL[name]) if only is None else ((only,),)
    table = read_columns(resolve_sources([str(path)])[0], *columns)
    if not table.num_rows:
        raise SourceError(f"{path.name} must hold at least one row, got none; add some")
    return table


def corpus_files(path: Path) -> Sequence[SourceFile]:
    """Return the files with documents: the corpus of a judged set, else all that ``ingest`` would read."""
    corpus = find_judged_file(path, "corpus")
    return resolve_sources([str(corpus or path)])


def read_columns(file: SourceFile, required: Sequence[str], optional: Sequence[str] = ()) -> pa.Table:
    """Read columns of a file whole, those of ``optional`` where it has them."""
    config = CorpusConfig()
    try:
        footer = file.format.read_footer(file, config)
    except DECODE_ERRORS as error:
        file.require_reachable(error)
        raise _damaged(file, damage_of(error)) from error
    names = {name: _name_in(footer.schema, name) for name in (*required, *optional)}
    present = {name: found for name, found in names.items() if found is not None}
    for found in present.values():
        if footer.schema.names.count(found) > 1:
            raise SchemaError(f"{_shown(file)} must have one column {found}, got several; rename the others")
    types = {
        found: _type_read(file, name, footer.schema.field(found).type) for name, found in present.items()
    }
    batches = list(_batches(file, types, config))
    missing = [name for name in required if names[name] is None]
    if missing and footer.num_rows:
        raise SchemaError(
            f"{_shown(file)} must have the columns {', '.join(required)}, missing: {', '.join(missing)}; "
            f"it has {', '.join(footer.schema.names[:MAX_SHOWN])}: rename or add them"
        )
    try:
        return _as_table(batches, {name: (found, types[found]) for name, found in present.items()})
    except DECODE_ERRORS as error:
        raise _damaged(file, damage_of(error)) from error


def read_vector_column(folder: Path, name: JudgedFile, column: str) -> pa.Array:
    """Return a column of vectors, a value a row, of a file that :func:`read_judged_file` has read."""
    path = find_judged_file(folder, name)
    assert path is not None, "the file was read before"
    file, config = resolve_sources([str(path)])[0], CorpusConfig(vector_column=column)
    schema = file.format.read_footer(file, config).schema
    if schema.names.count(column) != 1 or not is_vector_column(schema.field(column).type):
        raise SchemaError(
            f"{path.name} must have one column {column!r} of vectors, lists of numbers, got columns "
            f"{', '.join(schema.names[:MAX_SHOWN])}; name another with --vector-column"
        )
    batches = _batches(file, {column: read_type(schema.field(column))}, config)
    return pa.chunked_array([batch.column(column) for batch in batches]).combine_chunks()


def _batches(
    file: SourceFile, types: Mapping[str, pa.DataType], config: CorpusConfig
) -> Iterator[pa.RecordBatch]:
    for item in damage_reported(file, file.format.read(file, types, config)):
        if isinstance(item, Undecoded):
            raise _damaged(file, item.detail)
        if FAULT in item.schema.names and (faults := item.column(FAULT).drop_null()):
            raise _damaged(file, faults[0].as_py().partition(" ")[2])
        yield item


def _as_table(batches: Sequence[pa.RecordBatch], columns: Mapping[str, tuple[str, pa.DataType]]) -> pa.Table:
    """Return columns by their names here, given with their names and types in the file, as plain types."""
    schema = pa.schema([(name, stored_type(kind) or kind) for name, (_, kind) in columns.items()])
    parts: list[pa.RecordBatch] = []
    for batch in batches:
        arrays: list[pa.Array] = []
        for field in schema:
            array, bad = fitted(without_views(batch.column(columns[field.name][0])), field.type)
            if bad is not None and bad.any():
                raise ValueError(f"column {field.name!r} must hold {field.type}")
            arrays.append(array)
        parts.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
    table = pa.Table.from_batches(parts, schema)
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        _require_unicode(table)
        raise
    return table


def _require_unicode(table: pa.Table) -> None:
    for name, row in product(table.column_names, range(table.num_rows)):
        try:
            table.column(name).slice(row, 1).validate(full=True)
        except pa.ArrowInvalid as error:
            raise ValueError(f"column {name!r} of row {row + 1} is not valid Unicode") from error


def _in_any_format(folder: Path, stem: str) -> Iterator[Path]:
    for each in FORMATS:
        for suffix in () if each.is_document else each.suffixes:
            for end in ("", *COMPRESSED) if each.is_compressible else ("",):
                path = folder / f"{stem}{suffix}{end}"
                if path.is_file():
                    yield path


def _name_in(schema: pa.Schema, name: str) -> str | None:
    return next((each for each in (name, _ALSO_NAMED.get(name)) if each in schema.names), None)


def _type_read(file: SourceFile, name: str, arrow_type: pa.DataType) -> pa.DataType:
    if not isinstance(file.format, CsvFormat):
        has_no_element = is_list(arrow_type) and pa.types.is_null(arrow_type.value_type)
        return pa.list_(pa.string()) if has_no_element else arrow_type
    if name not in _NUMBERS:
        return pa.string()
    return pa.int64() if pa.types.is_null(arrow_type) else arrow_type


def _damaged(file: SourceFile, detail: str) -> SourceError:
    return SourceError(f"{_shown(file)} must be a file that can be read whole, got: {detail}; write it again")


def _shown(file: SourceFile) -> str:
    return file.name.rpartition("/")[2]
