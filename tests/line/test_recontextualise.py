from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.errors import FingerprintMismatchError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.rows import LanceTables, vectors_of
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.line.recontextualise import recontextualise

from tests import small_ingests
from tests.small_ingests import ingest_rows, text_of

TOPICS = {
    "stone": ["stone", "hill", "path", "mountain"],
    "water": ["river", "old", "walk", "way"],
    "cat": ["cat", "mat", "mark", "the"],
}


def corpus(counts: dict[str, int]) -> list[dict[str, str]]:
    return [
        {"id": f"{topic}{number}", "text": text_of([len(topic), number], 10 + number % 7, TOPICS[topic])}
        for topic, count in counts.items()
        for number in range(count)
    ]


BEFORE = corpus({"stone": 12, "water": 12})
NOW = corpus({"stone": 12, "water": 12, "cat": 40})


def settings(model: Path) -> IngestConfig:
    return small_ingests.settings(
        model,
        num_clusters=3,
        context_documents=6,
        max_document_tokens=16,
        shard_characters=400,
        use_context=True,
    )


def vectors(root: Path, number: int | None = None) -> dict[str, Any]:
    layout = CollectionLayout(root, "c")
    versions = open_generation(layout, number).manifest.lance_versions
    tables = LanceTables.open(layout, versions)
    found: dict[str, Any] = {}
    for table, key in (("documents", "doc_id"), ("chunks", "chunk_id")):
        for batch in tables.scan(table, [key, "vector"], versions):
            found |= dict(zip(batch.column(key).to_pylist(), vectors_of(batch.column("vector")), strict=True))
    return found


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, vector in expected.items():
        np.testing.assert_allclose(found[key], vector, atol=1e-5)


@pytest.fixture
def drifted(tmp_path: Path, tiny_model_folder: Path) -> Path:
    """A collection begun with stones and water, which is mostly about cats now."""
    config = settings(tiny_model_folder)
    ingest_rows(BEFORE, tmp_path / "root", config)
    ingest_rows(NOW, tmp_path / "root", config)
    return tmp_path / "root"


def test_status_names_the_changed_clusters_and_what_a_new_context_costs(drifted: Path) -> None:
    status = open_collection("c", root=drifted).status()
    context, now = status["context"], status["cluster_sizes"]
    drift, cost = context["drift"], context["recontextualisation"]
    assert (drift["verdict"], status["generation"]) == ("re-contextualise", 2)
    assert (status["documents"], cost["documents"]) == (64, 64)
    assert min(cost["tokens"], cost["seconds"]) > 0
    changed = drift["changed_clusters"]
    assert sum(now[each] for each in changed) > sum(context["cluster_sizes"][each] for each in changed)


def test_recontextualised_collection_is_the_one_a_first_ingest_of_the_corpus_would_build(
    drifted: Path, tmp_path: Path, tiny_model_folder: Path
) -> None:
    config = settings(tiny_model_folder)
    old, opened = vectors(drifted), open_collection("c", root=drifted)
    assert opened.search("stone path").generation == 2
    report = recontextualise(drifted, "c", config)
    assert (report.generation, report.documents, report.encoded) == (3, 64, 64)
    ingest_rows(NOW, tmp_path / "fresh", config)
    require_equal(vectors(drifted), vectors(tmp_path / "fresh"))
    assert max(float(np.abs(vectors(drifted)[key] - vector).max()) for key, vector in old.items()) > 1e-3
    answers = [
        [
            (hit.doc_id, round(hit.score, 4), round(hit.scores.get("bm25", 0), 3))
            for hit in open_collection("c", root=root).search("old river").hits
        ]
        for root in (drifted, tmp_path / "fresh")
    ]
    assert answers[0] == answers[1]
    assert verify_collection(CollectionLayout(drifted, "c")) == []
    require_equal(vectors(drifted, 2), old)  # the generation before is read in its own context
    assert opened.search("stone path").generation == 3
    drift = opened.status()["context"]["drift"]
    assert (drift["verdict"], drift["changed_clusters"], drift["added_share"]) == ("none", [], 0.0)
    report = ingest_rows(corpus({"stone": 13, "water": 12, "cat": 40}), drifted, config)
    assert (report.indexed, report.unchanged, report.encoded) == (1, 64, 1)


def test_recontextualising_with_other_weights_is_refused(
    drifted: Path, tmp_path: Path, tiny_roberta_folder: Path
) -> None:
    with pytest.raises(FingerprintMismatchError, match="must keep the model it was built with"):
        recontextualise(drifted, "c", settings(tiny_roberta_folder))
    assert open_generation(CollectionLayout(drifted, "c")).number == 2
