"""The reference pages: verbs and options as click has them, the API as OpenAPI does, the library's names.

    python -m tests.docs.reference_pages docs/reference         which `make reference` does; a test compares

Nothing is described here that is not described there, so the pages cannot say anything else than the program
does.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import cairn as library
import click
from cairn.cli.main import cairn

_INTRODUCTION: Final = (
    "# {title}\n\n{subject} Written by `make reference`: change the program, not this page.\n"
)
_EXIT_CODES: Final = (
    "Exit codes: 0 done, 1 failed, 2 usage, 3 done with quarantined rows, 75 try again, 130 interrupted."
)


def pages() -> dict[str, str]:
    """Return each page's text by the name of its file."""
    return {
        "command-line.md": _page("Command line", "Every verb and option.", _command_line()),
        "http.md": _page("HTTP API", "Every address, field and problem.", _search_api()),
        "python.md": _page("Python library", "Every public name.", python_library()),
    }


def _page(title: str, subject: str, parts: Iterator[str]) -> str:
    introduction = _INTRODUCTION.format(title=title, subject=subject)
    return "\n".join([introduction, *parts]).rstrip("\n") + "\n"


def _command_line() -> Iterator[str]:
    yield f"`ingest` is `cairn ingest`. {_EXIT_CODES}\n"
    context = click.Context(cairn, info_name="cairn")
    for name in cairn.list_commands(context):
        command = cairn.get_command(context, name)
        assert command is not None
        yield from command_reference(command, click.Context(command, info_name=name, parent=context))


def command_reference(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the lines on a command: its help, its usage, a table of its options."""
    yield f"## `{context.command_path}`\n"
    yield f"{_cell(command.help or '')}\n"
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"```\n{usage}\n```\n"
    records = [
        (option, text) for param in command.params for option, text in [_record(param, context)] if text
    ]
    if records:
        yield from _table(
            ("option", "what it does"), [(f"`{_cell(option)}`", _cell(text)) for option, text in records]
        )
    for name, verb in sorted(command.commands.items()) if isinstance(command, click.Group) else ():
        yield from command_reference(verb, click.Context(verb, info_name=name, parent=context))


def _record(param: click.Parameter, context: click.Context) -> tuple[str, str]:
    """Return an option as it is typed and what it does; an argument has none."""
    context.show_default = True
    return param.get_help_record(context) or ("", "")


def _search_api() -> Iterator[str]:
    from cairn.pipeline.serve.app import create_app
    from cairn.pipeline.serve.problems import TYPE_PREFIX, Kind
    from cairn.pipeline.serve.settings import ServeSettings

    description = create_app(ServeSettings(root=Path())).openapi()
    schemas: dict[str, Any] = description["components"]["schemas"]
    yield f"{description['info']['description']} The same as JSON: `GET /openapi.json`.\n"
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            yield from _operation(method.upper(), path, operation, schemas)
    yield "## Fields\n"
    for name in sorted(schemas):
        if "properties" in schemas[name]:
            yield from _schema(name, schemas[name])
    yield "## Problems\n"
    rows = [
        (
            f"`{TYPE_PREFIX}{kind.code}`",
            str(kind.status),
            kind.title,
            "" if kind.retry_seconds is None else f"{kind.retry_seconds} s",
        )
        for kind in sorted(Kind, key=lambda kind: (kind.status, kind.code))
    ]
    yield from _table(("`type`", "status", "title", "`Retry-After`"), rows)


def _operation(
    method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[str]:
    yield f"## `{method} {path}`\n"
    yield f"{_cell(operation.get('description') or operation.get('summary', ''))}\n"
    rows = [
        (f"`{each['name']}`", each["in"], _type(each["schema"]), _cell(each.get("description", "")))
        for each in operation.get("parameters", [])
    ]
    if rows:
        yield from _table(("parameter", "in", "type", "what it is"), rows)
    body = _json_schema(operation.get("requestBody", {}))
    if body is not None:
        yield f"Body: {_type(body)}.\n"
        for example in schemas[body["$ref"].rpartition("/")[2]].get("examples", []):
            line = (
                f"curl -s localhost:8400{_shown(path)} -H 'Content-Type: application/json' -d "
                f"{shlex.quote(json.dumps(example))}"
            )
            yield f"```\n{line}\n```\n"
    reply = _json_schema(operation["responses"].get("200", {}))
    if reply is not None and reply:
        yield f"Answer: {_type(reply)}.\n"


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name}\n"
    if schema.get("description"):
        yield f"{_cell(schema['description'])}\n"
    required = set(schema.get("required", []))
    rows = [
        (
            f"`{field}`",
            _type(about),
            "required"
            if field in required
            else f"`{json.dumps(about['default'])}`"
            if "default" in about
            else "",
            _cell(about.get("description", "")),
        )
        for field, about in schema["properties"].items()
    ]
    yield from _table(("field", "type", "default", "what it is"), rows)


def _json_schema(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return content.get("content", {}).get("application/json", {}).get("schema")


def _type(schema: Mapping[str, Any]) -> str:
    """Say a schema's type and limits in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name == "JsonValue":  # it says nothing, and has no section
            return "any JSON"
        return f"[{name}](#{name.lower()})"
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[choice]))
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}" + _limits(schema, "minItems", "maxItems", "items")
    if schema.get("type") == "string":
        return "string" + _limits(schema, "minLength", "maxLength", "characters")
    return str(schema.get("type", "any")) + _limits(schema, "minimum", "maximum", "")


