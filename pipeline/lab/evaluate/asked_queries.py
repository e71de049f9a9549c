"""Queries to compare collections by: a list, what users asked, a judged set, or sentences of the collection.

a .txt file                          a query a line
a file in any format of a source     the column ``query``
a folder of a server's feedback log  its searches; clicked documents count as relevant
a judged folder                      its queries and qrels; scores above 0 are relevant
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline.cluster.queries import leading_sentence
from cairn.pipeline.collection import Collection
from cairn.pipeline.corpus.judged_files import find_judged_file, read_columns
from cairn.pipeline.corpus.sources import resolve_sources
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.evaluate.known_items import MIN_QUERY_CHARACTERS
from cairn.pipeline.lab.evaluate.retrieval_set import read_queries, read_relevant

LOG_FILES = "queries-*.parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedQueries:
    """Distinct queries, and the ids of the documents that answer each; empty where none is known.

    ``warnings`` say why there are fewer than were asked for.
    """

    queries: tuple[str, ...]
    relevant: tuple[frozenset[str], ...]
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, queries: Sequence[str], answers: Sequence[tuple[str, str]] = ()) -> AskedQueries:
        """Take queries in order, and pairs of a query and a document that answers it."""
        found: dict[str, set[str]] = {query: set() for query in queries if query.strip()}
        for query, doc_id in answers:
            if query in found:
                found[query].add(doc_id)
        return cls(queries=tuple(found), relevant=tuple(map(frozenset, found.values())))

    def sample(self, max_queries: int, seed: int) -> AskedQueries:
        """Draw at most so many queries, in their order."""
        if len(self.queries) <= max_queries:
            return self
        drawn = np.sort(np.random.default_rng(seed).permutation(len(self.queries))[:max_queries]).tolist()
        return AskedQueries(
            queries=tuple(self.queries[place] for place in drawn),
            relevant=tuple(self.relevant[place] for place in drawn),
        )


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
    answers: list[tuple[str, str]] = []
    num_short = 0
    for doc_id in np.random.default_rng(seed).permutation(ids).tolist():
        if len(answers) == num_queries:
            break
        sentence = leading_sentence(documents[doc_id].text)
        if len(sentence) >= MIN_QUERY_CHARACTERS:
            answers.append((sentence, doc_id))
        else:
            num_short += 1
    if not answers:
        raise SourceError(f"{collection.name!r} has no document with a sentence to ask by; give --queries")
    asked = AskedQueries.of([query for query, _ in answers], answers)
    if len(asked.queries) == num_queries:
        return asked
    reasons = [f"{collection.name} has {len(ids):,} documents"]
    if num_short:
        reasons.append(f"{num_short:,} of them begin with no sentence of {MIN_QUERY_CHARACTERS} characters")
    if num_alike := len(answers) - len(asked.queries):
        reasons.append(f"{num_alike:,} begin with the same sentence as another")
    sentence = f"{len(asked.queries):,} queries are asked in place of {num_queries:,}: {', '.join(reasons)}"
    return replace(asked, warnings=(sentence,))


def _read(path: Path) -> AskedQueries:
    if not path.is_dir():
        if path.suffix == ".txt":
            return AskedQueries.of([line.strip() for line in path.read_text("utf-8").splitlines()])
        read = [read_columns(file, ("query",)) for file in resolve_sources([str(path)])]
        queries = [query for table in read for query in table.column("query").cast(pa.string()).to_pylist()]
        return AskedQueries.of([query for query in queries if query])
    if find_judged_file(path, "queries"):
        queries = dict(zip(*read_queries(path), strict=True))
        good = [
            (queries[query_id], doc_id) for query_id, doc_id in read_relevant(path) if query_id in queries
        ]
        return AskedQueries.of([*queries.values()], good)
    files = sorted(path.glob(LOG_FILES))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    clicks = [(row["query"], row["doc_ids"][0]) for row in rows if row["kind"] == "click"]
    return AskedQueries.of([row["query"] for row in rows], clicks)
