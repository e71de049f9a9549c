from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.evaluate.bench import run_bench
from cairn.pipeline.lab.evaluate.encodings import Encoding
from cairn.pipeline.lab.evaluate.measures import MRR, NDCG
from cairn.pipeline.lab.evaluate.mteb_search import MtebModel
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet, read_retrieval_set
from cairn.pipeline.lab.evaluate.systems import System, baseline_systems, configured_systems, our_systems

from tests.lab.evaluate.test_mteb_tasks import scores_of

# Importing mteb takes seconds, so that one worker does it.
pytestmark = pytest.mark.xdist_group("mteb")

CORPUS = [
    {"id": "mat", "text": "the cat sat on the mat. the mat marks the way.", "title": ""},
    {"id": "river", "text": "the river walks past the mountain. stones mark the river.", "title": ""},
    {"id": "stone", "text": "old stones mark a way. a stone sat on the mountain.", "title": ""},
]
QUERIES = [{"id": "p", "text": "where sat the cat"}, {"id": "q", "text": "what marks the way"}]
QRELS = {"p": {"mat": 1}, "q": {"stone": 1, "mat": 1}}


def systems(config: EncoderConfig) -> dict[str, System]:
    named = {system.name: system for system in (*baseline_systems(config, 96), *our_systems(config))}
    return {**named, "rrf-8": replace(named["mean/none/chunk"], name="rrf-8", ranking="rrf")}


@pytest.fixture
def judged(tmp_path: Path, write) -> RetrievalSet:
    qrels = [{"query_id": q, "doc_id": d, "score": s} for q, own in QRELS.items() for d, s in own.items()]
    return read_retrieval_set(write(tmp_path / "s", CORPUS, QUERIES, qrels))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["mean/none/fused", "landmarks/corpus/chunk", "mean/none/fused+bm25", "bm25", "rrf-8"]
)
def test_mteb_measures_what_the_bench_measures(judged, tiny_config, name):
    from datasets import Dataset

    system = systems(tiny_config)[name]
    expected = next(run_bench(judged, [system], ContextConfig(context_documents=2))).means()
    parts = {
        "queries": Dataset.from_list(QUERIES),
        "corpus": Dataset.from_list(CORPUS),
        "relevant_docs": QRELS,
        "top_ranked": None,
    }
    model = MtebModel(system, ContextConfig(context_documents=2))
    scores = scores_of(model, "Retrieval", retrieval=parts)

    assert scores["ndcg_at_10"] == pytest.approx(expected[NDCG], abs=1e-4)
    assert scores["mrr_at_10"] == pytest.approx(expected[MRR], abs=1e-4)


@pytest.mark.parametrize("name", ["cairn/late", "cairn/late+bm25"])
def test_rows_of_token_vectors_rank_as_the_bench_ranks(judged, tiny_config, tiny_late_folder, name):
    config = replace(tiny_config, model=str(tiny_late_folder))
    system = {row.name: row for row in configured_systems(config)}[name]
    context = ContextConfig(context_documents=2)
    expected = next(run_bench(judged, [system], context))
    model = MtebModel(system, context)
    model.index(CORPUS)
    found = model.search(QUERIES, top_k=10)

    for query, run in zip(judged.query_ids, expected.run, strict=True):
        own = [judged.doc_ids[place] for place in run.positions.tolist()]
        assert list(found[query])[: len(own)] == own[:10]


@pytest.mark.filterwarnings("ignore")
def test_model_is_what_mteb_takes_for_search_and_encoding(tiny_config):
    from mteb.models.models_protocols import EncoderProtocol, SearchProtocol

    model = MtebModel(systems(tiny_config)["mean/none/fused"])

    assert isinstance(model, SearchProtocol)
    assert isinstance(model, EncoderProtocol)
    assert model.mteb_model_meta.name == "cairn/mean-none-fused"
    assert model.mteb_model_meta.embed_dim == 32


@pytest.mark.filterwarnings("ignore")
def test_revision_differs_where_vectors_may(tiny_config):
    plain = systems(tiny_config)["mean/none/fused"]
    others = [
        replace(plain, ranking="chunk"),
        replace(plain, encoding=replace(plain.encoding, encoder=replace(tiny_config, temperature=0.9))),
        replace(
            plain,
            encoding=Encoding(encoder=replace(plain.encoding.encoder, use_context=True), context="corpus"),
        ),
    ]
    revisions = [MtebModel(system).mteb_model_meta.revision for system in (plain, *others)]

    assert len(set(revisions)) == 4
    assert MtebModel(plain).mteb_model_meta.revision == revisions[0]


@pytest.mark.parametrize("name", ["bm25", "mean/none/fused+bm25"])
def test_reranking_scores_the_documents_it_is_given(tiny_config, name):
    model = MtebModel(systems(tiny_config)[name])
    model.index(CORPUS)
    found = model.search(QUERIES, top_k=1, top_ranked={"p": ["river", "mat"], "q": ["stone"]})

    assert list(found["p"]) == ["river", "mat"]
    assert found["p"]["mat"] > found["p"]["river"]
    assert list(found["q"]) == ["stone"]


def test_search_returns_no_more_than_top_k(tiny_config):
    model = MtebModel(systems(tiny_config)["mean/none/chunk"])
    model.index(CORPUS)

    assert [len(own) for own in model.search(QUERIES, top_k=2).values()] == [2, 2]


def test_titles_and_instructions_are_read_as_mteb_joins_them(tiny_config):
    model = MtebModel(systems(tiny_config)["mean/none/document"])
    model.index([{"id": "a", "title": "old", "text": "stone path"}, {"id": "b", "text": "river"}])
    found = model.search([{"id": "q", "text": "old stone", "instruction": "path"}], top_k=2)

    assert found["q"]["a"] == pytest.approx(1.0, abs=1e-6)


def test_encode_gives_the_vectors_of_the_encoder(tiny_config):
    config = replace(tiny_config, query_prefix="old ")
    model = MtebModel(systems(config)["mean/none/document"])
    batches = [{"text": ["stone path", "river"]}, {"text": ["cat"]}]
    encoder = DocumentEncoder(config)
    documents, queries = model.encode(batches), model.encode(batches, prompt_type="query")

    assert np.array_equal(documents, encoder.encode(["stone path", "river", "cat"]).document_vectors_NV)
    assert np.array_equal(queries, encoder.encode_queries(["stone path", "river", "cat"]))
    assert torch.allclose(
        model.similarity(documents, documents).diagonal(), model.similarity_pairwise(documents, documents)
    )


def test_search_before_indexing_is_refused(tiny_config):
    with pytest.raises(ConfigError, match=r"call index\(\) first"):
        MtebModel(systems(tiny_config)["bm25"]).search(QUERIES, top_k=1)
