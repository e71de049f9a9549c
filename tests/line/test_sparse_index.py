"""A learned sparse encoder through the line: its postings built, changed, merged, repaired and searched."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.collection import encode_sparse, load_query_encoder, open_collection
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.encode.sparse import SparseEncoder
from cairn.pipeline.errors import ConfigError, FingerprintMismatchError
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout, wholes
from cairn.pipeline.index.maintenance import compact_collection, delete_documents, repartition
from cairn.pipeline.index.names import SPARSE_ARROW
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.line import build_index as line
from cairn.pipeline.line.recontextualise import recontextualise
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.types import SPARSE_STEP, SPARSE_WEIGHT

from tests.search.shards.in_process import shards_of
from tests.small_ingests import ingest_rows, settings, text_of
from tests.sparse_models import make_sparse_model

QUERIES = ("old stone path", "the cat sat", "zebra")


def document(number: int, version: int = 0) -> dict[str, Any]:
    text = text_of([number, version], 6 + 9 * (number % 5))
    return {"id": f"d{number:02d}", "title": f"{number}", "text": text, "year": 2000 + number % 3}


ROWS = [document(number) for number in range(12)]


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sparse_model(tmp_path_factory.mktemp("models") / "sparse", "router")


@pytest.fixture(scope="module")
def config(tiny_model_folder: Path, sparse_model: Path) -> IngestConfig:
    own = {"landmark_interval": 8, "precision": "fp32", "token_bytes": 8, "sparse_model": str(sparse_model)}
    return settings(tiny_model_folder, context_documents=2, **own)


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory, config: IngestConfig) -> Path:
    folder = tmp_path_factory.mktemp("ingested")
    ingest(folder / "root", config, ROWS)
    return folder / "root"


@pytest.fixture
def layout(ingested: Path, tmp_path: Path) -> CollectionLayout:
    shutil.copytree(ingested, tmp_path / "root")
    return CollectionLayout(tmp_path / "root", "c")


@lru_cache
def encoder_of(model: Path) -> SparseEncoder:
    return SparseEncoder(str(model), "fp32")


def ingest(root: Path, config: IngestConfig, rows: list[dict[str, Any]]) -> None:
    ingest_rows(rows, root, config)


def expected_scores(
    layout: CollectionLayout, model: Path, rows: list[dict[str, Any]], query: str
) -> dict[str, float]:
    """Score documents by NumPy: by their best 16 chunks, of which each token has its highest weight."""
    encoder, generation = encoder_of(model), open_generation(layout)
    weights, size = encoder.encode_queries([query])[0], 16
    texts, scores = {row["id"]: row["text"] for row in rows}, dict[str, float]()
    for position, doc_id in enumerate(generation.doc_ids.to_pylist()):
        first, end = generation.chunk_offsets[position : position + 2].tolist()
        spans = zip(generation.chunk_starts[first:end], generation.chunk_ends[first:end], strict=True)
        stored = encoder.encode([texts[doc_id][start:stop] for start, stop in spans])
        rows_of = np.ascontiguousarray(stored.rows).view(SPARSE_WEIGHT)[:, 0]
        dense = np.zeros((end - first, 1 + max(*weights, int(rows_of["token"].max()))))
        owner = np.repeat(np.arange(end - first), np.diff(stored.offsets))
        dense[owner, rows_of["token"]] = rows_of["weight"] * SPARSE_STEP
        asked, shares = list(weights), np.array(list(weights.values()))
        windows = [dense[start : start + size][:, asked].max(axis=0) for start in range(end - first)]
        scores[doc_id] = float(max(window @ shares for window in windows))
    return scores


def require_sparse(layout: CollectionLayout, model: Path, rows: list[dict[str, Any]]) -> None:
    """Compare the scores that searches show with those of NumPy, and find the collection whole."""
    collection = open_collection("c", root=layout.root)
    for query in QUERIES:
        expected = expected_scores(layout, model, rows, query)
        hits = collection.search(query, top_k=len(rows), chunk_tokens=8).hits
        assert sorted(hit.doc_id for hit in hits) == sorted(row["id"] for row in rows)
        found = {hit.doc_id: hit.scores.get("sparse", 0.0) for hit in hits}
        assert found == pytest.approx(expected, abs=1e-4)
    assert verify_collection(layout) == []


def test_search_shows_the_scores_of_numpy(layout: CollectionLayout, sparse_model: Path) -> None:
    require_sparse(layout, sparse_model, ROWS)

    status = open_collection("c", root=layout.root).status()
    assert status["sparse"]["model"] == str(sparse_model)
    assert status["sparse"]["bytes"] > 0
    assert status["fingerprints"]["sparse"] == SparseEncoder(str(sparse_model), "fp32").fingerprint


def test_sparse_scores_rank_only_where_they_have_a_weight(layout: CollectionLayout) -> None:
    collection = open_collection("c", root=layout.root)
    with_sparse = collection.search("old stone path", weights={"sparse": 1e6}, late=False).hits
    assert [hit.doc_id for hit in with_sparse] == [
        hit.doc_id for hit in sorted(with_sparse, key=lambda hit: -hit.scores["sparse"])
    ]
    alone = {"document": 0.0, "chunk": 0.0, "bm25": 0.0, "sparse": 1.0}
    hits = collection.search("old stone path", granularity="chunk", weights=alone, late=False).hits
    assert hits[0].scores["sparse"] == max(hit.scores["sparse"] for hit in hits)
    for options in ({"weights": {"sparse": 0.0}}, {"hybrid": False}):
        hits = collection.search("old stone path", **options).hits
        assert all("sparse" not in hit.scores for hit in hits)
    filtered = collection.search("old stone path", filters={"year": 2001}).hits
    assert {hit.metadata["year"] for hit in filtered} == {2001}


@pytest.mark.parametrize("whole_chunks", [0, tiers.WHOLE_CHUNKS])
def test_updates_deletions_merges_and_a_new_context_keep_the_weights(
    layout: CollectionLayout,
    sparse_model: Path,
    config: IngestConfig,
    monkeypatch: pytest.MonkeyPatch,
    whole_chunks: int,
) -> None:
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", whole_chunks)
    rows = [document(0, version=1), *ROWS[1:], document(12)]
    ingest(layout.root, config, rows)
    delete_documents(layout, ["d03", "d05"])
    left = [row for row in rows if row["id"] not in ("d03", "d05")]
    assert len(open_generation(layout).segments) == (2 if whole_chunks == 0 else 1)
    require_sparse(layout, sparse_model, left)
    compact_collection(layout)
    require_sparse(layout, sparse_model, left)
    recontextualise(layout.root, "c", config)
    require_sparse(layout, sparse_model, left)


def test_partitions_and_shards_answer_as_one_folder_does(
    layout: CollectionLayout, sparse_model: Path
) -> None:
    one = [open_collection("c", root=layout.root).search(query).hits for query in QUERIES]
    repartition(layout, 3)
    assert all(
        (own.generation_folder(each.generation) / SPARSE_ARROW).is_file() for own, each in parts_of(layout)
    )
    require_sparse(layout, sparse_model, ROWS)

    sharded = Searcher(
        layout,
        load_query_encoder(open_generation(layout)),
        open_one=shards_of(layout.root, 2),
        encode_sparse=encode_sparse,
    )
    assert [sharded.search(query).hits for query in QUERIES] == one


def parts_of(layout: CollectionLayout) -> list[Any]:
    return list(wholes(layout, open_generation(layout).manifest))


def test_collection_keeps_its_sparse_encoder(
    layout: CollectionLayout, sparse_model: Path, config: IngestConfig, tmp_path: Path
) -> None:
    moved = shutil.copytree(sparse_model, tmp_path / "moved")
    ingest(layout.root, with_sparse(config, moved), ROWS)
    assert open_collection("c", root=layout.root).status()["sparse"]["model"] == str(moved)

    other = make_sparse_model(tmp_path / "other", "router", seed=7)
    with pytest.raises(FingerprintMismatchError, match="must keep the model it was built with"):
        ingest(layout.root, with_sparse(config, other), [*ROWS, document(20)])
    with pytest.raises(FingerprintMismatchError, match=r"encoder\.sparse_model is '.*', got not set"):
        ingest(layout.root, with_sparse(config, None), ROWS)
    shutil.rmtree(moved)
    with pytest.raises(ConfigError, match="moved"):
        open_collection("c", root=layout.root).search("old stone")


def test_killed_first_ingest_goes_on_with_the_sparse_encoder_that_it_began_with_alone(
    tmp_path: Path, config: IngestConfig, sparse_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shutil.copytree(sparse_model, tmp_path / "sparse")
    with monkeypatch.context() as patched:
        patched.setattr(line, "publish", lambda *_, **__: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            ingest(tmp_path / "root", with_sparse(config, own), ROWS)
    shutil.rmtree(own)
    make_sparse_model(own, "router", seed=7)
    with pytest.raises(FingerprintMismatchError, match="must go on with the model it began with"):
        ingest(tmp_path / "root", with_sparse(config, own), ROWS)
    shutil.rmtree(own)
    shutil.copytree(sparse_model, own)
    ingest(tmp_path / "root", with_sparse(config, own), ROWS)
    require_sparse(CollectionLayout(tmp_path / "root", "c"), own, ROWS)


def test_collection_without_has_no_weights(tmp_path: Path, config: IngestConfig) -> None:
    ingest(tmp_path / "root", with_sparse(config, None), ROWS)

    collection = open_collection("c", root=tmp_path / "root")
    assert collection.status()["sparse"] is None
    assert "sparse" not in collection.search("old stone").hits[0].scores
    assert not any("sparse" in path.name for path in (tmp_path / "root").rglob("*"))


def with_sparse(config: IngestConfig, model: Path | None) -> IngestConfig:
    return replace(
        config, encoder=replace(config.encoder, sparse_model=None if model is None else str(model))
    )
