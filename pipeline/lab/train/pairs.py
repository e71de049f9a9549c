"""Training pairs: a query and the document that answers it, made of the rows of files and checked.

Rows of training files: tables in any format of a source. Of JSON lines a column is what all its rows fit, so
numbers among texts are texts, and a row without a key has it empty.

    column        kind             what it is
    query         text             what a reader asks
    document      text             what answers it
    title         text             the page the document stands on; neighbours of one title make one sequence
    source        text             where it comes from: the domain it is clustered in; else the file's name
    instruction   text             what the query is for, before which it stands (NV-Embed eq. 2)
    negatives     list of texts    documents that do not answer the query; others are not mined for it
    text          text             what is pretrained or distilled on
    language      text             its language, such as en or de

Pairs that follow one another in a file are taken for neighbours. What cannot be used is counted, never
dropped in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    title: str = ""
    source: str = ""
    page: str = ""
    instruction: str = ""
    negatives: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingPairs:
    """N pairs in file order; ``skipped`` counts by reason what is not among them."""

    rows: tuple[PairRow, ...]
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def documents(self) -> tuple[str, ...]:
        """Return the document of each pair."""
        return tuple(row.document for row in self.rows)

    def without(self, is_left_out: Callable[[PairRow], bool], reason: str) -> TrainingPairs:
        """Leave pairs out, and count them under ``reason``."""
        kept = tuple(row for row in self.rows if not is_left_out(row))
        num_left_out = len(self) - len(kept)
        found = Counter({reason: num_left_out} if num_left_out else {})
        return TrainingPairs(rows=kept, skipped=dict(Counter(self.skipped) + found))


def join_pairs(parts: Sequence[TrainingPairs]) -> TrainingPairs:
    """Return all pairs in one, in order."""
    skipped = sum((Counter(part.skipped) for part in parts), Counter[str]())
    return TrainingPairs(rows=tuple(row for part in parts for row in part.rows), skipped=dict(skipped))


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
    return TrainingPairs(rows=tuple(kept), skipped=dict(skipped))


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
            [place_of.setdefault(text, len(pairs) + len(place_of)) for text in row.negatives]
            for row in pairs.rows
        ]
        given_Nk = np.full((len(pairs), max(map(len, given), default=0)), NONE_FOUND, np.int64)
        for own, places in zip(given_Nk, given, strict=True):
            own[: len(places)] = places
        return cls(texts=(*pairs.documents, *place_of), given_Nk=given_Nk)


def text_numbers(texts: Sequence[str]) -> np.ndarray:
    """Number texts so that equal ones share a number."""
    numbers: dict[str, int] = {}
    return np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int64, len(texts))
