"""How fast a collection is verified: every file hashed, every row compared with the position files."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import verify_collection

from tests.index import stones

pytestmark = pytest.mark.bench

VECTOR_DIM = 768
NUM_DOCUMENTS = 40_000
TEXT = " ".join(f"w{number * 7 % 9_973}" for number in range(300))
GOAL_MB_PER_SECOND = 500


def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stones have long texts and vectors of 768 dimensions."""
    rng = np.random.default_rng(0)

    def unit_vectors(_: str, count: int, __: int = 0) -> np.ndarray:
        vectors = rng.standard_normal((count, VECTOR_DIM), dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    documents, chunks = stones.document_rows, stones.chunk_rows
    monkeypatch.setattr(stones, "VECTOR_DIM", VECTOR_DIM)
    monkeypatch.setattr(stones, "unit_vectors", unit_vectors)
    monkeypatch.setattr(stones, "text_of", lambda doc_id, _=0: f"stone {doc_id} {TEXT}")
    monkeypatch.setattr(stones, "document_rows", lambda ids, version: documents(ids, version, VECTOR_DIM))
    monkeypatch.setattr(stones, "chunk_rows", lambda ids, version: chunks(ids, version, VECTOR_DIM))


def test_verify_reads_half_a_gigabyte_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch)
    layout = CollectionLayout(tmp_path, "stones")
    stones.publish_documents(layout, stones.document_ids(NUM_DOCUMENTS))
    num_bytes = sum(path.stat().st_size for path in layout.folder.rglob("*") if path.is_file())
    seconds = list[float]()
    for _ in range(3):
        began = time.perf_counter()
        assert verify_collection(layout) == []
        seconds.append(time.perf_counter() - began)
    speeds = [round(num_bytes / 1e6 / each) for each in seconds]
    print(f"\nverify of {num_bytes / 1e6:.0f} MB: {speeds} MB/s")
    assert max(speeds) >= GOAL_MB_PER_SECOND
