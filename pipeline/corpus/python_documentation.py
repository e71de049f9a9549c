"""The documentation that every Python carries, as documents of the sample corpus.

Stands below ``sample``, which chooses among these documents and writes them. The library is parsed, never
imported, so nothing runs, no window opens, and platform-specific modules are read too. Documentation that
only exists in C modules is left out, as are tests, private names and Cairn's own description.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

from cairn.pipeline.config import SampleKind
from cairn.pipeline.types import ProgressListener

OWN_DISTRIBUTION = "cairn-index"
PROGRESS_EVERY_MODULES = 50
EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test"}  # tests speak about themselves
    | {"idlelib", "turtledemo", "lib2to3", "_bundled"}  # applications, not documentation
    | {"encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}  # not written for readers
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleDocument:
    """One row of the sample.

    ``signature`` heads the text of a class, function or method and is empty elsewhere.
    """

    id: str
    title: str
    body: str
    kind: SampleKind
    package: str
    signature: str = ""
    module: str | None = None
    lineno: int | None = None

    @property
    def text(self) -> str:
        """Return what is indexed."""
        return f"{self.signature}\n\n{self.body}" if self.signature else self.body


def _clean(text: str) -> str:
    """Undo indentation, and replace lone surrogates: a docstring can spell them, UTF-8 cannot."""
    return inspect.cleandoc(text).strip().encode("utf-8", "replace").decode()


def python_topics() -> Iterator[SampleDocument]:
    """Yield the topics behind ``help("...")``."""
    for key, text in sorted(topics.items()):
        body = _clean(text)
        heading, _, rest = body.partition("\n")
        is_heading = bool(re.match(r"([*=-])\1{2,}$", rest.partition("\n")[0]))
        yield SampleDocument(
            id=f"topic/{key}", title=heading if is_heading else key, body=body, kind="topic", package="python"
        )


def python_distributions() -> Iterator[SampleDocument]:
    """Yield the description of each installed distribution, the first where a name comes twice."""
    documents: dict[str, SampleDocument] = {}
    # Not all of sys.path: packages put folders of their own on it when they are imported, with other versions
    # of the same distributions.
    folders = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    for distribution in importlib.metadata.distributions(path=list(folders)):
        if not (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")):
            continue  # an uninstall that stopped halfway leaves an empty folder behind
        metadata = distribution.metadata.json
        name, summary = str(metadata.get("name", "")), str(metadata.get("summary", ""))
        key = f"dist/{re.sub(r'[-_.]+', '-', name).lower()}"
        if name and name != OWN_DISTRIBUTION and key not in documents:
            title = _clean(f"{name}: {summary}" if summary not in ("", "UNKNOWN") else name)
            body = _clean(str(metadata.get("description", "")))
            documents[key] = SampleDocument(id=key, title=title, body=body, kind="distribution", package=name)
    yield from (documents[key] for key in sorted(documents))


def python_library(progress: ProgressListener, unparsable: list[str]) -> Iterator[SampleDocument]:
    """Yield, module by module, its page and then its public classes, functions and methods."""
    sources = _library_sources()
    for position, (module, path) in enumerate(sources):
        if position % PROGRESS_EVERY_MODULES == 0:
            progress("sample", position, len(sources), "modules")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the library's own deprecated escapes
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            unparsable.append(str(path))
            continue
        yield from _module_documents(module, tree)
    progress("sample", len(sources), len(sources), "modules")


def _library_sources() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    sources: list[tuple[str, Path]] = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        names = parts[:-1] if parts[-1] == "__init__" else parts
        if EXCLUDED_FOLDERS.isdisjoint(parts) and all(
            name.isidentifier() and name != "__main__" for name in names
        ):
            sources.append((".".join(names), path))
    return sorted(sources)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Definition:
    name: str
    kind: Literal["class", "function", "method"]
    signature: str
    docstring: str
    lineno: int


def _module_documents(module: str, tree: ast.Module) -> Iterator[SampleDocument]:
    definitions: dict[str, _Definition] = {}
    for definition in _definitions(tree.body, ()):
        definitions.setdefault(definition.name, definition)  # of variants, the first documented one
    package = module.partition(".")[0]
    docstring = _clean(ast.get_docstring(tree) or "")
    if docstring or len(definitions) > 1:  # otherwise the page would repeat its only definition
        sections = [docstring] if docstring else []
        sections += [f"{item.signature}\n\n{item.docstring}" for item in definitions.values()]
        body = "\n\n".join(sections)
        yield SampleDocument(
            id=f"stdlib/{module}",
            title=module,
            body=body,
            kind="module",
            package=package,
            module=module,
            lineno=1,
        )
    for item in definitions.values():
        yield SampleDocument(
            id=f"stdlib/{module}.{item.name}",
            title=f"{module}.{item.name}",
            body=item.docstring,
            kind=item.kind,
            package=package,
            signature=item.signature,
            module=module,
            lineno=item.lineno,
        )


def _definitions(body: Sequence[ast.stmt], parents: tuple[str, ...]) -> Iterator[_Definition]:
    """Yield public, documented definitions in source order, also those behind ``if``, ``try`` and ``with``.

    Functions are not entered.
    """
    for node in body:
        match node:
            case ast.ClassDef(name=name) if not name.startswith("_"):
                bases = ", ".join(ast.unparse(base) for base in node.bases)
                qualified = ".".join((*parents, name))
                signature = f"class {qualified}({bases})" if bases else f"class {qualified}"
                yield from _documented(node, qualified, "class", signature)
                yield from _definitions(node.body, (*parents, name))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if not name.startswith("_"):
                qualified = ".".join((*parents, name))
                returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
                keyword = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
                yield from _documented(
                    node,
                    qualified,
                    "method" if parents else "function",
                    f"{keyword}{qualified}({ast.unparse(node.args)}){returns}",
                )
            case ast.If() | ast.Try() | ast.With():
                yield from _definitions(_branches(node), parents)
            case _:
                pass


def _branches(node: ast.If | ast.Try | ast.With) -> list[ast.stmt]:
    handlers = [statement for handler in getattr(node, "handlers", []) for statement in handler.body]
    return [*node.body, *handlers, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]


def _documented(
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
    name: str,
    kind: Literal["class", "function", "method"],
    signature: str,
) -> Iterator[_Definition]:
    docstring = _clean(ast.get_docstring(node) or "")
    if docstring:
        yield _Definition(
            name=name, kind=kind, signature=_clean(signature), docstring=docstring, lineno=node.lineno
        )
