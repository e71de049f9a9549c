"""Rows of the table: which there are, by models, endpoints and the vectors that a set brings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cairn
import numpy as np
import pytest
from cairn.cli.main import cairn as command
from cairn.cli.main import run
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.encode import documents
from cairn.pipeline.errors import ConfigError, SchemaError
from cairn.pipeline.lab.evaluate import systems
from cairn.pipeline.lab.evaluate.bench import run_bench
from cairn.pipeline.lab.evaluate.encodings import Encoding
from cairn.pipeline.lab.evaluate.report import ingest_flags
from cairn.pipeline.lab.evaluate.retrieval_set import given_width, read_retrieval_set, sample_set
from cairn.pipeline.lab.evaluate.systems import (
    OUR_RANKINGS,
    baseline_config,
    baseline_systems,
    choose_systems,
    configured_systems,
    given_systems,
    our_systems,
    select_systems,
    varied,
)
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.model_defaults import encoder_config

from tests.lab.evaluate.conftest import DOCUMENTS, QRELS, QUERIES, unit, write_set

BASE = EncoderConfig()


def test_baselines_are_those_of_a_rag_pipeline():
    pieces = ("overlap", "titled-overlap")
    sizes = [f"{name}-{size}" for name in ("chunks", "titled") for size in (128, 256)]
    assert {system.name for system in baseline_systems(BASE, 512)} == {
        *("bm25", *sizes, "late-128"),
        *(f"{name}-{size}/{way}" for name in pieces for size in (128, 256) for way in ("dense", "convex")),
        "titled-overlap-128/convex+maxsim",
    }
    other = EncoderConfig(pooling="lmk", attention="full", landmark_interval=32, landmarks="sentence")
    assert baseline_systems(other, 512) == baseline_systems(BASE, 512), "whatever the base chunks by"
    shared = {each.encoding for each in baseline_systems(BASE, 512) if each.name.startswith("overlap-128")}
    assert (len(shared), len({system.encoding for system in our_systems(BASE)})) == (1, 12)
    assert [system.name for system in baseline_systems(BASE, 96)] == ["bm25"]
    names = {system.name for system in baseline_systems(BASE, 264, prefix_tokens=10)}
    assert {"chunks-128", "chunks-256"} & names == {"chunks-128"}


def test_configured_systems_take_the_configuration_as_it_is():
    base = EncoderConfig(use_context=True)
    systems = configured_systems(base)

    assert {system.encoding for system in systems} == {Encoding(encoder=base, context="corpus")}
    names = ["document", "chunk", "fused", "fused+bm25"]
    assert [system.name for system in systems] == [f"cairn/{name}" for name in names]


def test_selection_keeps_the_order_of_the_table():
    systems = baseline_systems(BASE, 512)
    chosen = select_systems(systems, ["late-*", "chunks-???"])

    assert [system.name for system in chosen] == ["chunks-128", "chunks-256", "late-128"]
    assert select_systems(systems, []) == systems
    with pytest.raises(ConfigError, match="no row of the table matches 'chunk'; did you mean 'chunks-256'"):
        select_systems(systems, ["chunk"])


def test_window_and_pooled_prefix_go_with_what_varies():
    short = varied(BASE, 96, attention="full")
    assert (short.window_tokens, short.window_overlap_tokens) == (96, 48)
    assert varied(EncoderConfig(attention="full", window_tokens=256), 512).window_tokens == 256
    base = EncoderConfig(document_prefix="text: ", pool_prefix=True)
    assert varied(base, landmark_interval=128).pool_prefix
    assert not varied(base, pooling="cls").pool_prefix
    assert not varied(base, attention="full").pool_prefix


def test_baselines_pool_as_the_model_does_and_know_no_temperature():
    base = EncoderConfig(pooling="cls", temperature=0.9, query_temperature=0.8, use_context=True)
    by_name = {system.name: system.encoding.encoder for system in baseline_systems(base, 512)}
    others = {
        (config.temperature, config.query_temperature, config.use_context) for config in by_name.values()
    }

    assert (by_name["chunks-128"].pooling, by_name["late-128"].pooling) == ("cls", "mean")
    assert others == {(1.0, None, False)}


def test_context_that_the_model_cannot_read_is_refused_with_the_choice_of_rows(tiny_config, monkeypatch):
    config = replace(tiny_config, use_context=True)
    backbone = load_backbone(config)
    backbone.max_context = 4
    monkeypatch.setattr(systems, "load_cutter", lambda _: backbone)
    few, many = (ContextConfig(context_documents=count) for count in (4, 5))
    baseline = replace(tiny_config, use_context=False)

    chosen, _ = choose_systems(config, baseline, few, ["bm25", "cairn/*"], is_whole_table=False)
    assert [system.name for system in chosen][:2] == ["bm25", "cairn/document"]
    assert choose_systems(config, baseline, many, ["bm25"], is_whole_table=False)[0] == chosen[:1]
    with pytest.raises(ConfigError, match="must be at most the model's 4, got 5"):
        choose_systems(config, baseline, many, ["bm25", "cairn/*"], is_whole_table=False)


Rows = Sequence[Mapping[str, Any]]
GENERATOR = np.random.default_rng(5)
OF_DOCUMENTS, OF_QUERIES = GENERATOR.standard_normal((4, 6)), GENERATOR.standard_normal((3, 6))
NAMES = ["bm25", "vectors/dense", "vectors/convex", *(f"cairn/{way}" for way in OUR_RANKINGS)]


def with_vectors(rows: Rows, vectors: Any) -> list[dict[str, Any]]:
    """Return rows with a vector each."""
    return [{**row, "embedding": each} for row, each in zip(rows, vectors, strict=True)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a set whose documents and queries have vectors."""
    documents = with_vectors(DOCUMENTS, OF_DOCUMENTS.tolist())
    return write_set(tmp_path / "given", documents, with_vectors(QUERIES, OF_QUERIES.tolist()), QRELS)


