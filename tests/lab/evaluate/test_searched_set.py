from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.collection import Collection, open_collection
from cairn.pipeline.config import ContextConfig, EncoderConfig, IngestConfig
from cairn.pipeline.lab.evaluate import searched_set
from cairn.pipeline.lab.evaluate.encodings import Encoding, build_encoder, encode_set
from cairn.pipeline.lab.evaluate.measures import BUDGETS, Answer, Spans
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.evaluate.searched_set import SearchedSet
from cairn.pipeline.lab.evaluate.systems import OurRanking, System
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.types import SearchResult, silent_progress

from tests.lab.evaluate.conftest import retrieval_set

WORDS = ["stone", "path", "way", "mark", "river", "mountain", "walk", "old", "cat", "mat", "sat", "the"]
AS_SEARCHED = pytest.mark.parametrize(("ranking", "options"), [
    ("document", {"granularity": "document", "hybrid": False, "late": False}),
    ("chunk", {"granularity": "chunk", "hybrid": False, "late": False}),
    ("fused", {"granularity": "both", "hybrid": False, "late": False}),
    ("fused+bm25", {"granularity": "both", "hybrid": True, "late": False}),
    ("late", {"granularity": "both", "hybrid": False}),
    ("late+bm25", {"granularity": "both", "hybrid": True}),
])  # fmt: skip


@dataclass(frozen=True)
class Twins:
    """The same texts as a collection and as an encoded set."""

    collection: Collection
    judged: RetrievalSet
    ranker: SearchedSet
    encoding: Encoding

    def search(self, **options: Any) -> list[SearchResult]:
        return self.collection.search_batch(list(self.judged.queries), top_k=100, **options)

    def answers(self, ranking: OurRanking) -> list[Answer]:
        system = System(name="x", encoding=self.encoding, ranking=ranking)
        return self.ranker.rank(system, np.ones(len(self.judged.queries), np.bool_))


@pytest.fixture(scope="module")
def twins(tmp_path_factory, tiny_config):
    folder = tmp_path_factory.mktemp("twins")
    config = replace(
        tiny_config,
        token_bytes=8,
        landmark_interval=64,
        window_tokens=94,
    )
    generator = np.random.default_rng(5)
    # More documents than a run holds, and more than a list of candidates.
    texts = [" ".join(generator.choice(WORDS, size)) for size in generator.integers(5, 400, 240)]
    titles = [" ".join(generator.choice(WORDS, 2)) if index % 3 else "" for index in range(len(texts))]
    queries = [" ".join(generator.choice(WORDS, 4)) for _ in range(5)]
    ids = [f"d{index:03d}" for index in range(len(texts))]
    rows = pa.table({"id": ids, "text": texts, "title": [title or None for title in titles]})
    pq.write_table(rows, folder / "corpus.parquet")
    build_index([str(folder / "corpus.parquet")], folder / "root", "c", IngestConfig(encoder=config))
    judged, encoding = retrieval_set(ids, queries, texts, titles), Encoding(encoder=config)
    encoder, _ = build_encoder(judged, encoding, ContextConfig())
    encoded = encode_set(judged, encoding, encoder, silent_progress)
    return Twins(
        collection=open_collection("c", root=folder / "root"),
        judged=judged,
        ranker=SearchedSet(judged, encoded, encoder.token_codebook),
        encoding=encoding,
    )


@AS_SEARCHED
def test_documents_are_ranked_as_a_search_of_the_collection_ranks_them(twins, ranking, options):
    for answer, result in zip(twins.answers(ranking), twins.search(passages=0, **options), strict=True):
        ids, scores = zip(*((hit.doc_id, hit.score) for hit in result.hits), strict=True)
        found = tuple(twins.judged.doc_ids[position] for position in answer.documents.positions)
        assert found == ids
        assert answer.documents.scores.clip(0.0, 1.0) == pytest.approx(scores, abs=1e-6)


def read_within(spans: Spans, budget: int) -> list[tuple[int, int, int]]:
    """Return what fits a budget, with neighbours joined."""
    columns = (column.tolist() for column in (spans.document_S, spans.start_S, spans.end_S))
    rows = list(zip(*columns, strict=True))
    totals = itertools.accumulate(end - start for _, start, end in rows)
    fitting = (row for row, total in zip(rows, totals, strict=True) if total <= budget)
    joined: list[tuple[int, int, int]] = []
    for document, start, end in sorted(fitting):
        if joined and joined[-1][0] == document and start - joined[-1][2] in (0, 1):
            joined[-1] = (document, joined[-1][1], end)
        else:
            joined.append((document, start, end))
    return joined


@AS_SEARCHED
@pytest.mark.parametrize("budget", BUDGETS)
def test_passages_within_a_budget_are_those_a_search_answers_with(twins, ranking, options, budget):
    searched = twins.search(max_characters=budget, **options)
    for answer, result in zip(twins.answers(ranking), searched, strict=True):
        assert answer.passages is not None
        found = sorted(
            (twins.judged.doc_ids.index(hit.doc_id), passage.start_char, passage.end_char)
            for hit in result.hits
            for passage in hit.passages
        )
        assert read_within(answer.passages, budget) == found
        assert found


def test_passages_come_only_where_they_are_wanted(twins):
    wanted = np.array([True, False, True, False, False])
    system = System(name="x", encoding=twins.encoding, ranking="chunk")

    assert [each.passages is not None for each in twins.ranker.rank(system, wanted)] == wanted.tolist()


@pytest.mark.parametrize("ranking", ["fused+bm25", "late+bm25"])
def test_ranking_does_not_depend_on_how_many_queries_are_ranked_at_once(twins, ranking, monkeypatch):
    whole = twins.answers(ranking)
    monkeypatch.setattr(searched_set, "BLOCK_QUERIES", 2)

    for one, other in zip(whole, twins.answers(ranking), strict=True):
        assert np.array_equal(one.documents.positions, other.documents.positions)


def test_equal_scores_are_ranked_by_id(encoded):
    same = np.tile(np.eye(16, dtype=np.float32)[:1], (12, 1))  # products with it are exact
    ids = [f"doc{index:02d}" for index in range(12)][::-1]
    judged = retrieval_set(ids, ["stone"] * 6, ["..."] * 12)
    system = System(name="x", encoding=Encoding(encoder=EncoderConfig()), ranking="document")
    answers = SearchedSet(judged, replace(encoded, document_vectors_NV=same)).rank(
        system, np.zeros(6, np.bool_)
    )

    assert answers[0].documents.positions.tolist() == list(range(12))[::-1]
