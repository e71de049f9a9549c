from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.collection import Collection, open_collection
from cairn.pipeline.config import ContextConfig, EncoderConfig, IngestConfig
from cairn.pipeline.lab.evaluate.encodings import EncodedSet, Encoding, encode_set
from cairn.pipeline.lab.evaluate.evidence import BUDGETS
from cairn.pipeline.lab.evaluate.lexical import LexicalHits, read_lexicon, search_bm25
from cairn.pipeline.lab.evaluate.ranking import NUM_CANDIDATES, Answer, SetRanker
from cairn.pipeline.lab.evaluate.retrieval_set import Judgements, RetrievalSet
from cairn.pipeline.lab.evaluate.systems import Ranking, System
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.search.fusion import with_neighbours
from cairn.pipeline.token_vectors.projection import LATE_NAME, load_token_projection
from cairn.pipeline.types import silent_progress

from tests.late_models import copy_with_projection

ENCODING = Encoding(encoder=EncoderConfig())
DOC_IDS = [f"doc{index:02d}" for index in range(12)]


def system(ranking: Ranking, window_chunks: int = 1) -> System:
    return System(name=ranking, encoding=ENCODING, ranking=ranking, window_chunks=window_chunks)


def hits(*rows: list[tuple[int, float]]) -> LexicalHits:
    return LexicalHits(
        positions=[np.array([position for position, _ in row], np.int64) for row in rows],
        scores=[np.array([score for _, score in row], np.float32) for row in rows],
        index_bytes=0,
    )


@pytest.fixture
def ranker(encoded: EncodedSet) -> SetRanker:
    documents = hits(*[[(query, 4.0), (query + 3, 2.0), (11, 0.5)] for query in range(6)])
    chunks = hits(*[[(2 * query, 4.0), (1, 2.0)] if query else [(7, 1.0)] for query in range(6)])
    return SetRanker(DOC_IDS, encoded, documents, chunks, None)


def cosines(encoded: EncodedSet, query: int) -> tuple[list[float], list[float], list[float]]:
    """Return a query's cosine with every document, every document's best chunk, and every chunk."""
    vector = encoded.query_vectors_QV[query]
    chunk = (encoded.chunk_vectors_MV @ vector).tolist()
    bounds = zip(encoded.chunk_offsets[:-1].tolist(), encoded.chunk_offsets[1:].tolist(), strict=True)
    return (encoded.document_vectors_NV @ vector).tolist(), [max(chunk[a:b]) for a, b in bounds], chunk


def order(scores: dict[int, float]) -> list[int]:
    return sorted(scores, key=lambda index: (-scores[index], index))


def read(encoded: EncodedSet, answer: Any) -> list[int]:
    """Return the chunks of an answer's passages of one chunk."""
    chunk_of = {
        key: index
        for index, key in enumerate(
            zip(encoded.chunk_document.tolist(), encoded.start_char.tolist(), strict=True)
        )
    }
    return [
        chunk_of[key]
        for key in zip(answer.passages.document_S.tolist(), answer.passages.start_S.tolist(), strict=True)
    ]


ALL = np.ones(6, np.bool_)


def test_document_ranking_is_by_the_document_vector(encoded: EncodedSet, ranker: SetRanker):
    for query, answer in enumerate(ranker.rank(system("document"), ALL)):
        document, _, chunk = cosines(encoded, query)
        near = with_neighbours(np.array(chunk), encoded.chunk_document)
        passages = {m: (document[d] + near[m]) / 2 for m, d in enumerate(encoded.chunk_document.tolist())}

        assert answer.documents.positions.tolist() == order(dict(enumerate(document)))
        assert read(encoded, answer) == order(passages)


def test_chunk_ranking_is_by_the_best_chunk(encoded: EncodedSet, ranker: SetRanker):
    for query, answer in enumerate(ranker.rank(system("chunk"), ALL)):
        _, best, chunk = cosines(encoded, query)

        assert answer.documents.positions.tolist() == order(dict(enumerate(best)))
        assert read(encoded, answer) == order(dict(enumerate(chunk)))


