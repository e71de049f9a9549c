"""A judged corpus: documents, queries and which answers which, read from a folder and checked.

:mod:`cairn.pipeline.lab.judged_files` says which files these are. ``start`` and ``end`` of a judgement are
the characters of the document's text that hold the evidence.

What cannot be used is counted, never dropped in silence. A set is held in memory whole: it is a test
collection, not a corpus to index.

Queries for a corpus that has none: a document's first sentence, cut out of it, must find the document.

A known-item task: one relevant document a query, without human judgements. It tells encoders and settings of
one corpus apart and costs nothing, but its queries are the corpus's own words and style: its scores say
little of what users will ask, and nothing across corpora.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.cluster.queries import leading_sentence
from cairn.pipeline.corpus.columns import is_list
from cairn.pipeline.corpus.given_vectors import first_width, packed, vector_records
from cairn.pipeline.errors import ConfigError, SchemaError, SourceError
from cairn.pipeline.lab.judged_files import (
    JudgedFile,
    corpus_files,
    read_columns,
    read_judged_file,
    read_vector_column,
)
from jaxtyping import Float32, Int64

_Value = TypeVar("_Value", str, bytes)
NO_SPAN = -1
"""Start and end of a judgement without evidence."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Judgements:
    """J judgements: query and document by position, integer gain, span of the evidence or :data:`NO_SPAN`."""

    query_J: Int64[np.ndarray, " J"]
    document_J: Int64[np.ndarray, " J"]
    gain_J: Int64[np.ndarray, " J"]
    start_J: Int64[np.ndarray, " J"]
    end_J: Int64[np.ndarray, " J"]

    @classmethod
    def none(cls) -> Judgements:
        """Return no judgements."""
        return cls(**{field.name: np.zeros(0, np.int64) for field in fields(cls)})

    def take(self, kept_J: np.ndarray) -> Judgements:
        """Return the judgements at these positions, or where a mask is true."""
        return Judgements(**{field.name: getattr(self, field.name)[kept_J] for field in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GivenVectors:
    """What a set brings: the vectors of each document, as they are staged, and those of queries."""

    documents: tuple[bytes, ...]
    queries_QV: Float32[np.ndarray, "Q V"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RetrievalSet:
    """Documents (titles empty for none), queries with a relevant one at least, and their judgements."""

    name: str
    doc_ids: tuple[str, ...]
    titles: tuple[str, ...]
    texts: tuple[str, ...]
    query_ids: tuple[str, ...]
    queries: tuple[str, ...]
    judgements: Judgements
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    given: GivenVectors | None = None

    @property
    def has_evidence(self) -> bool:
        """Whether any judgement names the characters that hold the evidence."""
        return bool((self.judgements.start_J >= 0).any())

    def with_queries(self, kept_Q: Int64[np.ndarray, " q"]) -> RetrievalSet:
        """Return the set with some of its queries, ascending."""
        kept = self.judgements.take(np.isin(self.judgements.query_J, kept_Q))
        return replace(
            self,
            query_ids=_pick(self.query_ids, kept_Q),
            queries=_pick(self.queries, kept_Q),
            given=self.given and replace(self.given, queries_QV=self.given.queries_QV[kept_Q]),
            judgements=replace(kept, query_J=np.searchsorted(kept_Q, kept.query_J)),
        )

    def with_documents(self, kept_N: Int64[np.ndarray, " n"]) -> RetrievalSet:
        """Return the set with some of its documents, ascending, all judged ones among them."""
        judgements = self.judgements
        return replace(
            self,
            doc_ids=_pick(self.doc_ids, kept_N),
            titles=_pick(self.titles, kept_N),
            texts=_pick(self.texts, kept_N),
            given=self.given and replace(self.given, documents=_pick(self.given.documents, kept_N)),
            judgements=replace(judgements, document_J=np.searchsorted(kept_N, judgements.document_J)),
        )


def read_retrieval_set(folder: Path, vector_column: str | None = None) -> RetrievalSet:
    """Read and check a folder; what cannot be evaluated at all raises an error.

    ``vector_column`` is one of corpus and queries, which hold vectors of their own.
    """
    if not folder.is_dir():
        raise SourceError(
            "a judged set must be a folder with the files corpus, queries and qrels, "
            f"got {str(folder)!r}; name one"
        )
    corpus = read_judged_file(folder, "corpus")
    doc_ids = _unique_ids(corpus, "corpus")
    texts = _strings(corpus, "text", "corpus")
    titles = _strings(corpus, "title", "corpus") if "title" in corpus.schema.names else ("",) * len(texts)
    query_ids, queries = read_queries(folder)
    qrels = read_judged_file(folder, "qrels")
    skipped: Counter[str] = Counter()
    judgements = _judgements(qrels, doc_ids, query_ids, list(map(len, texts)), skipped)
    whole = RetrievalSet(
        name=folder.resolve().name,
        doc_ids=doc_ids,
        titles=titles,
        texts=texts,
        query_ids=query_ids,
        queries=queries,
        judgements=judgements,
        given=None if vector_column is None else _given_vectors(folder, vector_column, texts),
    )
    return _with_usable_queries(whole, skipped)


def _given_vectors(folder: Path, column: str, texts: Sequence[str]) -> GivenVectors:
    documents, queries = (read_vector_column(folder, name, column) for name in ("corpus", "queries"))
    if is_list(queries.type) and pa.types.is_struct(queries.type.value_type):
        raise SchemaError(f"column {column} of the queries must hold one vector a query, got chunks; mend it")
    vector_dim = first_width(documents)
    if vector_dim is None:
        raise SchemaError(f"column {column} of the corpus must hold vectors, got none; name another")
    of_documents = _packed(documents, list(map(len, texts)), vector_dim, f"column {column} of the corpus")
    of_queries = _packed(queries, [0] * len(queries), vector_dim, f"column {column} of the queries")
    records = np.frombuffer(b"".join(of_queries), vector_records(vector_dim))
    return GivenVectors(documents=of_documents, queries_QV=records["vector"])


def _packed(column: pa.Array, lengths: Sequence[int], vector_dim: int, what: str) -> tuple[bytes, ...]:
    vectors, faults = packed(column, np.array(lengths, np.int64), vector_dim)
    for row in np.flatnonzero(faults != "").tolist():
        raise SchemaError(
            f"{what} must hold vectors of {vector_dim:,} numbers, got {faults[row]} in row {row + 1:,}; "
            "mend it"
        )
    return tuple(vectors.to_pylist())


def read_queries(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ids and the texts of a judged set's queries."""
    queries = read_judged_file(folder, "queries")
    return _unique_ids(queries, "queries"), _strings(queries, "text", "queries")


def read_relevant(folder: Path) -> list[tuple[str, str]]:
    """Return the ids of each query and a document that a judged set calls relevant to it."""
    qrels = read_judged_file(folder, "qrels")
    query_ids, doc_ids = (_ids(qrels, name, "qrels") for name in ("query_id", "doc_id"))
    rows = zip(query_ids, doc_ids, _gains(qrels).tolist(), strict=True)
    return [(query_id, doc_id) for query_id, doc_id, gain in rows if gain > 0]


def require_distinct_names(sets: Sequence[RetrievalSet]) -> None:
    """Raise :class:`ConfigError` for two sets of one name, which no table could tell apart."""
    names = [judged.name for judged in sets]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"folders must have names of their own, got {name!r} twice; rename one")


def given_width(sets: Sequence[RetrievalSet]) -> int:
    """Return how many numbers the vectors have that sets bring; :class:`ConfigError` where they differ."""
    widths = {judged.given.queries_QV.shape[1] for judged in sets if judged.given is not None}
    if len(widths) > 1:
        shown = " and ".join(f"{width:,}" for width in sorted(widths))
        raise ConfigError(f"vectors of all sets must have one width, got {shown}; evaluate them apart")
    return widths.pop()


def sample_set(
    whole: RetrievalSet, *, max_queries: int | None, max_documents: int | None, seed: int
) -> RetrievalSet:
    """Draw at most so many queries, then at most so many documents, all that are judged for them first."""
    generator = np.random.default_rng(seed)
    sample = whole.with_queries(_draw(generator, len(whole.query_ids), max_queries))
    judged_N = np.unique(sample.judgements.document_J)
    others_N = np.setdiff1d(np.arange(len(whole.doc_ids)), judged_N)
    num_others = None if max_documents is None else max(0, max_documents - len(judged_N))
    drawn_N = others_N[_draw(generator, len(others_N), num_others)]
    return sample.with_documents(np.union1d(judged_N, drawn_N))


def _draw(generator: np.random.Generator, count: int, limit: int | None) -> Int64[np.ndarray, " _"]:
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(generator.permutation(count)[:limit])


def _pick(values: Sequence[_Value], positions: Int64[np.ndarray, " _"]) -> tuple[_Value, ...]:
    return tuple(values[int(position)] for position in positions)


def _strings(table: pa.Table, column: str, file: JudgedFile) -> tuple[str, ...]:
    """Return a text column as Python strings, null as empty."""
    values = table.column(column)
    if values.type not in (pa.string(), pa.large_string(), pa.null()):
        raise SchemaError(
            f"column {column} of the {file} must hold text, got {values.type}; write it as strings"
        )
    return tuple(value or "" for value in values.to_pylist())


def _ids(table: pa.Table, column: str, file: JudgedFile) -> list[str]:
    values = table.column(column)
    if not (pa.types.is_integer(values.type) or values.type in (pa.string(), pa.large_string())):
        raise SchemaError(
            f"column {column} of the {file} must hold text or whole numbers, got {values.type}; write the "
            "ids as strings"
        )
    listed = pc.cast(values, pa.string()).to_pylist()
    if any(not value or any(map(str.isspace, value)) for value in listed):
        raise SchemaError(
            f"column {column} of the {file} must hold an id without white space in every row, got a row "
            "without; mend it"
        )
    return listed


def _unique_ids(table: pa.Table, file: JudgedFile) -> tuple[str, ...]:
    ids = _ids(table, "id", file)
    for name, count in Counter(ids).most_common(1):
        if count > 1:
            raise SchemaError(
                f"the {file} must name each id once, got {name!r} {count} times; remove the others"
            )
    return tuple(ids)


def _judgements(
    qrels: pa.Table,
    doc_ids: Sequence[str],
    query_ids: Sequence[str],
    text_lengths: Sequence[int],
    skipped: Counter[str],
) -> Judgements:
    query_of, document_of = (
        {name: position for position, name in enumerate(ids)} for ids in (query_ids, doc_ids)
    )
    query_J, document_J = (
        np.array([known.get(name, -1) for name in _ids(qrels, column, "qrels")], np.int64)
        for known, column in ((query_of, "query_id"), (document_of, "doc_id"))
    )
    start_J, end_J = _spans(qrels)
    skipped["judgements of unknown queries"] += int((query_J < 0).sum())
    skipped["judgements of unknown documents"] += int(((document_J < 0) & (query_J >= 0)).sum())
    known = (query_J >= 0) & (document_J >= 0)
    judgements = Judgements(
        query_J=query_J, document_J=document_J, gain_J=_gains(qrels), start_J=start_J, end_J=end_J
    ).take(known)
    has_span = judgements.start_J != NO_SPAN
    ends = np.array(text_lengths, np.int64)[judgements.document_J]
    outside = has_span & ~(
        (judgements.start_J >= 0) & (judgements.start_J < judgements.end_J) & (judgements.end_J <= ends)
    )
    skipped["spans outside their text"] += int(outside.sum())
    is_evidence = has_span & ~outside & (judgements.gain_J > 0)
    judgements.start_J[~is_evidence] = judgements.end_J[~is_evidence] = NO_SPAN
    return judgements


def _gains(qrels: pa.Table) -> Int64[np.ndarray, " J"]:
    sentence = "column score of the qrels must hold a whole number in every row; write 0 for not relevant"
    gains = _whole_numbers(qrels, "score", sentence)
    if gains.null_count:
        raise SchemaError(sentence)
    return gains.to_numpy()


def _whole_numbers(qrels: pa.Table, column: str, sentence: str) -> pa.Int64Array:
    try:
        return pc.cast(qrels.column(column).combine_chunks(), pa.int64())
    except pa.ArrowException as error:
        raise SchemaError(sentence) from error


def _spans(qrels: pa.Table) -> tuple[Int64[np.ndarray, " J"], Int64[np.ndarray, " J"]]:
    present = [name for name in ("start", "end") if name in qrels.schema.names]
    if len(present) == 1:
        raise SchemaError(
            f"the qrels must have both start and end, or neither, got only {present[0]}; add the other"
        )
    if not present:
        return np.full(qrels.num_rows, NO_SPAN, np.int64), np.full(qrels.num_rows, NO_SPAN, np.int64)
    sentence = "columns start and end of the qrels must hold whole numbers or null; mend them"
    columns = [pc.fill_null(_whole_numbers(qrels, name, sentence), NO_SPAN) for name in present]
    start_J, end_J = (column.to_numpy(zero_copy_only=False).astype(np.int64) for column in columns)
    return start_J, end_J


def _with_usable_queries(whole: RetrievalSet, skipped: Counter[str]) -> RetrievalSet:
    """Leave out blank queries and queries without a relevant document; a set without any left is an error."""
    judgements = whole.judgements
    is_judged_Q = np.zeros(len(whole.query_ids), np.bool_)
    is_judged_Q[judgements.query_J[judgements.gain_J > 0]] = True
    is_blank_Q = np.array([not query.strip() for query in whole.queries], np.bool_)
    skipped["blank queries"] += int(is_blank_Q.sum())
    skipped["queries without a relevant document"] += int((~is_judged_Q & ~is_blank_Q).sum())
    kept_Q = np.flatnonzero(is_judged_Q & ~is_blank_Q)
    if not len(kept_Q):
        counted = ", ".join(f"{count} {reason}" for reason, count in skipped.items() if count)
        raise SourceError(
            f"{whole.name} must hold a query with a relevant document of the corpus, got none ({counted}); "
            "check the ids of the qrels"
        )
    kept = {reason: count for reason, count in skipped.items() if count}
    return replace(whole.with_queries(kept_Q), skipped=kept)


MIN_QUERY_CHARACTERS: Final = 20
"""A shorter first sentence is a heading or a name that many documents share."""
MIN_REST_CHARACTERS: Final = 200
"""What must be left to be found: a few sentences."""


def known_item_set(folder: Path, num_queries: int, seed: int) -> RetrievalSet:
    """Make a set of what ``ingest`` would read; first sentences, cut out of their texts, are the queries."""
    tables: list[pa.Table] = []
    for file in corpus_files(folder):
        table = read_columns(file, ("id", "text"), ("title",))
        try:
            schema = pa.schema([pa.field(name, pa.large_string()) for name in table.schema.names])
            tables.append(table.cast(schema))
        except pa.ArrowException as error:
            raise SchemaError(f"{file.name} must hold text in id and text; write it again") from error
    corpus = pa.concat_tables(tables, promote_options="default")
    _, first = np.unique(np.array(corpus.column("id").to_pylist(), dtype=str), return_index=True)
    distinct = corpus.take(pa.array(np.sort(first)))
    titles = distinct.column("title").to_pylist() if "title" in distinct.schema.names else [""] * len(first)
    num_repeated = corpus.num_rows - len(first)
    left = [text or "" for text in distinct.column("text").to_pylist()]
    drawn: list[int] = []
    queries: list[str] = []
    for position in np.random.default_rng(seed).permutation(len(left)).tolist():
        if len(drawn) == num_queries:
            break
        sentence, rest = split_first_sentence(left[position])
        if len(sentence) >= MIN_QUERY_CHARACTERS and len(rest) >= MIN_REST_CHARACTERS:
            drawn.append(position)
            queries.append(sentence)
            left[position] = rest
    if not drawn:
        raise SourceError(
            f"known items must come from documents with a sentence and {MIN_REST_CHARACTERS} characters "
            "after it, got none; "
            "take a corpus of longer texts"
        )
    none = np.full(len(drawn), NO_SPAN)
    return RetrievalSet(
        name=f"{folder.resolve().name} (known items)",
        doc_ids=tuple(distinct.column("id").to_pylist()),
        titles=tuple(title or "" for title in titles),
        texts=tuple(left),
        query_ids=tuple(f"known-{number}" for number in range(len(drawn))),
        queries=tuple(queries),
        judgements=Judgements(
            query_J=np.arange(len(drawn)),
            document_J=np.array(drawn),
            gain_J=np.ones(len(drawn), np.int64),
            start_J=none,
            end_J=none.copy(),
        ),
        skipped={"documents that repeat an id": num_repeated} if num_repeated else {},
    )


def split_first_sentence(text: str) -> tuple[str, str]:
    """Return the first sentence, white space collapsed, and what follows it."""
    sentence = leading_sentence(text)
    match = re.match(r"\s*" + r"\s+".join(map(re.escape, sentence.split())), text)
    return (sentence, text[match.end() :].lstrip()) if match else ("", text)
