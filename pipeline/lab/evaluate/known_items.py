"""Queries for a corpus that has none: a document's first sentence, cut out of it, must find the document.

A known-item task: one relevant document a query, without human judgements. It tells encoders and settings of
one corpus apart and costs nothing, but its queries are the corpus's own words and style: its scores say
little of what users will ask, and nothing across corpora.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from cairn.pipeline.cluster.queries import leading_sentence
from cairn.pipeline.corpus.judged_files import corpus_files, read_columns
from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.lab.evaluate.retrieval_set import NO_SPAN, Judgements, RetrievalSet

MIN_QUERY_CHARACTERS: Final = 20
"""A shorter first sentence is a heading or a name that many documents share."""
MIN_REST_CHARACTERS: Final = 200
"""What must be left to be found: a few sentences."""


def known_item_set(folder: Path, num_queries: int, seed: int) -> RetrievalSet:
    """Make a set of what ``ingest`` would read of a folder, with columns id, text and perhaps title.

    The sentences drawn are cut out of their texts. Documents that repeat an id are counted and left out.
    """
    corpus, num_repeated = _read_corpus(folder)
    doc_ids: list[str] = corpus.column("id").to_pylist()
    texts = [text or "" for text in corpus.column("text").to_pylist()]
    titles = (
        [title or "" for title in corpus.column("title").to_pylist()]
        if "title" in corpus.schema.names
        else [""] * len(texts)
    )
    skipped = {"documents that repeat an id": num_repeated} if num_repeated else {}
    return known_items_of(
        f"{folder.resolve().name} (known items)", doc_ids, titles, texts, num_queries, seed, skipped
    )


def known_items_of(
    name: str,
    doc_ids: Sequence[str],
    titles: Sequence[str],
    texts: Sequence[str],
    num_queries: int,
    seed: int,
    skipped: Mapping[str, int],
) -> RetrievalSet:
    """Make a set of documents in memory, whose ids are distinct."""
    left = list(texts)
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
        name=name,
        doc_ids=tuple(doc_ids),
        titles=tuple(titles),
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
        skipped=skipped,
    )


def split_first_sentence(text: str) -> tuple[str, str]:
    """Return the first sentence, white space collapsed, and what follows it."""
    sentence = leading_sentence(text)
    match = re.match(r"\s*" + r"\s+".join(map(re.escape, sentence.split())), text)
    return (sentence, text[match.end() :].lstrip()) if match else ("", text)


def _read_corpus(path: Path) -> tuple[pa.Table, int]:
    tables: list[pa.Table] = []
    for file in corpus_files(path):
        table = read_columns(file, ("id", "text"), ("title",))
        try:
            tables.append(
                table.cast(pa.schema([pa.field(name, pa.large_string()) for name in table.schema.names]))
            )
        except pa.ArrowException as error:
            raise SchemaError(f"{file.name} must hold text in id and text; write it again") from error
    corpus = pa.concat_tables(tables, promote_options="default")
    _, first = np.unique(np.array(corpus.column("id").to_pylist(), dtype=str), return_index=True)
    return corpus.take(pa.array(np.sort(first))), corpus.num_rows - len(first)
