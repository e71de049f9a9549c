"""A real corpus to try Cairn on, made on this machine: the documentation that every Python carries.

Stands before the line: it writes the Parquet files that ``ingest`` reads. Three origins, one file each:

    language.parquet        the language reference behind ``help("...")`` (``pydoc_data.topics``)
    library.parquet         the standard library: a page for each module, class and function
    distributions.parquet   the long descriptions of the installed distributions

The library is parsed, never imported, so nothing runs, no window opens, and platform-specific modules are
read too. Documentation that only exists in C modules is left out, as are tests, private names, Cairn's own
description, texts too short to answer anything and texts already seen. The same interpreter with the same
distributions gives the same bytes.
"""

from __future__ import annotations

import ast
import hashlib
import heapq
import importlib.metadata
import inspect
import itertools
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.config import SampleKind
from cairn.pipeline.errors import UsageError
from cairn.pipeline.types import ProgressListener, silent_progress

LANGUAGE_FILE = "language.parquet"
LIBRARY_FILE = "library.parquet"
DISTRIBUTIONS_FILE = "distributions.parquet"
SAMPLE_FILES = (LANGUAGE_FILE, LIBRARY_FILE, DISTRIBUTIONS_FILE)

SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("title", pa.string(), nullable=False),
        pa.field("text", pa.large_string(), nullable=False),
        pa.field("module", pa.string()),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("package", pa.string(), nullable=False),
        pa.field("lineno", pa.int32()),
    ],
    metadata={"cairn": "sample"},  # by this mark a later run knows which files it may replace
)

MIN_BODY_CHARACTERS = 40  # shorter docstrings ("Return self.", "See base class.") answer no question
ROW_GROUP_DOCUMENTS = 256
CHARACTERS_PER_TOKEN = 3.5  # of this corpus under the default model's tokenizer
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
    documents = _unique(
        itertools.chain(python_topics(), python_library(progress, unparsable), python_distributions())
    )
    if kinds:
        documents = (document for document in documents if document.kind in kinds)
    if max_documents is not None:
        documents = iter(_drawn(documents, max_documents))
    counted = Counter[str]()
    written: list[Path] = []
    characters = 0

    def counting(group: Iterable[SampleDocument]) -> Iterator[SampleDocument]:
        nonlocal characters
        for document in group:
            counted[document.kind] += 1
            characters += len(document.text)
            yield document

    for name, group in itertools.groupby(documents, key=_file_name):
        path = folder / name
        with durable.storage_errors(f"writing {path}"):
            _write_file(path, counting(group))
        written.append(path)
    for name in set(SAMPLE_FILES) - {path.name for path in written}:
        (folder / name).unlink(missing_ok=True)
    return SampleReport(
        documents=counted.total(),
        characters=characters,
        estimated_tokens=round(characters / CHARACTERS_PER_TOKEN),
        kinds=dict(sorted(counted.items())),
        files=tuple(written),
        unparsable_files=tuple(unparsable),
    )


def _claim_folder(folder: Path) -> None:
    """Create the folder, or make sure that everything in it is an earlier sample's."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(
            f"the sample's destination must be a folder, got the file {folder}; choose another name"
        )
    folder.mkdir(parents=True, exist_ok=True)
    leftovers: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if re.fullmatch(rf"\.({'|'.join(map(re.escape, SAMPLE_FILES))})\.\d+\.tmp", entry.name):
            leftovers.append(entry)
        elif not _is_sample_file(entry):
            raise UsageError(
                f"the sample's folder must be new, empty or hold an earlier sample, got {folder} with "
                f"{entry.name}; choose another folder"
            )
    for entry in leftovers:  # a killed run's; removed only once nothing foreign was found
        entry.unlink()


def _is_sample_file(path: Path) -> bool:
    if path.name not in SAMPLE_FILES or not path.is_file():
        return False
    try:
        return (pq.read_schema(path).metadata or {}).get(b"cairn") == b"sample"
    except pa.ArrowException:
        return False


def _file_name(document: SampleDocument) -> str:
    match document.kind:
        case "topic":
            return LANGUAGE_FILE
        case "distribution":
            return DISTRIBUTIONS_FILE
        case _:
            return LIBRARY_FILE


def _write_file(path: Path, documents: Iterator[SampleDocument]) -> None:
    with (
        durable.replacing(path) as temporary,
        pq.ParquetWriter(temporary, SAMPLE_SCHEMA, compression="zstd") as writer,
    ):
        while group := list(itertools.islice(documents, ROW_GROUP_DOCUMENTS)):
            rows = [{name: getattr(document, name) for name in SAMPLE_SCHEMA.names} for document in group]
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=SAMPLE_SCHEMA))


def _unique(documents: Iterable[SampleDocument]) -> Iterator[SampleDocument]:
    """Drop short texts, ids already used and bodies already seen, such as inherited docstrings."""
    ids: set[str] = set()
    bodies: set[bytes] = set()
    for document in documents:
        digest = hashlib.sha256(document.body.encode()).digest()
        if len(document.body) < MIN_BODY_CHARACTERS or document.id in ids or digest in bodies:
            continue
        ids.add(document.id)
        bodies.add(digest)
        yield document


def _drawn(documents: Iterable[SampleDocument], count: int) -> list[SampleDocument]:
    """Draw ``count`` documents by the hash of their id: a document added changes at most one of them."""
    ranked = (
        (hashlib.sha256(document.id.encode()).digest(), position, document)
        for position, document in enumerate(documents)
    )
    return [document for _, _, document in sorted(heapq.nsmallest(count, ranked), key=lambda entry: entry[1])]


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
