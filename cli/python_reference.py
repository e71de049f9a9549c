"""The reference page of the Python library: signatures and docstrings of the public names of ``cairn``.

Used by ``cli/reference.py``. Names that begin with an underscore are left out.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, Final

import cairn

MAX_SIGNATURE: Final = 100
"""Characters of a signature that stands in one line."""
_ROLE: Final = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")
_LITERAL: Final = re.compile(r"``([^`]+)``")


def python_library() -> Iterator[str]:
    """Yield the lines of the page."""
    from cairn.pipeline.client import AsyncRemoteCollection, RemoteCollection
    from cairn.pipeline.search.documents import StoredDocuments

    yield "Import these names from `cairn`. Options of a search are listed at the end.\n"
    shown = {name: getattr(cairn, name) for name in cairn.__all__ if not name.startswith("__")}
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
        yield "| field | type |"
        yield "| --- | --- |"
        for field in dataclasses.fields(found):
            yield f"| `{field.name}` | `{_type(field.type)}` |"
        yield ""
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
        kind = "" if each.annotation is each.empty else f": {_type(each.annotation)}"
        shown = f"{stars}{each.name}{kind}"
        parts.append(shown if each.default is each.empty else f"{shown} = {_value(each.default)}")
    result = signature.return_annotation
    end = ")" if result in (signature.empty, None, "None") else f") -> {_type(result)}"
    name = f"async {name}" if inspect.iscoroutinefunction(found) else name
    line = f"{name}({', '.join(parts)}{end}"
    if len(line) > MAX_SIGNATURE:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + end
    yield f"```python\n{line}\n```\n"


def _type(annotation: Any) -> str:
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
    yield "| option | default | what it does |"
    yield "| --- | --- | --- |"
    for name, each in options_of(SearchOptions).items():
        if each.about.help:
            default = each.about.default_text or _value(each.default)
            yield f"| `{name}` | `{default}` | {each.about.help} |"
    yield ""