def test_vectors_of_a_set_rank_by_their_cosine(folder: Path) -> None:
    judged = read_retrieval_set(folder, "embedding")
    cosines_QN = unit(OF_QUERIES) @ unit(OF_DOCUMENTS).T
    systems = given_systems({"landmark_interval": 8}, "embedding", given_width([judged]))
    assert [system.name for system in systems] == NAMES
    results = {result.system.name: result for result in run_bench(judged, systems)}
    for name in ("vectors/dense", "cairn/document", "cairn/chunk"):
        for cosine_N, ranked in zip(cosines_QN, results[name].run, strict=True):
            assert ranked.positions.tolist() == np.argsort(-cosine_N).tolist()
            assert ranked.scores == pytest.approx(np.sort(cosine_N)[::-1], abs=1e-5)
    assert ingest_flags(systems[-1]) == "--vector-column embedding --landmark-interval 8"


def test_fused_rows_answer_as_a_search_with_vectors_and_texts(folder: Path, tmp_path: Path) -> None:
    judged = read_retrieval_set(folder, "embedding")
    notes = cairn.Collection.create("notes", root=tmp_path / "root")
    notes.add(with_vectors(DOCUMENTS, OF_DOCUMENTS.tolist()), vector_column="embedding")
    (result,) = run_bench(judged, given_systems({}, "embedding", 6)[-1:])
    found = notes.search_vectors(OF_QUERIES, queries=list(judged.queries))
    for answer, ranked in zip(found, result.run, strict=True):
        assert [judged.doc_ids[place] for place in ranked.positions] == [hit.doc_id for hit in answer.hits]