def test_fused_ranking_is_by_the_mean_of_both(encoded: EncodedSet, ranker: SetRanker):
    for query, answer in enumerate(ranker.rank(system("fused"), ALL)):
        document, best, chunk = cosines(encoded, query)
        scores = {n: document[n] / 4 + best[n] * 3 / 4 for n in range(12)}

        assert answer.documents.positions.tolist() == order(scores)
        near = with_neighbours(np.array(chunk), encoded.chunk_document)
        assert read(encoded, answer) == order(
            {m: (scores[d] + near[m]) / 2 for m, d in enumerate(encoded.chunk_document.tolist())}
        )


def test_chunks_of_a_baseline_know_nothing_of_their_neighbours(encoded: EncodedSet, ranker: SetRanker):
    baseline = replace(system("document"), is_baseline=True)
    for query, answer in enumerate(ranker.rank(baseline, ALL)):
        document, _, chunk = cosines(encoded, query)
        assert read(encoded, answer) == order(
            {m: (document[d] + chunk[m]) / 2 for m, d in enumerate(encoded.chunk_document.tolist())}
        )


def test_bm25_ranking_holds_what_bm25_found(encoded: EncodedSet, ranker: SetRanker):
    answers = ranker.rank(system("bm25"), ALL)

    assert [answer.documents.positions.tolist() for answer in answers] == [
        [query, query + 3, 11] for query in range(6)
    ]
    assert read(encoded, answers[0]) == [7]
    assert read(encoded, answers[3]) == [6, 1]


def test_rrf_ranking_adds_reciprocal_ranks(encoded: EncodedSet, ranker: SetRanker):
    for query, answer in enumerate(ranker.rank(system("rrf"), ALL)):
        _, best, chunk = cosines(encoded, query)
        scores = {n: 1 / (61 + rank) for rank, n in enumerate(order(dict(enumerate(best))))}
        for rank, n in enumerate([query, query + 3, 11]):
            scores[n] += 1 / (61 + rank)
        chunk_scores = {m: 1 / (61 + rank) for rank, m in enumerate(order(dict(enumerate(chunk))))}
        for rank, m in enumerate([2 * query, 1] if query else [7]):
            chunk_scores[m] += 1 / (61 + rank)

        assert answer.documents.positions.tolist() == order(scores)
        assert read(encoded, answer)[:5] == order(chunk_scores)[:5]


def test_fused_bm25_without_a_hit_is_the_fused_ranking(encoded: EncodedSet):
    nothing = hits(*[[] for _ in range(6)])
    lexicon = read_lexicon(["..." * 60] * 12, encoded, ["stone"] * 6, nothing)
    ranker = SetRanker(DOC_IDS, encoded, nothing, None, lexicon)
    with_bm25, without = (ranker.rank(system(name), ALL) for name in ("fused+bm25", "fused"))

    assert [a.documents.positions.tolist() for a in with_bm25] == [
        a.documents.positions.tolist() for a in without
    ]
    assert [read(encoded, a) for a in with_bm25] == [read(encoded, a) for a in without]


def test_passages_come_only_where_they_are_wanted(ranker: SetRanker):
    wanted = np.array([True, False, True, False, False, True])

    assert [answer.passages is not None for answer in ranker.rank(system("chunk"), wanted)] == wanted.tolist()


def test_ranking_does_not_depend_on_how_many_queries_are_scored_at_once(
    encoded: EncodedSet, ranker: SetRanker, monkeypatch: pytest.MonkeyPatch
):
    whole = ranker.rank(system("fused", 2), ALL)
    monkeypatch.setattr("cairn.pipeline.lab.evaluate.ranking.BLOCK_QUERIES", 2)

    assert [a.documents.positions.tolist() for a in ranker.rank(system("fused", 2), ALL)] == [
        a.documents.positions.tolist() for a in whole
    ]


def test_equal_scores_are_ranked_by_id(encoded: EncodedSet):
    same = np.tile(np.eye(16, dtype=np.float32)[:1], (12, 1))  # products with it are exact
    tied = EncodedSet(
        document_vectors_NV=same,
        chunk_vectors_MV=encoded.chunk_vectors_MV,
        query_vectors_QV=encoded.query_vectors_QV,
        chunk_offsets=encoded.chunk_offsets,
        start_char=encoded.start_char,
        end_char=encoded.end_char,
        tokens=0,
        encode_seconds=0.0,
        query_seconds=0.0,
    )
    answers = SetRanker(DOC_IDS[::-1], tied, None, None, None).rank(system("document"), ALL)

    assert answers[0].documents.positions.tolist() == list(range(12))[::-1]


