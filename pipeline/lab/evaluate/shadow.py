"""What changes where one collection takes another's place: the same queries asked of both, nothing switched.

Each query is asked of both in turn, and who is asked first alternates, so that a machine that slows down
slows both. A difference of quality or time is noise where a paired test over the queries says so. Queries:

    a .txt file                          a query a line
    a file in any format of a source     the column ``query``
    a folder of a server's feedback log  its searches; clicked documents count as relevant
    a judged folder                      its queries and qrels; scores above 0 are relevant
    known items                          first sentences of the collection's own documents

    Q queries
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline.cluster.queries import leading_sentence
from cairn.pipeline.collection import Collection
from cairn.pipeline.corpus.sources import resolve_sources
from cairn.pipeline.errors import SourceError
from cairn.pipeline.index.layout import read_manifest
from cairn.pipeline.lab.evaluate.measures import PairedComparison, Verdict, compare_paired, verdict_of
from cairn.pipeline.lab.evaluate.retrieval_set import MIN_QUERY_CHARACTERS, read_queries, read_relevant
from cairn.pipeline.lab.judged_files import find_judged_file, read_columns
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Float64

LOG_FILES: Final = "queries-*.parquet"
MAX_CHANGED: Final = 10
"""Queries that are shown, those that changed most."""


class AskedQueries(NamedTuple):
    """Distinct queries, the documents known to answer each, and why there are fewer than were asked for."""

    queries: tuple[str, ...]
    relevant: tuple[frozenset[str], ...]
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, queries: Iterable[str], answers: Iterable[tuple[str, str]] = ()) -> AskedQueries:
        """Take queries in order, and pairs of a query and a document that answers it."""
        found: dict[str, set[str]] = {query: set() for query in queries if query.strip()}
        for query, doc_id in answers:
            if query in found:
                found[query].add(doc_id)
        return cls(tuple(found), tuple(map(frozenset, found.values())))

    def sample(self, max_queries: int, seed: int) -> AskedQueries:
        """Draw at most so many queries, in their order."""
        if len(self.queries) <= max_queries:
            return self
        drawn = np.sort(np.random.default_rng(seed).permutation(len(self.queries))[:max_queries]).tolist()
        return AskedQueries(*(tuple(column[place] for place in drawn) for column in self[:2]))


def read_asked_queries(path: Path) -> AskedQueries:
    """Read queries; raises :class:`SourceError` where there are none."""
    try:
        asked = _read(path)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise SourceError(
            "queries must be text, a file with the column query, a judged folder or a feedback log, "
            f"got {path.name} ({type(error).__name__})"
        ) from error
    if not asked.queries:
        raise SourceError(f"{path.name} must hold at least one query, got none")
    return asked


def known_items(collection: Collection, num_queries: int, seed: int) -> AskedQueries:
    """Let first sentences of documents ask for their documents, which still hold them."""
    documents = collection.documents
    ids = np.array(documents.ids(), dtype=object)
    answers: dict[str, str] = {}
    for doc_id in np.random.default_rng(seed).permutation(ids).tolist():
        if len(answers) == num_queries:
            break
        sentence = leading_sentence(documents[doc_id].text)
        if len(sentence) >= MIN_QUERY_CHARACTERS and sentence not in answers:
            answers[sentence] = doc_id
    if not answers:
        raise SourceError(f"{collection.name!r} has no document with a sentence to ask by; give --queries")
    warning = (
        f"{len(answers):,} queries are asked in place of {num_queries:,}: {collection.name} has {len(ids):,} "
        f"documents, and no others begin with a sentence of {MIN_QUERY_CHARACTERS} characters of their own"
    )
    asked = AskedQueries.of(answers, answers.items())
    return asked._replace(warnings=() if len(answers) == num_queries else (warning,))


def _read(path: Path) -> AskedQueries:
    if not path.is_dir():
        if path.suffix == ".txt":
            return AskedQueries.of(line.strip() for line in path.read_text("utf-8").splitlines())
        read = [read_columns(file, ("query",)) for file in resolve_sources([str(path)])]
        queries = [query for table in read for query in table.column("query").cast(pa.string()).to_pylist()]
        return AskedQueries.of(filter(None, queries))
    if find_judged_file(path, "queries"):
        named = dict(zip(*read_queries(path), strict=True))
        good = ((named[query], doc_id) for query, doc_id in read_relevant(path) if query in named)
        return AskedQueries.of(named.values(), good)
    rows = [row for file in sorted(path.glob(LOG_FILES)) for row in pq.read_table(file).to_pylist()]
    clicks = ((row["query"], row["doc_ids"][0]) for row in rows if row["kind"] == "click")
    return AskedQueries.of((row["query"] for row in rows), clicks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two: what it holds and costs. ``query_milliseconds`` is the median of a whole search."""

    collection: str
    generation: int
    model: str
    documents: int
    chunks: int
    tokens: int
    encode_seconds: float
    index_bytes: int
    query_milliseconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedQuery:
    """A query with the share of its first documents that stayed, those that went and those that came."""

    query: str
    overlap: float
    gone: tuple[str, ...]
    came: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowReport:
    """What moves; ``comparison`` of a measure is new minus old, over the queries with a relevant document.

    ``quality`` maps ``old`` and ``new`` to the mean nDCG, None where no query has a relevant document.
    """

    old: Side
    new: Side
    top_k: int
    queries: int
    overlap: float
    overlap_low: float
    overlap_high: float
    same_first: float
    judged_queries: int
    quality: dict[str, float] | None
    quality_comparison: PairedComparison | None
    quality_verdict: Verdict | None
    milliseconds_comparison: PairedComparison
    milliseconds_verdict: Verdict
    changed: tuple[ChangedQuery, ...]
    warnings: tuple[str, ...] = ()