@pytest.mark.parametrize("of_endpoint", [False, True], ids=["given", "endpoint"])
def test_rows_are_judged_by_tokens_that_are_read_here(
    folder: Path,
    embedding_server: Any,
    monkeypatch: pytest.MonkeyPatch,
    tiny_model_folder: Path,
    of_endpoint: bool,
) -> None:
    monkeypatch.setattr(documents, "TOKEN_READER", str(tiny_model_folder))
    chosen: dict[str, Any] = {"token_bytes": 8}
    judged = read_retrieval_set(folder, None if of_endpoint else "embedding")
    if of_endpoint:
        chosen["model"] = embedding_server.model
        base, baseline = encoder_config(chosen), baseline_config(chosen, None)
        rows, _ = choose_systems(base, baseline, ContextConfig(), ["cairn/*"], is_whole_table=False)
    else:
        rows = given_systems(chosen, "embedding", 6)
        assert [system.name for system in rows] == [*NAMES, "cairn/late", "cairn/late+bm25"]
        assert "--vector-column embedding --model MODEL_OF_THE_VECTORS" in ingest_flags(rows[-1])
    results = {result.system.name: result for result in run_bench(judged, rows)}
    fused, late = results["cairn/fused"], results["cairn/late"]
    pairs = zip(fused.run, late.run, strict=True)
    assert any(not np.array_equal(one.scores, other.scores) for one, other in pairs)
    assert late.cost.index_bytes > fused.cost.index_bytes


def test_vectors_of_chunks_stand_for_their_spans(tmp_path: Path) -> None:
    cat = len(DOCUMENTS[0]["text"])
    chunks = [
        [{"start": 0, "end": len(row["text"]), "vector": each}]
        for row, each in zip(DOCUMENTS, OF_DOCUMENTS.tolist(), strict=True)
    ]
    first, second = {"start": 0, "end": 24}, {"start": 24, "end": cat}
    chunks[0] = [{**first, "vector": [1.0] * 6}, {**second, "vector": OF_QUERIES[0].tolist()}]
    documents = with_vectors(DOCUMENTS, chunks)
    written = write_set(tmp_path / "s", documents, with_vectors(QUERIES, OF_QUERIES.tolist()), QRELS)
    (tmp_path / "s" / "corpus.parquet").unlink()
    (tmp_path / "s" / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    judged = read_retrieval_set(written, "embedding")
    (result,) = run_bench(
        judged, [each for each in given_systems({}, "embedding", 6) if "chunk" in each.name]
    )
    assert judged.doc_ids[result.run[0].positions[0]] == "cat"
    assert result.run[0].scores[0] == pytest.approx(1.0)


def test_a_sample_keeps_each_vector_with_its_row(folder: Path) -> None:
    whole = read_retrieval_set(folder, "embedding")
    part = sample_set(whole, max_queries=1, max_documents=1, seed=0)
    assert whole.given is not None
    assert part.given is not None
    of_documents = dict(zip(whole.doc_ids, whole.given.documents, strict=True))
    assert part.given.documents == tuple(of_documents[name] for name in part.doc_ids)
    query = whole.query_ids.index(part.query_ids[0])
    assert part.given.queries_QV.tolist() == [whole.given.queries_QV[query].tolist()]


@pytest.mark.parametrize(
    ("of_documents", "of_queries", "sentence"),
    [
        (None, OF_QUERIES.tolist(), "corpus.parquet must have one column 'embedding'"),
        (OF_DOCUMENTS.tolist(), None, "queries.parquet must have one column 'embedding'"),
        (["a"] * 4, OF_QUERIES.tolist(), "lists of numbers"),
        ([[]] * 4, OF_QUERIES.tolist(), "corpus must hold vectors, got none"),
        ([[1.0]] * 4, OF_QUERIES.tolist(), "queries must hold vectors of 1 numbers, got one of 6 in row 1"),
        ([[1.0], [0.0], [1.0], [1.0]], [[1.0]] * 3, "got a zero vector in row 2"),
        ([[1.0]] * 4, [[1.0], [float("nan")], [1.0]], "NaN, infinity or too large a number in row 2"),
        ([[1.0]] * 4, [[1.0], None, [1.0]], "got null in row 2"),
        ([[1.0]] * 4, [[{"start": 0, "end": 1, "vector": [1.0]}]] * 3, "one vector a query"),
    ],
)
def test_vectors_that_cannot_be_used_are_refused(
    tmp_path: Path, of_documents: Any, of_queries: Any, sentence: str
) -> None:
    documents = DOCUMENTS if of_documents is None else with_vectors(DOCUMENTS, of_documents)
    queries = QUERIES if of_queries is None else with_vectors(QUERIES, of_queries)
    with pytest.raises(SchemaError, match=sentence):
        read_retrieval_set(write_set(tmp_path / "s", documents, queries, QRELS), "embedding")


def test_settings_of_a_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="--model m"):
        given_systems({"model": "m"}, "embedding", 6)
    with pytest.raises(ConfigError, match="use_context must go with a model"):
        given_systems({"use_context": True}, "embedding", 6)


