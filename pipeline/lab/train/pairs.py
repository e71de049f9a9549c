"""Training pairs: a query and the document that answers it, made of the rows of files and checked.

    query, document          a question and what answers it
    negatives                documents that do not answer the query; others are not mined for it
    instruction              what stands before the query (NV-Embed eq. 2)
    title                    may be missing or empty: the page the document stands on;
                             neighbours of one title make one long sequence
    source                   may be missing: where the row comes from, the domain it is clustered in;
                             else the name of the file

Pairs that follow one another in a file are taken for neighbours. What cannot be used is
counted, never dropped in silence.

Rows of training files: tables in any format of a source. Of JSON lines a column is what all its rows fit, so
numbers among texts are texts, and a row without a key has it empty.

    column        kind             what it is
    query         text             what a reader asks
    document      text             what answers it
    title         text             the page the document stands on
    source        text             where the row comes from, else the name of the file
    instruction   text             what the query is for
    negatives     list of texts    documents that do not answer the query
    text          text             what is pretrained or distilled on
    language      text             its language, such as en or de
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from cairn.pipeline.corpus.columns import is_list, is_text
from cairn.pipeline.corpus.formats.format import SourceFile
from cairn.pipeline.corpus.sources import resolve_sources
from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.lab.judged_files import read_columns
from cairn.pipeline.manifest import fingerprint
from jaxtyping import Int64


def training_files(paths: Sequence[Path]) -> list[SourceFile]:
    """Return the files named, and all tables below folders, by name; documents are left out."""
    found: list[SourceFile] = []
    for path in paths:
        own = [file for file in resolve_sources([str(path)]) if not file.format.is_document]
        if not own:
            raise SourceError(f"training data must be tables with columns, got none in {path}; name another")
        found += own
    return found


def read_rows(file: SourceFile, columns: Sequence[str], *required: str) -> Iterator[tuple[Any, ...]]:
    """Yield columns of a file's rows; what is missing or null is empty.

    A file without one of ``required``, or with a column of another kind, raises :class:`SchemaError`.
    """
    table = read_columns(file, required, [name for name in columns if name not in required])
    values: list[Iterable[Any]] = []
    for name in columns:
        blank = () if name == "negatives" else ""
        if name not in table.schema.names:
            values.append(repeat(blank, table.num_rows))
            continue
        kind, wants_list = table.schema.field(name).type, name == "negatives"
        texts = kind.value_type if is_list(kind) else kind
        if not pa.types.is_null(kind) and (is_list(kind) != wants_list or not is_text(texts)):
            wanted = "lists of texts" if wants_list else "text"
            where = PurePosixPath(file.path).name
            raise SchemaError(f"column {name} of {where} must hold {wanted}, got {kind}; write it again")
        values.append([value or blank for value in table.column(name).to_pylist()])
    return zip(*values, strict=True)


def stem(file: SourceFile) -> str:
    """Return a file's name without its suffix."""
    return PurePosixPath(file.path).stem


