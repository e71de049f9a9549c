"""A real corpus to try Cairn on, made on this machine: the documentation that every Python carries.

Stands before the line: it writes the Parquet files that ``ingest`` reads. Three origins, one file each:

    language.parquet        the language reference behind ``help("...")`` (``pydoc_data.topics``)
    library.parquet         the standard library: a page for each module, class and function
    distributions.parquet   the long descriptions of the installed distributions

``python_documentation`` finds the documents. Texts too short to answer anything and texts already seen are
left out here. The same interpreter with the same distributions gives the same bytes.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.config import SampleKind
from cairn.pipeline.corpus.python_documentation import (
    SampleDocument,
    python_distributions,
    python_library,
    python_topics,
)
from cairn.pipeline.errors import ConfigError, UsageError
from cairn.pipeline.types import ProgressListener, silent_progress

EXAMPLE_QUERIES = (
    "how do I run a function in another thread and get its result",
    "parse command line arguments with subcommands",
    "what happens when an exception is raised inside a with block",
    "compare two sequences and show the differences between them",
    "write log messages to a file that is rotated when it grows too large",
    "replace an object with a mock while a test runs",
)
"""Questions that the standard library's own documentation answers, whatever else is installed."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleReport:
    """What was written; ``unparsable_files`` were left out for their syntax."""

    documents: int
    characters: int
    estimated_tokens: int
    longest_id: str
    longest_characters: int
    kinds: Mapping[str, int]
    files: tuple[Path, ...]
    unparsable_files: tuple[str, ...]


def write_sample(
    folder: Path,
    *,
    kinds: Collection[SampleKind] = (),
    max_documents: int | None = None,
    seed: int = 0,
    progress: ProgressListener = silent_progress,
) -> SampleReport:
    """Write the sample corpus into ``folder``, which must be new, empty, or hold an earlier sample.

    ``kinds`` are the kinds of document to keep, () keeps all. ``max_documents`` keeps that many of them,
    drawn by ``seed`` and in their usual order; None keeps all, some thousands.
    """
    unknown = sorted(set(kinds) - set(get_args(SampleKind)))
    if unknown:
        raise ConfigError(f"kinds must be of {', '.join(get_args(SampleKind))}, got {unknown[0]!r}")
    if max_documents is not None and max_documents < 1:
        raise ConfigError(
            f"max_documents must be positive, got {max_documents}; leave it out to keep every document"
        )
    with durable.storage_errors(f"preparing {folder}"):
        _claim_folder(folder)
    unparsable: list[str] = []
    documents = _unique(
        itertools.chain(python_topics(), python_library(progress, unparsable), python_distributions())
    )
    if kinds:
        documents = (document for document in documents if document.kind in kinds)
    if max_documents is not None:
        documents = iter(_drawn(documents, max_documents, seed))
    tally = _Tally()
    written: list[Path] = []
    for name, group in itertools.groupby(documents, key=_file_name):
        path = folder / name
        with durable.storage_errors(f"writing {path}"):
            _write_file(path, tally.counting(group))
        written.append(path)
    for name in set(SAMPLE_FILES) - {path.name for path in written}:
        (folder / name).unlink(missing_ok=True)
    return tally.report(written, unparsable)


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


def _drawn(documents: Iterable[SampleDocument], count: int, seed: int) -> list[SampleDocument]:
    """Draw ``count`` documents by the hash of their id: a document added changes at most one of them."""
    ranked = (
        (hashlib.sha256(f"{seed}:{document.id}".encode()).digest(), position, document)
        for position, document in enumerate(documents)
    )
    return [document for _, _, document in sorted(heapq.nsmallest(count, ranked), key=lambda entry: entry[1])]


@dataclass(kw_only=True, slots=True)
class _Tally:
    """Counts what streams past."""

    kinds: Counter[str] = field(default_factory=Counter[str])
    characters: int = 0
    longest: tuple[int, str] = (0, "")

    def counting(self, documents: Iterator[SampleDocument]) -> Iterator[SampleDocument]:
        for document in documents:
            size = len(document.text)
            self.kinds[document.kind] += 1
            self.characters += size
            self.longest = max(self.longest, (size, document.id))
            yield document

    def report(self, files: Sequence[Path], unparsable: Sequence[str]) -> SampleReport:
        return SampleReport(
            documents=self.kinds.total(),
            characters=self.characters,
            estimated_tokens=round(self.characters / CHARACTERS_PER_TOKEN),
            longest_id=self.longest[1],
            longest_characters=self.longest[0],
            kinds=dict(sorted(self.kinds.items())),
            files=tuple(files),
            unparsable_files=tuple(unparsable),
        )