def test_evaluate_by_own_vectors_advises_a_search_by_vectors(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", str(folder), "--vector-column", "embedding", "--quiet"]
    assert run(command, arguments, "cairn") == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in NAMES)
    assert "ingest SOURCE --collection NAME --vector-column embedding" in out
    assert "search_vectors(VECTORS, queries=TEXTS)" in out
    assert run(command, [*arguments, "--ablate"], "cairn") == 2
    assert "must go without --ablate" in capsys.readouterr().err


def test_rows_of_an_endpoint_are_ranked_by_its_vectors(embedding_server, judged):
    chosen = {"model": embedding_server.model}
    base, baseline = encoder_config(chosen), baseline_config(chosen, None)
    words, _ = choose_systems(base, baseline, ContextConfig(), ["bm25"], is_whole_table=False)
    assert [result.system.name for result in run_bench(judged, words)] == ["bm25"]
    assert not embedding_server.requests, "word rows ask for nothing"
    patterns = ["cairn/*", "chunks-128", "titled-overlap-128/*"]
    systems, left_out = choose_systems(base, baseline, ContextConfig(), patterns, is_whole_table=False)
    names = [system.name for system in systems]
    assert {"cairn/fused+bm25", "chunks-128", "titled-overlap-128/convex"} <= set(names)
    assert "no states" in left_out["titled-overlap-128/convex+maxsim"]
    assert "endpoint" in left_out["late-128"]
    results = {result.system.name: result for result in run_bench(judged, systems)}
    assert set(results) == set(names)
    assert all(embedding_server.embedded[query] for query in judged.queries)
    for text in judged.texts:  # short texts are one chunk, which the baseline sends as it is
        assert embedding_server.embedded[text.strip()]


def test_endpoint_is_refused_where_a_backbone_is_needed(embedding_server):
    with pytest.raises(ConfigError, match="must run here"):
        load_backbone(encoder_config({"model": embedding_server.model}))


def test_rows_with_and_without_lines_stand_side_by_side(embedding_server, judged, tmp_path):
    chosen = {"model": embedding_server.model, "describe": f"{embedding_server.host}/v1"}
    embedding_server.answer = lambda question: "zebra" if judged.texts[0].strip() in question else "a line"
    base, baseline = encoder_config(chosen), baseline_config(chosen, None)
    patterns = ["cairn/fused+bm25", "undescribed/fused+bm25", "chunks-128"]
    systems, _ = choose_systems(base, baseline, ContextConfig(), patterns, is_whole_table=False)
    assert [system.name for system in systems] == [patterns[2], patterns[1], patterns[0]]
    asking = replace(judged, queries=("zebra",) * len(judged.queries))
    for _ in range(2):  # the second comes from the cache
        results = {result.system.name: result for result in run_bench(asking, systems, cache=tmp_path)}
        firsts = {name: result.run[0].positions[0] for name, result in results.items()}
        assert firsts["cairn/fused+bm25"] == 0
    assert set(embedding_server.questions.values()) == {1}
    flags = ingest_flags(systems[-1])
    assert f"--describe {embedding_server.host}/v1" in flags
    assert "--describe" not in ingest_flags(systems[-2])
