"""Training pairs: a query and the document that answers it, made of the rows of files and checked.

    query, document          a question and what answers it
    query, document, score   two texts and how alike they are: a pair in both directions where the score is
                             high enough, else nothing
    query, label             a text and its class: a pair with another text of its class, and texts of other
                             classes as its negatives; with two labels in all, the labels are the documents
    negatives                documents that do not answer the query; others are not mined for it
    instruction              what stands before the query, and before the document where both are alike
    title                    may be missing or empty: the page the document stands on;
                             neighbours of one title make one long sequence
    source                   may be missing: where the row comes from, the domain it is clustered in;
                             else the name of the file

Order matters: pairs that follow one another in a file are taken for neighbours. Texts of classes and scored
ones each stand alone. What cannot be used is counted, never dropped in silence.

Source: NV-Embed §4.2: example-based labels for several classes, label texts for two; pairs of texts from
score 4 on, in both directions and with the instruction on both sides. Differs: texts of pairs below that
score do not join the pool that negatives are mined from.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
from cairn.pipeline.encode.prefixes import instruction_prefix
from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.lab.train.training_files import (
    SUFFIXES,
    counted,
    is_unicode,
    read_columns,
    training_files,
)
from jaxtyping import Int64

Task = Literal["retrieval", "class", "similarity"]

_TASKS: Final[Mapping[str, Task]] = {name: name for name in get_args(Task)}

CLASS_NEGATIVES: Final = 7
"""Texts of other classes for each text (NV-Embed, appendix C: 7 negatives an example)."""

MIN_SCORE: Final = 4.0
"""Of two texts that are a pair (NV-Embed §4.2, of 5)."""


class PairRecord(NamedTuple):
    """One row as it stands in a file; what is missing is empty, a missing score None."""

    query: str
    document: str
    title: str
    source: str
    instruction: str
    negatives: tuple[str, ...]
    label: str
    score: float | None
    task: str


class PairRow(NamedTuple):
    """One pair; ``page`` and ``heading`` say where its document was cut from, else empty.

    ``negatives`` are documents that do not answer the query. Texts of a ``task`` other than retrieval each
    stand alone; where they are alike the instruction stands before documents, too.
    """

    query: str
    document: str
    title: str
    source: str
    page: str = ""
    heading: str = ""
    instruction: str = ""
    negatives: tuple[str, ...] = ()
    task: Task = "retrieval"


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
    headings: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    negatives: tuple[tuple[str, ...], ...] = ()
    tasks: tuple[Task, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        blank = PairRow("", "", "", "")
        for name, value in (
            ("pages", blank.page),
            ("headings", blank.heading),
            ("instructions", blank.instruction),
            ("negatives", blank.negatives),
            ("tasks", blank.task),
        ):
            object.__setattr__(self, name, getattr(self, name) or (value,) * len(self))

    @classmethod
    def of(cls, rows: Iterable[PairRow], skipped: Mapping[str, int]) -> TrainingPairs:
        """Take rows in order."""
        columns = list(zip(*rows, strict=True)) or [()] * len(PairRow._fields)
        queries, documents, titles, sources, pages, headings, instructions, negatives, tasks = columns
        return cls(
            queries=queries,
            documents=documents,
            titles=titles,
            sources=sources,
            pages=pages,
            headings=headings,
            instructions=instructions,
            negatives=negatives,
            tasks=tasks,
            skipped=dict(skipped),
        )

    def __len__(self) -> int:
        return len(self.queries)

    def rows(self) -> Iterator[PairRow]:
        """Yield the pairs one by one."""
        return map(
            PairRow,
            self.queries,
            self.documents,
            self.titles,
            self.sources,
            self.pages,
            self.headings,
            self.instructions,
            self.negatives,
            self.tasks,
        )

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


def read_pairs(
    paths: Sequence[Path],
    *,
    class_negatives: int = CLASS_NEGATIVES,
    min_score: float = MIN_SCORE,
    seed: int = 0,
) -> TrainingPairs:
    """Read files, or all Parquet and JSON-lines files below folders, in the order of their names.

    A pair with an empty side is skipped, one that stands there word for word already, one with half a
    surrogate pair, and two texts that score below ``min_score``. Each text of a class gets
    ``class_negatives`` others; what is drawn for it is drawn from ``seed``. Files without a single pair to
    train on and labels of one class raise :class:`SourceError`, a missing or mistyped column
    :class:`SchemaError`.
    """
    kept: dict[PairRow, None] = {}
    skipped: Counter[str] = Counter()
    for file in training_files(paths, SUFFIXES):
        examples: dict[tuple[str, str], dict[PairRecord, None]] = {}
        for row in read_columns(file, PairRecord._fields, ("query", "document"), ("query", "label")):
            found = PairRecord(*row)
            record = found._replace(source=found.source.strip() or file.stem)
            if reason := _refused(record, min_score):
                skipped[reason] += 1
            elif record.label:
                own = examples.setdefault((record.source, record.instruction), {})
                skipped["repeated pair"] += record in own
                own[record] = None
            else:
                for row in _rows_of(record, file):
                    if row in kept:
                        skipped["repeated pair"] += 1
                    else:
                        kept[row] = None
        for own in examples.values():
            pairs = class_pairs(list(own), class_negatives, seed)
            skipped["only text of its class"] += len(own) - len(pairs)
            skipped["repeated pair"] += len(pairs) - len(dict.fromkeys(pairs).keys() - kept.keys())
            kept |= dict.fromkeys(pairs)
    skipped = +skipped
    if not kept:
        reasons = counted(skipped)
        raise SourceError(
            f"training files must hold at least one pair with a query and a document, got {reasons}; "
            f"name others{', or lower min_score' if 'score below' in reasons else ''}"
        )
    return TrainingPairs.of(kept, skipped)


def _refused(record: PairRecord, min_score: float) -> str | None:
    """Return why a row is no pair, None where it is one."""
    if not record.query.strip():
        return "empty query"
    if record.label and record.document.strip():
        raise SchemaError(
            f"a row must have a document or a label, got both in {record.source!r}; leave one of them out"
        )
    if not (record.label or record.document).strip():
        return "empty document"
    texts = (record.query, record.document, record.title, record.source, record.instruction, record.label)
    if not all(map(is_unicode, (*texts, *record.negatives))):
        return "text that is not valid Unicode"
    if record.score is not None and math.isnan(record.score):
        return "score that is no number"
    if record.score is not None and record.score < min_score:
        return f"score below {min_score:g}"
    return None


def _rows_of(record: PairRecord, file: Path) -> Iterator[PairRow]:
    """Yield the pairs of a row without a label."""
    default: Task = "retrieval" if record.score is None else "similarity"
    task = _TASKS.get(record.task or default)
    if task is None:
        raise SchemaError(
            f"task in {file.name} must be one of {', '.join(_TASKS)}, got {record.task!r:.60}; "
            "leave the column out, or name one of them"
        )
    row = PairRow(
        query=record.query,
        document=record.document,
        title=record.title,
        source=record.source,
        instruction=record.instruction,
        negatives=tuple(dict.fromkeys(text for text in record.negatives if text != record.document)),
        task=task,
    )
    yield row
    if record.score is not None and row.query != row.document:
        yield row._replace(query=row.document, document=row.query, negatives=())


def class_pairs(examples: Sequence[PairRecord], num_negatives: int, seed: int) -> list[PairRow]:
    """Return a pair for each text that has a document of its class; all texts are of one source.

    Of two classes the labels are the documents, each the other's negative. Of several, the document is
    another text of the class and the negatives are texts of others, all drawn from ``seed``. Texts of one
    class alone, and numbers as the labels of two, raise :class:`SourceError`.
    """
    texts = np.array([example.query for example in examples], object)
    names = sorted({example.label for example in examples})
    label_n = np.array([names.index(example.label) for example in examples])
    if len(names) < 2:
        raise SourceError(
            f"labels of a source must be of at least two classes, got {names[0]!r} alone in "
            f"{examples[0].source!r}; give texts of another class, or a column document"
        )
    if len(names) == 2:
        if any(name.strip().lstrip("+-").isdigit() for name in names):
            raise SourceError(
                "labels of two classes must be words, because they are trained as documents, got "
                f"{names[0]!r} and {names[1]!r} in {examples[0].source!r}; write what they mean"
            )
        return [
            _class_row(example, example.label, tuple(name for name in names if name != example.label))
            for example in examples
        ]
    generator = np.random.default_rng([seed, zlib.crc32(examples[0].source.encode())])
    rows: list[PairRow] = []
    for label in range(len(names)):
        of_class, others = np.flatnonzero(label_n == label), np.flatnonzero(label_n != label)
        own = dict.fromkeys(texts[of_class])
        foreign = [text for text in dict.fromkeys(texts[others]) if text not in own]
        if len(own) < 2 or not foreign:
            continue
        mates = list(own)
        for place in of_class.tolist():
            document = texts[place]
            while document == texts[place]:
                document = mates[int(generator.integers(len(mates)))]
            drawn = generator.choice(len(foreign), min(num_negatives, len(foreign)), replace=False)
            rows.append(_class_row(examples[place], document, tuple(foreign[n] for n in drawn.tolist())))
    return rows


def _class_row(example: PairRecord, document: str, negatives: tuple[str, ...]) -> PairRow:
    return PairRow(
        query=example.query,
        document=document,
        title="",
        source=example.source,
        instruction=example.instruction,
        negatives=negatives,
        task="class",
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """Texts that may stand in a batch as documents: those of N pairs by position, then given negatives.

    ``prefixes`` stand before them, empty for that of all documents. ``given_Nk`` are the places of each
    pair's own negatives, -1 for none.
    """

    texts: tuple[str, ...]
    prefixes: tuple[str, ...]
    given_Nk: Int64[np.ndarray, "N k"]

    @classmethod
    def of(cls, pairs: TrainingPairs) -> Candidates:
        """Collect them; negatives that read the same stand there once."""
        prefixes = [
            instruction_prefix(instruction) if instruction and task == "similarity" else ""
            for instruction, task in zip(pairs.instructions, pairs.tasks, strict=True)
        ]
        place_of: dict[tuple[str, str], int] = {}
        given = [
            [place_of.setdefault((text, prefix), len(pairs) + len(place_of)) for text in negatives]
            for negatives, prefix in zip(pairs.negatives, prefixes, strict=True)
        ]
        given_Nk = np.full((len(pairs), max(map(len, given), default=0)), -1, np.int64)
        for own, places in zip(given_Nk, given, strict=True):
            own[: len(places)] = places
        return cls(
            texts=(*pairs.documents, *(text for text, _ in place_of)),
            prefixes=(*prefixes, *(prefix for _, prefix in place_of)),
            given_Nk=given_Nk,
        )


def text_numbers(texts: Sequence[str]) -> np.ndarray:
    """Number texts so that equal ones share a number."""
    numbers: dict[str, int] = {}
    return np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int64, len(texts))