def counted(skipped: Mapping[str, int]) -> str:
    """Return what was left out, for a sentence."""
    return ", ".join(f"{count} with {reason}" for reason, count in sorted(skipped.items())) or "empty files"


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Texts with their languages, "" where a file does not say."""

    texts: tuple[str, ...]
    languages: tuple[str, ...]
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def fingerprint(self) -> str:
        """Identify the texts and their languages, in their order."""
        return fingerprint(texts=self.texts, languages=self.languages)


def read_texts(paths: Sequence[Path]) -> Texts:
    """Read files, or all below folders, by name; what cannot be used is counted."""
    kept: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    for file in training_files(paths):
        for text, language in read_rows(file, ("text", "language"), "text"):
            if not text.strip():
                skipped["empty text"] += 1
            elif text in kept:
                skipped["repeated text"] += 1
            else:
                kept[text] = language
    if not kept:
        raise SourceError(f"files of texts must hold at least one, got {counted(skipped)}; name others")
    return Texts(texts=tuple(kept), languages=tuple(kept.values()), skipped=dict(skipped))


NONE_FOUND: Final = -1
"""Place of a negative that is not there."""


class PairRow(NamedTuple):
    """One pair; ``page`` says where its document was cut from; ``negatives`` do not answer the query."""

    query: str
    document: str
    title: str
    source: str
    page: str = ""
    instruction: str = ""
    negatives: tuple[str, ...] = ()


_COLUMNS: Final = ("queries", "documents", "titles", "sources", "pages", "instructions", "negatives")
"""Columns of the fields of a pair, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingPairs:
    """N pairs in file order; ``skipped`` counts by reason what is not among them.

    Columns after ``sources`` may be left out.
    """

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    titles: tuple[str, ...]
    sources: tuple[str, ...]
    pages: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    negatives: tuple[tuple[str, ...], ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        blanks = PairRow._field_defaults.values()
        for name, blank in zip(_COLUMNS[-len(blanks) :], blanks, strict=True):
            object.__setattr__(self, name, getattr(self, name) or (blank,) * len(self))

    @classmethod
    def of(cls, rows: Iterable[PairRow], skipped: Mapping[str, int]) -> TrainingPairs:
        """Take rows in order."""
        columns = list(zip(*rows, strict=True)) or [()] * len(PairRow._fields)
        return cls(**dict(zip(_COLUMNS, columns, strict=True)), skipped=dict(skipped))

    def __len__(self) -> int:
        return len(self.queries)

    def rows(self) -> Iterator[PairRow]:
        """Yield the pairs one by one."""
        return map(PairRow, *(getattr(self, name) for name in _COLUMNS))

    def take(self, positions: Iterable[int], reason: str) -> TrainingPairs:
        """Keep the pairs at these positions; the others are counted under ``reason``."""
        rows = list(self.rows())
        kept = [rows[position] for position in positions]
        dropped = len(self) - len(kept)
        return TrainingPairs.of(kept, Counter(self.skipped) + Counter({reason: dropped} if dropped else {}))


def join_pairs(parts: Sequence[TrainingPairs]) -> TrainingPairs:
    """Return all pairs in one, in order."""
    skipped = sum((Counter(part.skipped) for part in parts), Counter[str]())
    return TrainingPairs.of((row for part in parts for row in part.rows()), skipped)


def read_pairs(paths: Sequence[Path]) -> TrainingPairs:
    """Read files, or all below folders, by name; what cannot be used is counted."""
    kept: dict[PairRow, None] = {}
    skipped: Counter[str] = Counter()
    columns = ("query", "document", "title", "source", "instruction", "negatives")
    for file in training_files(paths):
        for values in read_rows(file, columns, "query", "document"):
            found = PairRow(**dict(zip(columns, values, strict=True)))
            others = (text for text in found.negatives if text and text.strip() and text != found.document)
            row = found._replace(
                source=found.source.strip() or stem(file),
                page=found.title.strip(),
                negatives=tuple(dict.fromkeys(others)),
            )
            if not row.query.strip():
                skipped["empty query"] += 1
            elif not row.document.strip():
                skipped["empty document"] += 1
            elif row in kept:
                skipped["repeated pair"] += 1
            else:
                kept[row] = None
    if not kept:
        raise SourceError(
            "training files must hold at least one pair with a query and a document, got "
            f"{counted(skipped)}; name others"
        )
    return TrainingPairs.of(kept, skipped)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """Documents of N pairs by position, then given negatives; ``given_Nk`` are their places, -1 for none."""

    texts: tuple[str, ...]
    given_Nk: Int64[np.ndarray, "N k"]

    @classmethod
    def of(cls, pairs: TrainingPairs) -> Candidates:
        """Collect them; negatives that read the same stand there once."""
        place_of: dict[str, int] = {}
        given = [
            [place_of.setdefault(text, len(pairs) + len(place_of)) for text in negatives]
            for negatives in pairs.negatives
        ]
        given_Nk = np.full((len(pairs), max(map(len, given), default=0)), NONE_FOUND, np.int64)
        for own, places in zip(given_Nk, given, strict=True):
            own[: len(places)] = places
        return cls(texts=(*pairs.documents, *place_of), given_Nk=given_Nk)


def text_numbers(texts: Sequence[str]) -> np.ndarray:
    """Number texts so that equal ones share a number."""
    numbers: dict[str, int] = {}
    return np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int64, len(texts))