WORDS = [
    "stone",
    "path",
    "way",
    "mark",
    "river",
    "mountain",
    "walk",
    "old",
    "cat",
    "mat",
    "sat",
    "on",
    "the",
    "a",
]
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
    ranker: SetRanker
    encoding: Encoding
    ids: list[str]
    queries: list[str]

    def answers(self, ranking: Ranking) -> list[Answer]:
        evaluated = System(name="x", encoding=self.encoding, ranking=ranking, window_chunks=2)
        return self.ranker.rank(evaluated, np.ones(len(self.queries), np.bool_))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory, tiny_config: EncoderConfig) -> Twins:
    folder = tmp_path_factory.mktemp("twins")
    config = replace(tiny_config, model=str(copy_with_projection(Path(tiny_config.model), folder / "model")))
    generator = np.random.default_rng(5)
    texts = [" ".join(generator.choice(WORDS, size)) for size in generator.integers(5, 200, 40)]
    queries = [" ".join(generator.choice(WORDS, 4)) for _ in range(5)]
    ids = [f"d{index:02d}" for index in range(len(texts))]
    titles = [" ".join(generator.choice(WORDS, 2)) if index % 3 else "" for index in range(len(texts))]
    rows = pa.table({"id": ids, "text": texts, "title": [title or None for title in titles]})
    pq.write_table(rows, folder / "corpus.parquet")
    build_index([str(folder / "corpus.parquet")], folder / "root", "c", IngestConfig(encoder=config))
    none = np.zeros(0, np.int64)
    judged = RetrievalSet(
        name="c",
        doc_ids=tuple(ids),
        titles=tuple(titles),
        texts=tuple(texts),
        query_ids=("a", "b", "c", "d", "e"),
        queries=tuple(queries),
        judgements=Judgements(query_J=none, document_J=none, gain_J=none, start_J=none, end_J=none),
    )
    encoding = Encoding(encoder=config)
    encoded = encode_set(judged, encoding, ContextConfig(), silent_progress)
    projection = load_token_projection(Path(config.model) / LATE_NAME)
    bm25 = search_bm25(texts, queries, NUM_CANDIDATES, silent_progress, titles)
    ranker = SetRanker(ids, encoded, None, None, read_lexicon(texts, encoded, queries, bm25), projection)
    return Twins(open_collection("c", root=folder / "root"), ranker, encoding, ids, queries)


@AS_SEARCHED
def test_documents_are_ranked_as_a_search_of_the_collection_ranks_them(
    twins: Twins, ranking: Ranking, options: dict[str, Any]
):
    searched = twins.collection.search_batch(twins.queries, top_k=100, passages=0, **options)

    for answer, result in zip(twins.answers(ranking), searched, strict=True):
        assert [twins.ids[position] for position in answer.documents.positions.tolist()] == [
            hit.doc_id for hit in result.hits
        ]
        assert answer.documents.scores.clip(0.0, 1.0).tolist() == pytest.approx(
            [hit.score for hit in result.hits], abs=1e-5
        )


@AS_SEARCHED
@pytest.mark.parametrize("budget", BUDGETS)
def test_passages_within_a_budget_are_those_a_search_answers_with(
    twins: Twins, ranking: Ranking, options: dict[str, Any], budget: int
):
    searched = twins.collection.search_batch(
        twins.queries,
        top_k=100,
        max_characters=budget,
        chunk_tokens=2 * twins.encoding.encoder.landmark_interval,
        **options,
    )

    for answer, result in zip(twins.answers(ranking), searched, strict=True):
        assert answer.passages is not None
        read: set[tuple[str, int]] = set()
        for document, start, end in zip(
            answer.passages.document_S, answer.passages.start_S, answer.passages.end_S, strict=True
        ):
            if len(read) + end - start > budget:
                break
            read |= {(twins.ids[document], character) for character in range(start, end)}
        assert {
            (hit.doc_id, c)
            for hit in result.hits
            for p in hit.passages
            for c in range(p.start_char, p.end_char)
        } == read
        assert len(read) > budget / 2
