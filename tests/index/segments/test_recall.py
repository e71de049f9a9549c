"""Inverted files in segments find as many of the nearest vectors as those of one segment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import CHUNKS, DOCUMENTS
from cairn.pipeline.index.rows import LanceTables, vectors_of
from cairn.pipeline.index.segments import writer
from cairn.pipeline.index.segments.segment import VectorIndex
from cairn.pipeline.vector_index.faiss_build import build_faiss_index
from cairn.pipeline.vector_index.faiss_index import open_faiss_index

from tests.exact_search import nearest
from tests.index import stones

QUERIES = 2_000
TOP_K = 10
LOST_RECALL = 0.005
PUBLICATIONS = 4
COLLECTIONS = 2


def recall(index: VectorIndex, vectors_NV: np.ndarray) -> float:
    """Return the share of the ten exact nearest vectors that an index finds."""
    queries = np.random.default_rng(7).standard_normal((QUERIES, vectors_NV.shape[1])).astype(np.float32)
    answers = index.search(queries, TOP_K)[1]
    pairs = zip(answers, nearest(vectors_NV, queries, TOP_K), strict=True)
    return float(np.mean([np.isin(answer, best).mean() for answer, best in pairs]))


def publish_at_random(layout: CollectionLayout, config: IndexConfig, rng: np.random.Generator) -> None:
    """Publish some 1,600 documents in segments: splits, updates and deletions are drawn."""
    left = stones.document_ids(950)
    stones.publish_documents(layout, left, config=config)
    for number in range(PUBLICATIONS):
        changed = rng.permutation(left).tolist()
        again = changed[: int(rng.integers(1, 60))]
        gone = changed[len(again) : len(again) + int(rng.integers(0, 60))]
        written = [*stones.document_ids(int(rng.integers(0, 300)), f"n{number}"), *again]
        replaced = [*again, *gone]
        stones.publish_documents(layout, written, replaced=replaced, version=number, config=config)
        left = [doc_id for doc_id in left if doc_id not in replaced] + written


def about(rng: np.random.Generator, subjects: np.ndarray, count: int) -> np.ndarray:
    vectors = subjects[rng.integers(0, len(subjects), count)] + rng.standard_normal((count, 32)) / 2
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(("is_new", "kind"), [(False, "ivf_sq8"), (True, "flat")])
def test_small_segment_is_coded_where_its_subjects_are_those_of_the_codebook(
    tmp_path: Path, is_new: bool, kind: str
) -> None:
    rng, config = np.random.default_rng(3), IndexConfig(index_kind="ivf_sq8")
    subjects, new = rng.standard_normal((2, 16, 32))
    written: list[dict[str, Any]] = []
    for number, (count, own) in enumerate([(2_000, subjects), (600, new if is_new else subjects)]):
        path = tmp_path / str(number)
        codebook = writer.read_codebook(tmp_path / "0", written[0]) if written else None
        vectors = about(rng, own, count)
        written.append(
            writer.write_index(lambda block=vectors: iter([block]), count, 32, codebook, config, path)
        )
    assert written[1]["kind"] == kind


@pytest.mark.parametrize("kind", ["ivf_sq8", "ivf_rabitq"])
def test_recall_of_any_segments_is_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """The one segment has a codebook of its own; a mean, as one codebook differs from another by as much."""
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    monkeypatch.setattr(tiers, "MAX_DELETED_SHARE", 0.8)
    monkeypatch.setattr(writer, "EXACT_VECTORS", 40)
    config = IndexConfig(index_kind=kind)
    lost: dict[str, list[float]] = {DOCUMENTS: [], CHUNKS: []}
    for seed in range(COLLECTIONS):
        layout = CollectionLayout(tmp_path / str(seed), "stones")
        publish_at_random(layout, config, np.random.default_rng([seed, len(kind)]))
        split = open_generation(layout)
        assert len(split.segments) > 2
        for table, index in ((DOCUMENTS, split.documents), (CHUNKS, split.chunks)):
            versions = split.manifest.lance_versions
            rows = LanceTables.open(layout, versions).scan(table, ["vector"], versions)
            vectors = np.concatenate([vectors_of(batch.column("vector")) for batch in rows])
            description = build_faiss_index(
                lambda block=vectors: iter([block]), len(vectors), vectors.shape[1], config, tmp_path / table
            )
            in_one = recall(open_faiss_index(tmp_path / table, description), vectors)
            assert 0.7 < in_one < 1
            lost[table].append(in_one - recall(index, vectors))
    assert np.mean(lost[DOCUMENTS]) <= LOST_RECALL
    assert np.mean(lost[CHUNKS]) <= LOST_RECALL
