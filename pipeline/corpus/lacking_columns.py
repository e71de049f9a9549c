"""Columns that a file may lack: its rows have nulls there.

    new collection    documents, such as Markdown, have the columns that any of them has in its front matter
    stored columns    every file has those; of further ones, documents leave theirs out with a warning

Values of documents have no type of their own. Numbers beside texts are texts, and a single value beside lists
is a list of one. A value that does not fit a stored column is left out with a warning, so that one changed
file never stops an ingest. Metadata columns that the settings name must be in every other file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats.values import joined
from cairn.pipeline.corpus.sources import DOCUMENTS, SourceFile
from cairn.pipeline.types import RESERVED_COLUMNS

Schemas = Sequence[tuple[SourceFile, pa.Schema]]
_SHOWN_NAMES: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """The schemas of all files with the columns that some lack, and sentences on what is left out."""

    schemas: Schemas
    warnings: tuple[str, ...] = ()


def completed(files: Schemas, config: CorpusConfig, stored: Sequence[pa.Field] | None) -> Completed:
    """Add to each schema the columns that its file may lack.

    ``stored`` are the metadata columns of the collection, None where nothing is published.
    """
    of_documents = [(file, schema) for file, schema in files if file.format in DOCUMENTS]
    types, warnings = _document_types(of_documents, config, stored)
    others = [schema for file, schema in files if file.format not in DOCUMENTS]
    for name in dict.fromkeys(name for schema in others for name in schema.names):
        types.setdefault(name, pa.null())
    document_schema = pa.schema([*types.items()])
    folders = {key for file, _ in files for key, _ in file.partitions}
    missing = [
        field for field in stored or () if config.metadata_columns is None and field.name not in folders
    ]
    schemas = [
        (file, document_schema if file.format in DOCUMENTS else _with_stored(schema, missing))
        for file, schema in files
    ]
    return Completed(schemas=schemas, warnings=warnings)


def is_read(file: SourceFile, schema: pa.Schema, field: pa.Field) -> bool:
    """Say whether a file, by its own schema, has values for a metadata column."""
    if field.name not in schema.names:
        return False
    own = schema.field(field.name).type
    return file.format not in DOCUMENTS or _joined(field.type, own) == field.type


def _document_types(
    documents: Schemas, config: CorpusConfig, stored: Sequence[pa.Field] | None
) -> tuple[dict[str, pa.DataType], tuple[str, ...]]:
    """Return the columns of all documents, and warnings about those that the collection does not take."""
    types: dict[str, pa.DataType] = {}
    for _, schema in documents:
        for name, own in zip(schema.names, schema.types, strict=True):
            types[name] = _joined(types[name], own) if name in types else own
    roles = {config.id_column, config.text_column, config.title_column or "title", config.query_column}
    types = {
        name: each
        for name, each in types.items()
        if name in roles or not (_is_empty(each) or name in RESERVED_COLUMNS)
    }
    if stored is None or not documents:
        return types, ()
    kept = {field.name: field.type for field in stored}
    further = [name for name in types if name not in {*kept, *roles, "id"} and _can_be_stored(types[name])]
    warnings = tuple(_misfits(documents, stored))
    if further and config.metadata_columns is None:
        names = ", ".join(map(repr, further[:_SHOWN_NAMES])) + (", …" if len(further) > _SHOWN_NAMES else "")
        sentence = f"the collection has no column {names}: left out; ingest into a new collection to keep it"
        types = {name: each for name, each in types.items() if name not in further}
        warnings = (sentence, *warnings)
    return {name: each for name, each in types.items() if name not in kept} | kept, warnings


def _misfits(documents: Schemas, stored: Sequence[pa.Field]) -> Iterator[str]:
    """Say of each stored column which documents have values that do not fit."""
    for field in stored:
        names = [
            file.name
            for file, schema in documents
            if field.name in schema.names and not is_read(file, schema, field)
        ]
        if names:
            others = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            yield (
                f"column {field.name!r} of the collection is of type {field.type}: the value in {names[0]}"
                f"{others} is left out"
            )


def _is_empty(arrow_type: pa.DataType) -> bool:
    return pa.types.is_null(arrow_type.value_type if pa.types.is_list(arrow_type) else arrow_type)


def _can_be_stored(arrow_type: pa.DataType) -> bool:
    return not pa.types.is_struct(arrow_type)


def _with_stored(schema: pa.Schema, stored: Sequence[pa.Field]) -> pa.Schema:
    for field in stored:
        if field.name not in schema.names:
            schema = schema.append(field)
        elif pa.types.is_null(schema.field(field.name).type):
            schema = schema.set(schema.get_field_index(field.name), field)
    return schema


def _joined(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    if any(map(pa.types.is_struct, (first, second))):
        return joined(first, second)
    if pa.types.is_list(first) and not (pa.types.is_nested(second) or pa.types.is_null(second)):
        second = pa.list_(second)
    elif pa.types.is_list(second) and not (pa.types.is_nested(first) or pa.types.is_null(first)):
        first = pa.list_(first)
    return joined(first, second)