def compare_collections(
    old: Collection,
    new: Collection,
    asked: AskedQueries,
    *,
    top_k: int = 10,
    seed: int = 0,
    progress: ProgressListener = silent_progress,
) -> ShadowReport:
    """Ask both collections every query, with their own models and the default search."""
    sides = (old, new)
    for side in sides:
        side.search(asked.queries[0], top_k=top_k)  # loads the model, reads the files
    found: list[list[tuple[str, ...]]] = [[], []]
    milliseconds_2Q = np.empty((2, len(asked.queries)))
    for number, query in enumerate(asked.queries):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            started = time.perf_counter()
            hits = sides[which].search(query, top_k=top_k).hits
            milliseconds_2Q[which, number] = 1_000 * (time.perf_counter() - started)
            found[which].append(tuple(hit.doc_id for hit in hits))
        progress("compare", number + 1, len(asked.queries), "queries")
    pairs = list(zip(*found, strict=True))
    overlap_Q = np.array([_overlap(*pair) for pair in pairs])
    interval = compare_paired(overlap_Q, np.zeros_like(overlap_Q), seed=seed)
    quality_2Q = np.array(
        [[_ndcg(*one, top_k) for one in zip(own, asked.relevant, strict=True)] for own in found]
    )
    is_judged_Q = ~np.isnan(quality_2Q[0])
    quality = compare_paired(quality_2Q[1], quality_2Q[0], seed=seed) if is_judged_Q.any() else None
    slower = compare_paired(milliseconds_2Q[1], milliseconds_2Q[0], seed=seed)
    means = np.nanmean(quality_2Q[:, is_judged_Q], axis=1).tolist() if quality else []
    sides_2 = [_side(side, float(np.median(own))) for side, own in zip(sides, milliseconds_2Q, strict=True)]
    return ShadowReport(
        old=sides_2[0],
        new=sides_2[1],
        top_k=top_k,
        queries=len(asked.queries),
        overlap=interval.difference,
        overlap_low=interval.low,
        overlap_high=interval.high,
        same_first=float(np.mean([before[:1] == after[:1] for before, after in pairs])),
        judged_queries=int(is_judged_Q.sum()),
        quality=dict(zip(("old", "new"), means, strict=True)) if quality else None,
        quality_comparison=quality,
        quality_verdict=quality and verdict_of(quality),
        milliseconds_comparison=slower,
        milliseconds_verdict=verdict_of(slower),
        changed=_most_changed(asked.queries, pairs, overlap_Q),
        warnings=asked.warnings,
    )


def _overlap(before: Sequence[str], after: Sequence[str]) -> float:
    """Return the share of the longer answer that both hold; two empty ones are alike."""
    longest = max(len(before), len(after))
    return len(set(before) & set(after)) / longest if longest else 1.0


def _ndcg(found: Sequence[str], relevant: frozenset[str], top_k: int) -> float:
    """Return nDCG@top_k of binary relevance, NaN where nothing is relevant."""
    if not relevant:
        return np.nan
    gains_K = 1.0 / np.log2(np.arange(top_k) + 2)
    is_relevant_K = np.isin(np.array(found, dtype=object), list(relevant))
    return float(gains_K[: len(found)][is_relevant_K].sum() / gains_K[: len(relevant)].sum())


def _most_changed(
    queries: Sequence[str],
    pairs: Sequence[tuple[tuple[str, ...], ...]],
    overlap_Q: Float64[np.ndarray, " Q"],
) -> tuple[ChangedQuery, ...]:
    changed: list[ChangedQuery] = []
    for place in np.argsort(overlap_Q, kind="stable")[:MAX_CHANGED].tolist():
        before, after = pairs[place]
        if before != after:
            gone, came = (
                tuple(doc_id for doc_id in one if doc_id not in other)
                for one, other in ((before, after), (after, before))
            )
            overlap = float(overlap_Q[place])
            changed.append(ChangedQuery(query=queries[int(place)], overlap=overlap, gone=gone, came=came))
    return tuple(changed)


def _side(collection: Collection, query_milliseconds: float) -> Side:
    number = collection.layout.current_generation_number()
    assert number is not None, "a collection that answered has a generation"
    manifest = read_manifest(collection.layout, number)
    speed = manifest.encode_tokens_per_second
    return Side(
        collection=collection.name,
        generation=number,
        model=manifest.encoder.model,
        documents=manifest.documents,
        chunks=manifest.chunks,
        tokens=manifest.tokens,
        encode_seconds=manifest.tokens / speed if speed else 0.0,
        index_bytes=sum(file.size_bytes for file in manifest.files.values()),
        query_milliseconds=query_milliseconds,
    )
