"""A real corpus to try Cairn on, made on this machine: the documentation that every Python carries.

Stands before the line: it writes a Parquet file that ``ingest`` reads, with the language reference behind
``help("...")`` (``pydoc_data.topics``), and a page for each module, class and function of the standard
library.

The library is parsed, never imported. Left out are C modules, tests, private names, texts too short to answer
anything and texts already seen. The same interpreter gives the same bytes.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.config import SampleKind
from cairn.pipeline.errors import UsageError
from cairn.pipeline.types import ProgressListener, silent_progress

SAMPLE_FILE = "python.parquet"
_TEXT = ("id", "title", "module", "kind", "package")
SAMPLE_SCHEMA = pa.schema(
    {**dict.fromkeys(_TEXT, pa.string()), "text": pa.large_string(), "lineno": pa.int32()},
    metadata={"cairn": "sample"},  # by this mark a later run knows which files it may replace
)

MIN_BODY_CHARACTERS = 40  # shorter docstrings ("Return self.", "See base class.") answer no question
ROW_GROUP_DOCUMENTS = 256
CHARACTERS_PER_TOKEN = 3.5  # of this corpus under the default model's tokenizer
PROGRESS_EVERY_MODULES = 50
EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test"}  # tests speak about themselves
    | {"idlelib", "turtledemo", "lib2to3", "_bundled"}  # applications, not documentation
    | {"encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}  # not written for readers
)


class SampleDocument(NamedTuple):
    """One row of the sample; ``signature`` heads the text of a class, function or method."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleReport:
    """What was written; ``unparsable_files`` were left out for their syntax."""

    documents: int
    characters: int
    estimated_tokens: int
    kinds: Mapping[str, int]
    files: tuple[Path, ...]
    unparsable_files: tuple[str, ...]


def write_sample(
    folder: Path,
    *,
    kinds: Collection[SampleKind] = (),
    max_documents: int | None = None,
    progress: ProgressListener = silent_progress,
) -> SampleReport:
    """Write the sample corpus into ``folder``, which must be new, empty, or hold an earlier sample.

    ``kinds`` are the kinds of document to keep, () keeps all. ``max_documents`` keeps that many of them,
    drawn by the hash of their ids and in their usual order; None keeps all, some thousands.
    """
    with durable.storage_errors(f"preparing {folder}"):
        _claim_folder(folder)
    unparsable: list[str] = []
    every = _unique(chain(python_topics(), python_library(progress, unparsable)))
    chosen = [document for document in every if not kinds or document.kind in kinds]
    if max_documents is not None:  # drawn by their hashes: one that is added changes at most one of them
        ranked = sorted(chosen, key=lambda document: hashlib.sha256(document.id.encode()).digest())
        drawn = {document.id for document in ranked[:max_documents]}
        chosen = [document for document in chosen if document.id in drawn]
    path = folder / SAMPLE_FILE
    rows = [{name: getattr(document, name) for name in SAMPLE_SCHEMA.names} for document in chosen]
    with durable.storage_errors(f"writing {path}"), durable.replacing(path) as temporary:
        table = pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)
        pq.write_table(table, temporary, row_group_size=ROW_GROUP_DOCUMENTS, compression="zstd")
    characters = sum(len(document.text) for document in chosen)
    return SampleReport(
        documents=len(chosen),
        characters=characters,
        estimated_tokens=round(characters / CHARACTERS_PER_TOKEN),
        kinds=dict(sorted(Counter(document.kind for document in chosen).items())),
        files=(path,),
        unparsable_files=tuple(unparsable),
    )


def _claim_folder(folder: Path) -> None:
    """Create the folder, or make sure that all it holds is an earlier sample, or what a killed run left."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(
            f"the sample's destination must be a folder, got the file {folder}; choose another name"
        )
    folder.mkdir(parents=True, exist_ok=True)
    leftovers = [*folder.glob(f".{SAMPLE_FILE}.*.tmp")]
    for entry in sorted(folder.iterdir()):
        if entry not in leftovers and not _is_sample_file(entry):
            raise UsageError(
                f"the sample's folder must be new, empty or hold an earlier sample, got {folder} with "
                f"{entry.name}; choose another folder"
            )
    for entry in leftovers:
        entry.unlink()


def _is_sample_file(path: Path) -> bool:
    if path.name != SAMPLE_FILE or not path.is_file():
        return False
    try:
        return (pq.read_schema(path).metadata or {}).get(b"cairn") == b"sample"
    except pa.ArrowException:
        return False


def _unique(documents: Iterable[SampleDocument]) -> list[SampleDocument]:
    """Drop short texts, ids already used and bodies already seen, such as inherited docstrings."""
    seen: set[str] = set()
    kept: list[SampleDocument] = []
    for document in documents:
        if len(document.body) >= MIN_BODY_CHARACTERS and seen.isdisjoint((document.id, document.body)):
            seen |= {document.id, document.body}
            kept.append(document)
    return kept


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


def _module_documents(module: str, tree: ast.Module) -> Iterator[SampleDocument]:
    definitions: dict[str, SampleDocument] = {}
    for definition in _definitions(module, tree.body, ()):
        definitions.setdefault(definition.id, definition)  # of variants, the first documented one
    docstring = _clean(ast.get_docstring(tree) or "")
    if docstring or len(definitions) > 1:  # otherwise the page would repeat its only definition
        sections = [docstring] if docstring else []
        yield SampleDocument(
            id=f"stdlib/{module}",
            title=module,
            body="\n\n".join([*sections, *(each.text for each in definitions.values())]),
            kind="module",
            package=module.partition(".")[0],
            module=module,
            lineno=1,
        )
    yield from definitions.values()


def _definitions(module: str, body: Sequence[ast.stmt], parents: tuple[str, ...]) -> Iterator[SampleDocument]:
    """Yield public, documented definitions in source order, also those behind ``if``, ``try`` and ``with``.

    Functions are not entered.
    """
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            handlers = [each for handler in getattr(node, "handlers", []) for each in handler.body]
            branches = [*node.body, *handlers, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            yield from _definitions(module, branches, parents)
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_"):
            continue
        qualified = ".".join((*parents, node.name))
        kind: SampleKind = "class" if isinstance(node, ast.ClassDef) else "method" if parents else "function"
        if docstring := _clean(ast.get_docstring(node) or ""):
            yield SampleDocument(
                id=f"stdlib/{module}.{qualified}",
                title=f"{module}.{qualified}",
                body=docstring,
                kind=kind,
                package=module.partition(".")[0],
                signature=_clean(_signature(node, qualified)),
                module=module,
                lineno=node.lineno,
            )
        if isinstance(node, ast.ClassDef):
            yield from _definitions(module, node.body, (*parents, node.name))


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, qualified: str) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {qualified}({bases})" if bases else f"class {qualified}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    keyword = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{keyword}{qualified}({ast.unparse(node.args)}){returns}"
