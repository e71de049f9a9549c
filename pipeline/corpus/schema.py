"""Which columns a corpus has, agreed over all its files before any row is read.

Second step of stage 1, on Arrow schemas alone. Files may differ in what does not change a value (``string``
and ``large_string``, a dictionary, the width of an integer or a float, a column that is null throughout);
everything else is drift and refused with the file and the column named. It does not cast data.

Columns that a file may lack; its rows have nulls there:

    new collection    documents, such as Markdown, have the columns that any of them has in its front matter
    stored columns    every file has those; of further ones, documents leave theirs out with a warning

Values of documents have no type of their own. Numbers beside texts are texts, and a single value beside lists
is a list of one. A value that does not fit a stored column is left out with a warning, so that one changed
file never stops an ingest. Metadata columns that the settings name must be in every other file.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats.format import SourceFile
from cairn.pipeline.corpus.formats.values import OBJECT, joined
from cairn.pipeline.errors import SchemaError
from cairn.pipeline.types import RESERVED_COLUMNS, is_filterable

KEEP_HINT = (
    "name the metadata columns to keep without it (--metadata-columns, in Python metadata_columns), "
    "or rename it"
)
_SHOWN_NAMES: Final = 5
Schemas = Sequence[tuple[SourceFile, pa.Schema]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSchema:
    """What every file of the corpus is read as.

    ``roles`` maps the stored name of id, title, text and query to its column; title and query may have none.
    ``partition_keys`` are the metadata that come from folder names.
    """

    roles: Mapping[str, str]
    metadata_fields: tuple[pa.Field, ...]
    partition_keys: frozenset[str]
    warnings: tuple[str, ...]


def is_text(arrow_type: pa.DataType) -> bool:
    """Tell whether values are strings, however they are stored."""
    if pa.types.is_dictionary(arrow_type):
        return is_text(arrow_type.value_type)
    return (
        pa.types.is_string(arrow_type)
        or pa.types.is_large_string(arrow_type)
        or pa.types.is_string_view(arrow_type)
    )


def stored_type(arrow_type: pa.DataType) -> pa.DataType | None:
    """Return the type a metadata column is stored as, None when it is not kept."""
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        element = _stored_scalar(arrow_type.value_type)
        return None if element is None else pa.list_(element)
    if pa.types.is_fixed_size_list(arrow_type):
        element = _stored_scalar(arrow_type.value_type)
        return (
            None
            if element is None or pa.types.is_string(element)
            else pa.list_(element, arrow_type.list_size)
        )
    return _stored_scalar(arrow_type)


def _stored_scalar(arrow_type: pa.DataType) -> pa.DataType | None:
    if is_text(arrow_type):
        return pa.string()
    if pa.types.is_dictionary(arrow_type):
        return _stored_scalar(arrow_type.value_type)
    checks = (
        pa.types.is_boolean,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_decimal,
        pa.types.is_date,
        pa.types.is_timestamp,
    )
    return arrow_type if any(check(arrow_type) for check in checks) else None


def widened(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Return the type that holds the values of both unchanged, None when there is none."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if pa.types.is_floating(first) and pa.types.is_floating(second):
        return first if first.bit_width >= second.bit_width else second
    if pa.types.is_integer(first) and pa.types.is_integer(second):
        if pa.types.is_signed_integer(first) == pa.types.is_signed_integer(second):
            return first if first.bit_width >= second.bit_width else second
        signed, unsigned = (first, second) if pa.types.is_signed_integer(first) else (second, first)
        wider = {8: pa.int16(), 16: pa.int32(), 32: pa.int64()}.get(unsigned.bit_width)
        return None if wider is None else (signed if signed.bit_width >= wider.bit_width else wider)
    if pa.types.is_list(first) and pa.types.is_list(second):
        element = widened(first.value_type, second.value_type)
        return None if element is None else pa.list_(element)
    return None


def agree_on_schema(
    files: Schemas,
    config: CorpusConfig,
    stored: Sequence[pa.Field] | None = None,
) -> CorpusSchema:
    """Check the schema of every file and resolve the roles and the metadata.

    The first file in scan order sets the columns and their order. ``stored`` are the metadata columns of the
    collection, None of a new one. Raises :class:`SchemaError` naming the file and the column.
    """
    for file, schema in files:
        _refuse_repeated_names(file, schema)
    files, left_out = _completed(files, config, stored)
    warnings = dict.fromkeys(left_out)
    first_file, first_schema = files[0]
    found = {
        "doc_id": config.id_column,
        "title": config.title_column or _detected("title", first_schema, config),
        "text": config.text_column,
        "query": config.query_column or _detected("query", first_schema, config),
    }
    roles = {role: column for role, column in found.items() if column is not None}
    for file, schema in files:
        _check_roles(file, schema, roles)
    partition_types = _partition_types([file for file, _ in files])
    wanted = _metadata_columns(files, config, {*roles.values()}, partition_types, warnings)
    from_folders = frozenset(
        name
        for name in wanted
        if name in partition_types and all(name not in schema.names for _, schema in files)
    )
    warnings.update(
        dict.fromkeys(
            f"column {name!r} is read from the files, not from the folder names"
            for name in wanted
            if name in partition_types and name not in from_folders
        )
    )
    fields: list[pa.Field] = []
    for name in wanted:
        if name in RESERVED_COLUMNS:
            raise SchemaError(
                f"metadata columns must not carry a reserved name, got {name!r} in {first_file.name}; "
                f"{KEEP_HINT}"
            )
        if name in from_folders:
            _check_partition(name, [file for file, _ in files])
            fields.append(pa.field(name, partition_types[name]))
            continue
        arrow_type = _metadata_type(name, files, must_keep=config.metadata_columns is not None)
        if isinstance(arrow_type, str):
            warnings[arrow_type] = None
        else:
            fields.append(pa.field(name, arrow_type))
    others = [f"{field.name!r} ({field.type})" for field in fields if not is_filterable(field.type)]
    if others:
        warnings[f"filters cannot name {', '.join(others)}; the values are kept and shown"] = None
    return CorpusSchema(
        roles=roles, metadata_fields=tuple(fields), partition_keys=from_folders, warnings=tuple(warnings)
    )


def _metadata_columns(
    files: Schemas,
    config: CorpusConfig,
    roles: set[str],
    partition_types: Iterable[str],
    warnings: dict[str, None],
) -> list[str]:
    """Return the metadata columns that the settings name, or else all that every file has."""
    if config.metadata_columns is not None:
        for name in config.metadata_columns:
            if name in roles:
                sentence = (
                    f"metadata column {name!r} is already stored in another role; it is not stored twice"
                )
                warnings[sentence] = None
        return [name for name in dict.fromkeys(config.metadata_columns) if name not in roles]
    first_file, first_schema = files[0]
    candidates = [
        name for name in dict.fromkeys((*first_schema.names, *partition_types)) if name not in roles
    ]
    for file, schema in files:
        _refuse_unshared(file, schema, first_file, candidates, {*roles, *partition_types})
    return candidates


def _detected(name: str, schema: pa.Schema, config: CorpusConfig) -> str | None:
    if (
        name in (config.id_column, config.text_column, config.title_column, config.query_column)
        or name not in schema.names
    ):
        return None
    return name if is_text(schema.field(name).type) else None


def _refuse_repeated_names(file: SourceFile, schema: pa.Schema) -> None:
    repeated = sorted(name for name, count in Counter(schema.names).items() if count > 1)
    if repeated:
        raise SchemaError(
            f"column names must be unique, got {repeated[0]!r} more than once in {file.name}; rename one "
            "of them"
        )


def _check_roles(file: SourceFile, schema: pa.Schema, roles: Mapping[str, str]) -> None:
    for role, column in roles.items():
        label = "id" if role == "doc_id" else role
        _require_column(label, column, file, schema, f"{label}-column")
        arrow_type = schema.field(column).type
        if (
            is_text(arrow_type)
            or pa.types.is_null(arrow_type)
            or (role == "doc_id" and pa.types.is_integer(arrow_type))
            # Numbers of such a file are written texts.
            or (not file.format.is_typed and not pa.types.is_nested(arrow_type))
        ):
            continue
        expected = "string or integer" if role == "doc_id" else "string"
        raise SchemaError(
            f"{label} column {column!r} must be of type {expected}, got {arrow_type} in {file.name}; "
            f"name another with --{label}-column, in Python with {label}_column"
        )


def _require_column(kind: str, column: str, file: SourceFile, schema: pa.Schema, option: str) -> None:
    if column in schema.names:
        return
    available = sorted(schema.names)
    close = difflib.get_close_matches(column, available, n=1, cutoff=0.4)
    suggestion = f"did you mean {close[0]!r}? " if close else ""
    shown = ", ".join(available[:50]) + (", …" if len(available) > 50 else "")
    raise SchemaError(
        f"{kind} column {column!r} must be in every file, got none in {file.name}, which has: {shown}; "
        f"{suggestion}name the right one with --{option}, in Python with {option.replace('-', '_')}"
    )


def _refuse_unshared(
    file: SourceFile, schema: pa.Schema, first_file: SourceFile, candidates: Sequence[str], known: set[str]
) -> None:
    for name in {**dict.fromkeys(candidates), **dict.fromkeys(schema.names)}:
        if name not in known and (name in schema.names) != (name in candidates):
            got = f"none in {file.name} ({first_file.name} has it)"
            if name in schema.names:
                got = f"it in {file.name} but not in {first_file.name}"
            raise SchemaError(f"column {name!r} must be in every file, got {got}; {KEEP_HINT}")


def _metadata_type(name: str, files: Schemas, *, must_keep: bool) -> pa.DataType | str:
    """Return the type all files agree on, or the warning that says why the column is left out."""
    agreed: pa.DataType = pa.null()
    is_inferred = all(not file.format.is_typed for file, _ in files)
    left_out: tuple[pa.DataType, SourceFile] | None = None
    for file, schema in files:
        _require_column("metadata", name, file, schema, "metadata-columns")
        raw = schema.field(name).type
        if pa.types.is_null(raw):
            continue
        kept = stored_type(raw)
        if kept is None:
            left_out = left_out or (raw, file)
            continue
        wider = joined(agreed, kept) if is_inferred else widened(agreed, kept)
        if wider is None or pa.types.is_struct(wider):
            raise SchemaError(
                f"column {name!r} must have one type in all files, got {raw} in {file.name} and {agreed} "
                f"in the files before; {KEEP_HINT}"
            )
        agreed = wider
    if left_out is not None and not pa.types.is_null(agreed):
        raise SchemaError(
            f"column {name!r} must have one type in all files, got {left_out[0]} in {left_out[1].name} "
            f"and {agreed} elsewhere; {KEEP_HINT}"
        )
    problem = None
    if "." in name or not name.strip():
        problem = (
            f"column {name!r} of {files[0][0].name} cannot be stored: a name must not be blank or hold a dot"
        )
    elif pa.types.is_null(agreed):
        reason = "it is null throughout"
        if left_out is not None:
            nested = left_out[0] == OBJECT
            reason = "it holds objects or nested lists" if nested else f"its type is {left_out[0]}"
        problem = f"column {name!r} of {files[0][0].name} cannot be stored: {reason}"
    if problem is None:
        return agreed
    if must_keep:
        raise SchemaError(f"{problem}; take it out of the metadata columns or convert it")
    return f"{problem}; it is left out"


def _partition_types(files: Sequence[SourceFile]) -> dict[str, pa.DataType]:
    """Type each partition key: int64 when every value is an integer written plainly, string otherwise."""
    values: dict[str, set[str]] = {}
    for file in files:
        for key, value in file.partitions:
            values.setdefault(key, set()).update(() if value is None else (value,))
    return {
        key: pa.int64() if seen and all(map(_is_plain_integer, seen)) else pa.string()
        for key, seen in values.items()
    }


def _is_plain_integer(value: str) -> bool:
    # "007" stays a string: as a number it would lose its zeros.
    return (
        value.lstrip("-").isascii()
        and value.lstrip("-").isdigit()
        and len(value) < 19
        and str(int(value)) == value
    )


def _check_partition(name: str, files: Sequence[SourceFile]) -> None:
    for file in files:
        if name not in dict(file.partitions):
            raise SchemaError(
                f"partition {name!r} must be in the path of every file, got none in {file.name}; {KEEP_HINT}"
            )


def _completed(
    files: Schemas, config: CorpusConfig, stored: Sequence[pa.Field] | None
) -> tuple[Schemas, Sequence[str]]:
    """Add to each schema the columns that its file may lack, and say what is left out.

    ``stored`` are the metadata columns of the collection, None where nothing is published.
    """
    of_documents = [(file, schema) for file, schema in files if file.format.is_document]
    types, warnings = _document_types(of_documents, config, stored)
    others = [schema for file, schema in files if not file.format.is_document]
    for name in dict.fromkeys(name for schema in others for name in schema.names):
        types.setdefault(name, pa.null())
    document_schema = pa.schema([*types.items()])
    folders = {key for file, _ in files for key, _ in file.partitions}
    missing = [
        field for field in stored or () if config.metadata_columns is None and field.name not in folders
    ]
    schemas = [
        (file, document_schema if file.format.is_document else _with_stored(schema, missing))
        for file, schema in files
    ]
    return schemas, warnings


def is_read(file: SourceFile, schema: pa.Schema, field: pa.Field) -> bool:
    """Say whether a file, by its own schema, has values for a metadata column."""
    if field.name not in schema.names:
        return False
    own = schema.field(field.name).type
    return not file.format.is_document or _joined(field.type, own) == field.type


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
