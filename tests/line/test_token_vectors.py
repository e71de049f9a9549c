"""Token vectors through the line: ingested, carried over, repaired, given to an older collection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.index.generation import Generation, open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import (
    compact_collection,
    delete_documents,
    repair_collection,
    verify_collection,
)
from cairn.pipeline.index.names import COPIES, TOKENS_ARROW
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.recontextualise import recontextualise
from cairn.pipeline.token_vectors.projection import LATE_NAME, load_token_projection, save_token_projection

from tests.late_models import random_projection

ROWS: list[dict[str, Any]] = [
    {"id": "a", "title": "old stone", "text": "the old stone path over the mountain. " * 3},
    {"id": "b", "title": None, "text": "a river walks to the sea."},
    {"id": "c", "title": "cat", "text": "the cat sat on the mat. " * 4},
]


def settings(model: Path) -> IngestConfig:
    return IngestConfig(
        encoder=EncoderConfig(model=str(model), landmark_interval=16, use_context=False, precision="fp32"),
        cluster=ClusterConfig(num_clusters=2),
        context=ContextConfig(context_documents=2, max_document_tokens=16),
    )


def ingest(tmp_path: Path, model: Path, rows: list[dict[str, Any]] = ROWS) -> Generation:
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "corpus.parquet")
    build_index([str(tmp_path / "corpus.parquet")], tmp_path / "root", "c", settings(model))
    return open_generation(layout(tmp_path))


def layout(tmp_path: Path) -> CollectionLayout:
    return CollectionLayout(tmp_path / "root", "c")


def require_codes(generation: Generation, model: Path, rows: list[dict[str, Any]]) -> None:
    """Compare what is stored with what the encoder makes of each document by itself."""
    stored = generation.token_vectors
    assert stored is not None
    encoder = DocumentEncoder(settings(model).encoder, None, None, stored.projection)
    by_id = {row["id"]: row for row in rows}
    assert sorted(generation.doc_ids.to_pylist()) == sorted(str(doc_id) for doc_id in by_id)
    for position, doc_id in enumerate(generation.doc_ids.to_pylist()):
        row = by_id[doc_id]
        encoded = encoder.encode([str(row["text"])], titles=[row["title"]])
        assert encoded.chunk_tokens is not None
        assert encoded.title_tokens is not None
        first, end = generation.chunk_offsets[position : position + 2]
        tokens = stored.chunks.read(np.arange(first, end))
        assert np.array_equal(tokens.size_C, np.diff(encoded.chunk_tokens.offsets))
        near = stored.projection.codec.decode
        found = near(tokens.codes)
        assert np.abs(found - near(encoded.chunk_tokens.rows[:, :-1])).max() < 0.3, "one step of four bits"
        assert len(stored.titles.read(np.array([first])).codes) == len(encoded.title_tokens.rows)


def test_ingest_with_a_projection_stores_the_codes_of_chunks_and_titles(
    tmp_path: Path, tiny_late_folder: Path
):
    generation = ingest(tmp_path, tiny_late_folder)

    require_codes(generation, tiny_late_folder, ROWS)
    assert verify_collection(layout(tmp_path)) == []


def test_incremental_ingest_carries_codes_over_and_keeps_the_collections_projection(
    tmp_path: Path, tiny_late_folder: Path
):
    first = ingest(tmp_path, tiny_late_folder)
    save_token_projection(tiny_late_folder, random_projection(tiny_late_folder, dims=4, seed=5))
    rows = [
        {**ROWS[0], "text": "a new mountain path."},
        *ROWS[1:],
        {"id": "d", "title": "x", "text": "the sea."},
    ]
    generation = ingest(tmp_path, tiny_late_folder, rows)

    assert first.token_vectors is not None
    assert generation.token_vectors is not None
    assert generation.token_vectors.projection.fingerprint == first.token_vectors.projection.fingerprint
    require_codes(generation, tiny_late_folder, rows)


def test_collection_without_token_vectors_ingests_on_and_gets_them_from_a_new_context(
    tmp_path: Path, tiny_late_folder: Path
):
    projection = load_token_projection(tiny_late_folder / LATE_NAME)
    (tiny_late_folder / LATE_NAME).unlink()
    assert ingest(tmp_path, tiny_late_folder).token_vectors is None
    save_token_projection(tiny_late_folder, projection)
    assert (
        ingest(tmp_path, tiny_late_folder, [*ROWS, {"id": "d", "title": "x", "text": "sea"}]).token_vectors
        is None
    )

    recontextualise(tmp_path / "root", "c", settings(tiny_late_folder))

    require_codes(
        open_generation(layout(tmp_path)), tiny_late_folder, [*ROWS, {"id": "d", "title": "x", "text": "sea"}]
    )


def test_deletion_and_compaction_keep_the_codes_of_the_others(tmp_path: Path, tiny_late_folder: Path):
    ingest(tmp_path, tiny_late_folder)
    delete_documents(layout(tmp_path), ["b"])
    compact_collection(layout(tmp_path))

    require_codes(open_generation(layout(tmp_path)), tiny_late_folder, [ROWS[0], ROWS[2]])


@pytest.mark.parametrize("change", ["cut", "flipped", "missing"])
def test_damaged_token_file_is_found_and_made_again(tmp_path: Path, tiny_late_folder: Path, change: str):
    path = ingest(tmp_path, tiny_late_folder).folder / TOKENS_ARROW
    content = path.read_bytes()
    path.unlink()
    if change != "missing":
        path.write_bytes(content[:-9] if change == "cut" else content[:200] + b"\x55\xaa" + content[202:])

    assert any(TOKENS_ARROW in problem.file for problem in verify_collection(layout(tmp_path)))
    repair_collection(layout(tmp_path))
    require_codes(open_generation(layout(tmp_path)), tiny_late_folder, ROWS)


def test_collection_whose_projection_is_lost_is_repaired_to_one_without_token_vectors(
    tmp_path: Path, tiny_late_folder: Path
):
    folder = ingest(tmp_path, tiny_late_folder).folder
    (folder / LATE_NAME).write_bytes(b"x")
    assert open_generation(layout(tmp_path)).token_vectors is not None  # by the second copy
    (folder / COPIES / LATE_NAME).write_bytes(b"x")
    report = repair_collection(layout(tmp_path))

    assert report.action.endswith(
        f"; its token vectors are lost with {LATE_NAME}: `cairn plan c --apply --late` makes them again"
    )
    assert open_generation(layout(tmp_path)).token_vectors is None
    assert open_collection("c", root=tmp_path / "root").search("stone path").hits
    assert (
        ingest(tmp_path, tiny_late_folder, [*ROWS, {"id": "d", "title": "x", "text": "sea"}]).num_documents
        == 4
    )
