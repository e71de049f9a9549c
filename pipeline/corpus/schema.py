"""Which columns a corpus has, agreed over all its files before any row is read.

Second step of stage 1, on Arrow schemas alone. A column has the type that it is stored as, else the one that
holds the values of all files (``columns.joined``); what a value of another type becomes is said there. A file
may lack any column but its id and text: its rows have nulls there.

    left out, with a warning    a column of a type, or with a name, that cannot be stored, or null so far
    stored as ``metadata_…``    a column whose name is one of Cairn's own
    left out by name            a table in a folder that has no id or no text
    quarantined                 a file in a folder whose id or text is of a type that cannot be one
    refused                     what was asked for and is not there, or cannot be stored

A document, such as Markdown, has its id, title and text from the file; its other columns may be asked for as
such in their place. It does not cast data.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.columns import (
    BIG_INTEGERS,
    DECIMALS,
    KINDS,
    LONG_INTEGERS,
    OBJECT,
    OBJECTS,
    TEXTS_OF,
    are_names,
    is_list,
    is_text,
    is_unkept,
    joined,
    kind_of,
    plain_type,
    stored_type,
)
from cairn.pipeline.corpus.formats.format import SourceFile
from cairn.pipeline.corpus.given_vectors import is_vector_column
from cairn.pipeline.errors import SchemaError
from cairn.pipeline.types import GIVEN_VECTORS, RESERVED_COLUMNS, is_filterable

RENAMED: Final = "metadata_"
_WORD: Final = re.compile(r"[^\W_]+")
_REPEATED: Final = {b"cairn.repeated": b"1"}
_SHOWN_COLUMNS: Final = 50
_NULL: Final = "it is null throughout"
_EMPTY: Final = "all of its lists are empty"
MAX_METADATA_COLUMNS: Final = 1_000
"""Of a collection. Every row and every publication pays for each of them, and a refused write for none."""
Schemas = Sequence[tuple[SourceFile, pa.Schema]]


class ColumnError(SchemaError):
    """A file lacks a column, or has it of no use; ``in_file`` is the sentence for one who has no options."""

    def __init__(self, fault: str, which: str, option: str) -> None:
        super().__init__(f"{fault}name {which} with --{option}, in Python with {option.replace('-', '_')}")
        self.in_file = f"{fault}rename {which} in the file"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSchema:
    """What every file of the corpus is read as.

    ``columns`` has for each file the source column of each stored one; None of a file that is left out, for
    the reason in ``left_out``, or whose id, text or the like is ``unusable``.
    """

    metadata_fields: tuple[pa.Field, ...]
    columns: tuple[Mapping[str, str] | None, ...]
    left_out: tuple[tuple[SourceFile, str], ...]
    unusable: tuple[tuple[SourceFile, str], ...]
    warnings: tuple[str, ...]


def role_columns(config: CorpusConfig) -> dict[str, tuple[str | None, str]]:
    """Return the column that is asked for each role, and the usual one."""
    given = config.vector_column
    return {
        "doc_id": (config.id_column, "id"),
        "title": (config.title_column, "title"),
        "text": (config.text_column, "text"),
        "query": (config.query_column, "query"),
        **({} if given is None else {GIVEN_VECTORS: (given, given)}),
    }


def agree_on_schema(
    files: Schemas, config: CorpusConfig, stored: Sequence[pa.Field] | None = None
) -> CorpusSchema:
    """Find the roles and the metadata of every file.

    ``stored`` are the metadata columns of the collection, None of a new one; they come first. Raises
    :class:`SchemaError` naming the file and the column.
    """
    of_documents = {name for file, schema in files if file.format.is_document for name in schema.names}
    columns: list[dict[str, str] | None] = []
    left_out: list[tuple[SourceFile, str]] = []
    errors: list[tuple[pa.Schema, SchemaError]] = []
    unusable: list[tuple[SourceFile, SchemaError]] = []
    for file, schema in files:
        found = _roles(file, schema, config, of_documents)
        needed = [role for role in role_columns(config) if role not in ("title", "query")]
        missing = next((role for role in needed if role not in found), None)
        error = _unusable(file, schema, found) if missing is None else None
        columns.append(None if missing or error else found)
        if missing:
            label, (asked, usual) = _label(missing), role_columns(config)[missing]
            error = _missing(label, asked or usual, [(file, schema)])
            left_out.append((file, f"tables without the {label} column {asked!r}"))
        elif error:
            unusable.append((file, error))
        errors += [(schema, error)] if error else []
        if error and file.is_named:
            raise error
    if errors and all(each is None for each in columns):
        raise errors[0][1]
    read = [(*each, of) for each, of in zip(files, columns, strict=True) if of is not None]
    for role, (asked, usual) in role_columns(config).items():
        if asked not in (None, usual) and files and not any(of.get(role) == asked for _, _, of in read):
            has_it = (error for schema, error in errors if asked in schema.names)
            raise next(has_it, None) or _missing(_label(role), asked, files)
    fields, warnings = _metadata(read, config, stored)
    if fault := too_many_columns(len(fields) - len(stored or ()), len(stored or ())):
        raise SchemaError(f"{fault}; keep fewer with --metadata-columns, in Python with metadata_columns")
    warnings |= dict.fromkeys(_folders_overruled(read, config))
    others = [f"{field.name!r} ({field.type})" for field in fields if not is_filterable(field.type)]
    if others:
        warnings[f"filters cannot name {', '.join(others)}; the values are kept and shown"] = None
    return CorpusSchema(
        metadata_fields=tuple(fields),
        columns=tuple(columns),
        left_out=tuple(left_out),
        unusable=tuple((file, str(error)) for file, error in unusable),
        warnings=tuple(warnings),
    )


def _roles(
    file: SourceFile, schema: pa.Schema, config: CorpusConfig, of_documents: Collection[str]
) -> dict[str, str]:
    found: dict[str, str] = {}
    counts = Counter(schema.names)
    for role, (asked, usual) in role_columns(config).items():
        if file.format.is_document:
            name = asked if asked is not None and asked in of_documents else usual
            if name in schema.names or (name == asked != usual):
                found[role] = name
            continue
        name = asked or usual
        if name not in counts:
            continue
        if asked is None:
            has_another_role = name in (config.id_column, config.text_column)
            if has_another_role or counts[name] > 1 or not _may_be_text(schema.field(name).type):
                continue
        found[role] = name
    return found


def _may_be_text(arrow_type: pa.DataType) -> bool:
    return not pa.types.is_nested(arrow_type) and (
        pa.types.is_null(arrow_type) or stored_type(arrow_type) is not None
    )


def _label(role: str) -> str:
    return {"doc_id": "id", GIVEN_VECTORS: "vector"}.get(role, role)


def _unusable(file: SourceFile, schema: pa.Schema, found: Mapping[str, str]) -> SchemaError | None:
    """Return what is wrong with a column that a file has for a role.

    What no file said a type of is judged row by row; a column of vectors is told from others in either.
    """
    for role, column in found.items():
        label = _label(role)
        if schema.names.count(column) > 1:
            return SchemaError(
                f"the name of the {label} column must be unique, got {column!r} more than once in "
                f"{file.name}; rename one of them"
            )
        own = pa.null() if column not in schema.names else schema.field(column).type
        if contract := _contract(role, own, file):
            got = "objects or nested lists" if own == OBJECT else own
            fault = f"{label} column {column!r} must {contract}, got {got} in {file.name}; "
            return ColumnError(fault, "another", f"{label}-column")
    return None


def _contract(role: str, own: pa.DataType, file: SourceFile) -> str | None:
    """Return what a column of a type does not keep in a role, None where it does."""
    if role == GIVEN_VECTORS:
        is_fine = is_vector_column(own)
        return None if is_fine else "hold lists of numbers, or of objects with start, end and vector"
    is_fine = not file.format.is_typed or is_text(own) or pa.types.is_null(own)
    if role == "doc_id":
        return None if is_fine or pa.types.is_integer(own) else "be of type string or integer"
    is_fine = is_fine or (role != "text" and _may_be_text(own))
    return None if is_fine else "be of type string"


def _missing(kind: str, column: str, files: Schemas) -> SchemaError:
    available = sorted({name for _, schema in files for name in schema.names})
    folded = {name.casefold(): name for name in available}
    asked = column.casefold()
    close = [name for name in folded if asked in _WORD.findall(name)]
    close = close or difflib.get_close_matches(asked, folded, n=1, cutoff=0.6)
    is_csv = ".csv" in files[0][0].format.suffixes
    is_odd = is_csv and ("" in folded or len(folded) == 1 or not close)
    suggestion = f"did you mean {folded[close[0]]!r}? " if close and not (is_csv and len(folded) == 1) else ""
    suggestion += "let its first line name the columns, with , ; | or a tab between, or " if is_odd else ""
    if all(file.format.is_document for file, _ in files):
        path = "leave the option out to take paths as ids, " if kind == "id" else ""
        suggestion += f"give documents such a key in their front matter, {path}or "
    if any(column == _index_without_column(schema) for _, schema in files):
        suggestion = "it is an index that pandas keeps beside the columns: write `frame.reset_index()`, or "
    shown = ", ".join(available[:_SHOWN_COLUMNS]) + (", …" if len(available) > _SHOWN_COLUMNS else "")
    option = "metadata-columns" if kind == "metadata" else f"{kind}-column"
    where = files[0][0].name if len(files) == 1 else f"{files[0][0].name} and {len(files) - 1:,} more"
    fault = f"{kind} column {column!r} must be there, got none in {where}, which has: {shown}; {suggestion}"
    return ColumnError(fault, "the right one", option)


def _index_without_column(schema: pa.Schema) -> str | None:
    """Return the name of an index of pandas whose numbers follow from its first one and are not stored."""
    indexes = (schema.pandas_metadata or {}).get("index_columns", ())
    return next(
        (each["name"] for each in indexes if isinstance(each, dict) and each["kind"] == "range"), None
    )


Read = Sequence[tuple[SourceFile, pa.Schema, dict[str, str]]]
"""Files with the source column of each stored one, of which there are those of roles at first."""
Kinds = Mapping[str, Sequence[tuple[SourceFile, pa.Field, dict[str, str]]]]


def _metadata(
    read: Read, config: CorpusConfig, stored: Sequence[pa.Field] | None
) -> tuple[list[pa.Field], dict[str, None]]:
    """Return the metadata columns as they are stored, and what was left out or is named otherwise.

    Each is noted in the columns of the files that have values for it.
    """
    kinds = _kinds(read)
    fields = {field.name: field for field in stored or ()}
    warnings: dict[str, None] = {}
    asked = config.metadata_columns and [name for name in config.metadata_columns if name]
    taken = {name for _, _, of in read for name in of.values()}
    for name in dict.fromkeys(kinds if config.metadata_columns is None else asked or ()):
        if name in taken and name not in kinds:
            warnings[
                f"metadata column {name!r} is already stored in another role; it is not stored twice"
            ] = None
        elif name not in kinds:
            if name not in fields:
                raise _missing("metadata", name, [(file, schema) for file, schema, _ in read])
        elif (target := stored_name(name)) != name and target in kinds:
            warnings[f"column {name!r} is left out: it would be stored as {target!r}, another one"] = None
        else:
            _take(name, kinds[name], fields, warnings, must_keep=asked is not None)
            if target in fields:
                for _, field, columns in kinds[name]:
                    columns |= {target: name} if stored_type(field.type) is not None else {}
    return [*fields.values()], warnings


def _kinds(read: Read) -> Kinds:
    """Return which files have a column, and of which type, for each column that is no role there."""
    found: dict[str, list[tuple[SourceFile, pa.Field, dict[str, str]]]] = {}
    folders: dict[str, set[str]] = {}
    for file, schema, of in read:
        once = {
            name for name, count in Counter(schema.names).items() if count == 1 and name not in of.values()
        }
        for name in schema.names:
            if name in once:
                found.setdefault(name, []).append((file, _without_extension(schema.field(name)), of))
            elif name not in of.values():
                found.setdefault(name, []).append((file, pa.field(name, OBJECT, metadata=_REPEATED), of))
        for key, value in file.partitions:
            if key not in schema.names:
                folders.setdefault(key, set()).update(() if value is None else (value,))
                found.setdefault(key, [])
    for key, values in folders.items():
        file = next(file for file, _, _ in read if key in dict(file.partitions))
        is_number = plain_type(pa.array(values, pa.string())) == pa.int64()
        found[key].append((file, pa.field(key, pa.int64() if is_number else pa.string()), {}))
    return found


def _without_extension(field: pa.Field) -> pa.Field:
    """Return a field, as one that is not stored where only a library knows what its numbers stand for."""
    name = (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()
    is_storable = not name or is_text(field.type) or stored_type(field.type) is None
    return field if is_storable else pa.field(field.name, pa.struct([(name, field.type)]))


def _folders_overruled(read: Read, config: CorpusConfig) -> Iterator[str]:
    """Say of which keys of folders the files have columns, whose values are taken."""
    found: dict[str, list[str]] = {}
    for file, schema, _ in read:
        for key, _ in file.partitions:
            if key in schema.names and (config.metadata_columns is None or key in config.metadata_columns):
                found.setdefault(key, []).append(file.name)
    for key, names in found.items():
        also = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        yield f"column {key!r} of {names[0]}{also} is taken, and not the value of its folder {key}=…"


def _take(
    name: str,
    kinds: Sequence[tuple[SourceFile, pa.Field, object]],
    fields: dict[str, pa.Field],
    warnings: dict[str, None],
    *,
    must_keep: bool,
) -> None:
    """Add the field that a column is stored as, or say why there is none, or of which files it leaves out."""
    storable = [stored_type(field.type) for _, field, _ in kinds]
    lost = [
        (file, field) for file, field, _ in kinds
        if OBJECTS in (field.metadata or {}) or is_unkept(field.type)
    ]  # fmt: skip
    agreed = reduce(joined, (kept for kept in storable if kept is not None), pa.null())
    marks = (
        (field.metadata or {}).get(DECIMALS, b"") for file, field, _ in kinds if not file.format.is_typed
    )
    holds_names = are_names({each.decode() for mark in marks for each in mark.split()})
    met = sorted({kind for file, field, _ in kinds for kind in _value_kinds(file, field)})
    agreed = TEXTS_OF.get(agreed, agreed) if holds_names or LONG_INTEGERS in met else agreed
    target = stored_name(name)
    names = {each[0].name: None for each in lost or kinds}  # a file may have the column twice
    where = next(iter(names))
    also = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    if target in fields:
        problem = None
        kept = fields[target].type
        if holds_names and kept in TEXTS_OF:
            warnings[
                f"column {name!r} of {where} holds versions, and the collection has it as {kept}, so that "
                f"3.10 becomes 3.1; `cairn retype` it to {TEXTS_OF[kept]}, then ingest again with --reread"
            ] = None
    elif is_odd := odd_name(name):
        problem = is_odd
    elif pa.types.is_null(agreed) or pa.types.is_null(getattr(agreed, "value_type", pa.bool_())):
        problem = _why(*lost[0]) if lost else _EMPTY if is_list(agreed) else _NULL
    elif name == "vector" and is_list(agreed):
        problem = "Cairn makes its own vectors, unless --vector-column names them"
    else:
        problem = None
        fields[target] = pa.field(target, agreed)
        if kind_of(agreed) == "texts" and (len(met) > 1 or BIG_INTEGERS in met):
            sentence = f"column {name!r} holds {' and '.join(met)}, as in {where}"
            warnings[f"{sentence}: all are kept as texts, and filters compare them as such"] = None
        if target != name:
            warnings[f"column {name!r} of {where} has a name of Cairn's own: it is stored as {target!r}"] = (
                None
            )
    if problem is not None:
        sentence = f"column {name!r} of {where}{also} cannot be stored: {problem}"
        if must_keep and problem not in (_EMPTY, _NULL):
            raise SchemaError(f"{sentence}; take it out of the metadata columns or convert it")
        if problem != _NULL or any(file.format.is_typed for file, _, _ in kinds):
            warnings[f"{sentence}; it is left out"] = None
    elif lost:
        warnings[f"values of column {name!r} in {where}{also} are left out: {_why(*lost[0])}"] = None


def _value_kinds(file: SourceFile, field: pa.Field) -> Sequence[str]:
    """Return of which kinds the values of a column are; in CSV, numbers may stand among texts."""
    own = kind_of(stored_type(field.type) or field.type) or ""
    kinds = (field.metadata or {}).get(KINDS, own.encode()).decode()
    told = kinds.split(", ") if kinds else ()
    return () if "texts" in told and ".csv" in file.format.suffixes else told


def too_many_columns(num_new: int, num_stored: int) -> str | None:
    """Say that a collection cannot take further metadata columns, None where it can."""
    if num_new <= 0 or num_new + num_stored <= MAX_METADATA_COLUMNS:
        return None
    return (
        f"a collection must have at most {MAX_METADATA_COLUMNS:,} metadata columns, got {num_new:,} new ones "
        f"beside {num_stored:,}"
    )


def stored_name(name: str) -> str:
    """Return the name under which a metadata column is stored."""
    return f"{RENAMED}{name}" if name in RESERVED_COLUMNS else name


def odd_name(name: str) -> str | None:
    """Say why a name can be no column's, None where it can."""
    is_odd = not name.strip() or name == "*" or any(each in name for each in ".`\0")
    return "a name must not be blank or *, or hold a dot, a backtick or a NUL character" if is_odd else None


def _why(file: SourceFile, field: pa.Field) -> str:
    if field.metadata == _REPEATED:
        return "its name stands more than once"
    if told := (field.metadata or {}).get(OBJECTS):
        return f"it holds {told.decode()}{', or aliases' if '.md' in file.format.suffixes else ''}"
    return f"its type is {field.type}"
