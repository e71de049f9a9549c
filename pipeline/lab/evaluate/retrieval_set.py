"""A judged corpus: documents, queries and which answers which, read from a folder and checked.

:mod:`cairn.pipeline.corpus.judged_files` says which files these are. ``start`` and ``end`` of a judgement are
the characters of the document's text that hold the evidence.

What cannot be used is counted, never dropped in silence. A set is held in memory whole: it is a test
collection, not a corpus to index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.corpus.judged_files import JudgedFile, read_judged_file
from cairn.pipeline.errors import ConfigError, SchemaError, SourceError
from jaxtyping import Int64

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
class RetrievalSet:
    """Documents, queries that have at least one relevant document, and their judgements.

    ``titles`` are empty where there are none.
    """

    name: str
    doc_ids: tuple[str, ...]
    titles: tuple[str, ...]
    texts: tuple[str, ...]
    query_ids: tuple[str, ...]
    queries: tuple[str, ...]
    judgements: Judgements
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])

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
            judgements=replace(judgements, document_J=np.searchsorted(kept_N, judgements.document_J)),
        )


def read_retrieval_set(folder: Path) -> RetrievalSet:
    """Read and check a folder.

    Raises :class:`SourceError` or :class:`SchemaError` for what cannot be evaluated at all.
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
    return judge_documents(folder, doc_ids, titles, texts)


def judge_documents(
    folder: Path, doc_ids: Sequence[str], titles: Sequence[str], texts: Sequence[str]
) -> RetrievalSet:
    """Read the queries and judgements of a folder on documents that are had already."""
    query_ids, queries = read_queries(folder)
    qrels = read_judged_file(folder, "qrels")
    skipped: Counter[str] = Counter()
    judgements = _judgements(qrels, doc_ids, query_ids, list(map(len, texts)), skipped)
    whole = RetrievalSet(
        name=folder.resolve().name,
        doc_ids=tuple(doc_ids),
        titles=tuple(titles),
        texts=tuple(texts),
        query_ids=query_ids,
        queries=queries,
        judgements=judgements,
    )
    return _with_usable_queries(whole, skipped)


def read_queries(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ids and the texts of a judged set's queries."""
    queries = read_judged_file(folder, "queries")
    return _unique_ids(queries, "queries"), _strings(queries, "text", "queries")


def read_relevant(folder: Path) -> list[tuple[str, str]]:
    """Return the ids of each query and a document that a judged set calls relevant to it."""
    qrels = read_judged_file(folder, "qrels")
    query_ids, doc_ids = (_ids(qrels, name, "qrels").to_pylist() for name in ("query_id", "doc_id"))
    rows = zip(query_ids, doc_ids, _gains(qrels).tolist(), strict=True)
    return [(query_id, doc_id) for query_id, doc_id, gain in rows if gain > 0]


def require_distinct_names(sets: Sequence[RetrievalSet]) -> None:
    """Raise :class:`ConfigError` for two sets of one name, which no table could tell apart."""
    names = [judged.name for judged in sets]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"folders must have names of their own, got {name!r} twice; rename one")


def sample_set(
    whole: RetrievalSet, *, max_queries: int | None, max_documents: int | None, seed: int
) -> RetrievalSet:
    """Draw at most so many queries, then at most so many documents.

    All documents judged for those queries are kept, others are drawn. A smaller corpus is an easier one:
    scores of a sampled corpus compare with each other, not with those of the whole.
    """
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


def _pick(values: Sequence[str], positions: Int64[np.ndarray, " _"]) -> tuple[str, ...]:
    return tuple(values[int(position)] for position in positions)


def _strings(table: pa.Table, column: str, file: JudgedFile) -> tuple[str, ...]:
    """Return a text column as Python strings, null as empty."""
    values = table.column(column)
    if not (
        pa.types.is_string(values.type)
        or pa.types.is_large_string(values.type)
        or pa.types.is_null(values.type)
    ):
        raise SchemaError(
            f"column {column} of the {file} must hold text, got {values.type}; write it as strings"
        )
    return tuple(value or "" for value in values.to_pylist())


def _ids(table: pa.Table, column: str, file: JudgedFile) -> pa.ChunkedArray:
    values = table.column(column)
    if pa.types.is_integer(values.type):
        values = pc.cast(values, pa.string())
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        raise SchemaError(
            f"column {column} of the {file} must hold text or whole numbers, got {values.type}; write the "
            "ids as strings"
        )
    listed = values.to_pylist()
    if values.null_count or any(not value or any(map(str.isspace, value)) for value in listed):
        raise SchemaError(
            f"column {column} of the {file} must hold an id without white space in every row, got a row "
            "without; mend it"
        )
    return values


def _unique_ids(table: pa.Table, file: JudgedFile) -> tuple[str, ...]:
    ids = [str(value) for value in _ids(table, "id", file).to_pylist()]
    repeated = [name for name, count in Counter(ids).items() if count > 1]
    if repeated:
        raise SchemaError(
            f"the {file} must name each id once, got {repeated[0]!r} {ids.count(repeated[0])} times; remove "
            "the others"
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
        np.array([known.get(name, -1) for name in _ids(qrels, column, "qrels").to_pylist()], np.int64)
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
    try:
        return (
            pc.cast(qrels.column("score").combine_chunks(), pa.int64())
            .to_numpy(zero_copy_only=False)
            .astype(np.int64, casting="safe")
        )
    except (pa.ArrowException, TypeError) as error:
        raise SchemaError(
            "column score of the qrels must hold a whole number in every row; write 0 for not relevant"
        ) from error


def _spans(qrels: pa.Table) -> tuple[Int64[np.ndarray, " J"], Int64[np.ndarray, " J"]]:
    present = [name for name in ("start", "end") if name in qrels.schema.names]
    if len(present) == 1:
        raise SchemaError(
            f"the qrels must have both start and end, or neither, got only {present[0]}; add the other"
        )
    if not present:
        return np.full(qrels.num_rows, NO_SPAN, np.int64), np.full(qrels.num_rows, NO_SPAN, np.int64)
    try:
        columns = [
            pc.fill_null(pc.cast(qrels.column(name).combine_chunks(), pa.int64()), NO_SPAN)
            for name in present
        ]
    except pa.ArrowException as error:
        raise SchemaError(
            "columns start and end of the qrels must hold whole numbers or null; mend them"
        ) from error
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