def _limits(schema: Mapping[str, Any], low: str, high: str, unit: str) -> str:
    least, most = (
        f"{limit:g}" if isinstance(limit := schema.get(name), float) else limit for name in (low, high)
    )
    if least is None and most is None:
        return ""
    said = (
        f"{least} to {most}"
        if least is not None and most is not None
        else f"at least {least}"
        if most is None
        else f"at most {most}"
    )
    return f" ({said} {unit})" if unit else f" ({said})"


def _shown(path: str) -> str:
    return re.sub(r"\{\w+\}", "NAME", path)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


MAX_SIGNATURE: Final = 100
"""Characters of a signature that stands in one line."""
_ROLE: Final = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")
_LITERAL: Final = re.compile(r"``([^`]+)``")


def python_library() -> Iterator[str]:
    """Yield the lines of the page."""
    from cairn.pipeline.client.clients import AsyncRemoteCollection, RemoteCollection
    from cairn.pipeline.search.contents import StoredDocuments

    yield "Import these names from `cairn`. Options of a search are listed at the end.\n"
    shown = {name: getattr(library, name) for name in library.__all__ if not name.startswith("__")}
    for name, found in sorted(shown.items(), key=lambda item: item[0].lower()):
        yield from _described(name, found)
    yield "## Returned by these\n"
    for kind in (AsyncRemoteCollection, RemoteCollection, StoredDocuments):
        yield from _described(kind.__name__, kind)
    yield from _search_options()


def _described(name: str, found: Any) -> Iterator[str]:
    yield f"## `{name}`\n"
    if not inspect.isclass(found):
        yield from _signature(name, found)
        yield f"{_text(found)}\n"
        return
    if dataclasses.is_dataclass(found):
        yield f"{_text(found)}\n"
        rows = [(f"`{each.name}`", f"`{_annotated(each.type)}`") for each in dataclasses.fields(found)]
        yield from _table(("field", "type"), rows)
    else:
        if found.__init__ is not object.__init__ and not issubclass(found, Exception):
            yield from _signature(name, found)
        yield f"{_text(found)}\n"
    for member, value in _members(found):
        yield f"### `{name}.{member}`\n"
        if not isinstance(value, property):
            yield from _signature(member, value)
        yield f"{_text(value)}\n"


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class, its bases' too, by name."""
    for name, value in inspect.getmembers_static(kind):
        member = value if isinstance(value, property) else getattr(kind, name)
        is_shown = inspect.isfunction(member) or inspect.ismethod(member) or isinstance(member, property)
        if is_shown and not name.startswith("_"):
            yield name, member


def _signature(name: str, found: Callable[..., Any]) -> Iterator[str]:
    signature = inspect.signature(found)
    parts: list[str] = []
    kinds = [each.kind for each in signature.parameters.values()]
    for index, each in enumerate(signature.parameters.values()):
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and each.KEYWORD_ONLY not in kinds[:index]:
            parts.append("*")
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        kind = "" if each.annotation is each.empty else f": {_annotated(each.annotation)}"
        shown = f"{stars}{each.name}{kind}"
        parts.append(shown if each.default is each.empty else f"{shown} = {_value(each.default)}")
    result = signature.return_annotation
    end = ")" if result in (signature.empty, None, "None") else f") -> {_annotated(result)}"
    name = f"async {name}" if inspect.iscoroutinefunction(found) else name
    line = f"{name}({', '.join(parts)}{end}"
    if len(line) > MAX_SIGNATURE:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + end
    yield f"```python\n{line}\n```\n"


def _annotated(annotation: Any) -> str:
    return str(annotation if isinstance(annotation, str) else getattr(annotation, "__name__", annotation))


def _value(default: Any) -> str:
    return default.__name__ if callable(default) else repr(default)


def _text(found: Any) -> str:
    """Return a docstring as Markdown."""
    text = textwrap.dedent(inspect.getdoc(found) or "")
    return _LITERAL.sub(r"`\1`", _ROLE.sub(r"`\1`", text))


def _search_options() -> Iterator[str]:
    from cairn.pipeline.options import options_of
    from cairn.pipeline.search_options import SearchOptions

    yield "## Options of a search\n"
    rows = [
        (f"`{name}`", f"`{each.about.default_text or _value(each.default)}`", each.about.help)
        for name, each in options_of(SearchOptions).items()
        if each.about.help
    ]
    yield from _table(("option", "default", "what it does"), rows)


if __name__ == "__main__":
    for file_name, page in pages().items():
        Path(sys.argv[1], file_name).write_text(page, encoding="utf-8")
