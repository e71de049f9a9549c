"""Judged sets that bring vectors: nothing is encoded, and rows rank by what the set holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cairn
import numpy as np
import pytest
from cairn.cli.main import cairn as command
from cairn.cli.main import run
from cairn.pipeline.encode import documents
from cairn.pipeline.errors import ConfigError, SchemaError
from cairn.pipeline.lab.evaluate.bench import run_bench
from cairn.pipeline.lab.evaluate.report import ingest_flags
from cairn.pipeline.lab.evaluate.retrieval_set import given_width, read_retrieval_set, sample_set
from cairn.pipeline.lab.evaluate.systems import OUR_RANKINGS, given_systems

from tests.lab.evaluate.conftest import DOCUMENTS, QRELS, QUERIES, unit, write_set

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


def test_rows_of_given_vectors_are_judged_by_tokens_that_are_read_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path
) -> None:
    monkeypatch.setattr(documents, "TOKEN_READER", str(tiny_model_folder))
    judged = read_retrieval_set(folder, "embedding")
    systems = given_systems({"token_bytes": 8}, "embedding", 6)
    assert [system.name for system in systems] == [*NAMES, "cairn/late", "cairn/late+bm25"]
    results = {result.system.name: result for result in run_bench(judged, systems)}
    fused, late = results["cairn/fused"], results["cairn/late"]
    assert any(
        not np.array_equal(one.scores, other.scores) for one, other in zip(fused.run, late.run, strict=True)
    )
    assert "--vector-column embedding --model MODEL_OF_THE_VECTORS" in ingest_flags(systems[-1])


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
