"""Token vectors through the line: ingested, carried over, repaired, given to an older collection."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.index.generation import Generation, open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.recovery import repair_collection
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.line.recontextualise import recontextualise
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.checkpoint import weights_sha256_of
from cairn.pipeline.token_vectors.projection import LATE_NAME, TokenProjection

from tests import small_ingests
from tests.small_ingests import ingest_rows

ROWS: list[dict[str, Any]] = [
    {"id": "a", "title": "old stone", "text": "the old stone path over the mountain. " * 3},
    {"id": "b", "title": None, "text": "a river walks to the sea."},
    {"id": "c", "title": "cat", "text": "the cat sat on the mat. " * 4},
]


def settings(model: Path, token_bytes: int = 8) -> IngestConfig:
    return small_ingests.settings(model, context_documents=2, precision="fp32", token_bytes=token_bytes)


def ingest(
    tmp_path: Path, model: Path, rows: list[dict[str, Any]] = ROWS, token_bytes: int = 8
) -> Generation:
    ingest_rows(rows, tmp_path / "root", settings(model, token_bytes))
    return open_generation(layout(tmp_path))


def layout(tmp_path: Path) -> CollectionLayout:
    return CollectionLayout(tmp_path / "root", "c")


def require_codes(generation: Generation, model: Path, rows: list[dict[str, Any]]) -> None:
    """Compare what is stored with what the encoder makes of each document by itself."""
    stored = generation.token_vectors
    assert stored is not None
    encoder = DocumentEncoder(settings(model).encoder, None, None, stored.codebook)
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
        # Batches of another shape round otherwise: a token between two centroids may take the other one.
        assert (tokens.codes == encoded.chunk_tokens.rows[:, :-1]).mean() > 0.98
        assert np.array_equal(tokens.step_T, encoded.chunk_tokens.rows[:, -1])
        assert len(stored.titles.read(np.array([first])).codes) == len(encoded.title_tokens.rows)


def test_ingest_stores_the_codes_of_chunks_and_titles(tmp_path: Path, tiny_model_folder: Path):
    generation = ingest(tmp_path, tiny_model_folder)

    require_codes(generation, tiny_model_folder, ROWS)
    assert verify_collection(layout(tmp_path)) == []


def test_incremental_ingest_carries_codes_over_and_keeps_the_collections_codebook(
    tmp_path: Path, tiny_model_folder: Path
):
    first = ingest(tmp_path, tiny_model_folder)
    rows = [
        {**ROWS[0], "text": "a new mountain path."},
        *ROWS[1:],
        {"id": "d", "title": "x", "text": "the sea."},
    ]
    generation = ingest(tmp_path, tiny_model_folder, rows)

    assert first.token_vectors is not None
    assert generation.token_vectors is not None
    assert generation.token_vectors.codebook.fingerprint == first.token_vectors.codebook.fingerprint
    require_codes(generation, tiny_model_folder, rows)


def test_collection_without_token_vectors_ingests_on_and_gets_them_from_a_new_context(
    tmp_path: Path, tiny_model_folder: Path
):
    rows = [*ROWS, {"id": "d", "title": "x", "text": "sea"}]
    assert ingest(tmp_path, tiny_model_folder, token_bytes=0).token_vectors is None
    assert ingest(tmp_path, tiny_model_folder, rows, token_bytes=0).token_vectors is None

    recontextualise(tmp_path / "root", "c", settings(tiny_model_folder))

    require_codes(open_generation(layout(tmp_path)), tiny_model_folder, rows)


@pytest.mark.parametrize(("token_bytes", "is_trained"), [(4, True), (3, False)])
def test_projection_of_the_model_codes_where_it_is_small_enough(
    tmp_path: Path, tiny_model_folder: Path, token_bytes: int, *, is_trained: bool
):
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    generator = np.random.default_rng(0)
    vocabulary_size = load_backbone(settings(folder).encoder).tokenizer.get_vocab_size()
    projection = TokenProjection(
        matrix_DV=generator.standard_normal((32, 16)).astype(np.float16).astype(np.float32),
        weight_codes_X=generator.integers(1, 255, vocabulary_size).astype(np.uint8),
        weight_step=0.1,
        rms_V=np.full(16, 16**-0.5, np.float32),
        base_sha256=weights_sha256_of(folder),
    )
    projection.save(folder)
    generation = ingest(tmp_path, folder, token_bytes=token_bytes)

    assert generation.token_vectors is not None
    assert (generation.token_vectors.codebook.fingerprint == projection.fingerprint) == is_trained
    require_codes(generation, folder, ROWS)
    assert open_collection("c", root=tmp_path / "root").search("stone path").hits


def test_same_documents_give_the_same_codebook(tmp_path: Path, tiny_model_folder: Path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        ingest(tmp_path / name, tiny_model_folder)

    stored = [(layout(tmp_path / name).generation_folder(1) / LATE_NAME) for name in ("one", "other")]
    assert stored[0].read_bytes() == stored[1].read_bytes()


def test_collection_whose_codebook_is_lost_is_repaired_to_one_without_token_vectors(
    tmp_path: Path, tiny_model_folder: Path
):
    folder = ingest(tmp_path, tiny_model_folder).folder
    (folder / LATE_NAME).write_bytes(b"x")
    (layout(tmp_path).copies_folder(1) / LATE_NAME).write_bytes(b"x")
    report = repair_collection(layout(tmp_path))

    again = "`cairn plan c --apply --late` makes them again"
    assert f"; its token vectors are lost with {LATE_NAME}: {again}" in report.action
    assert open_generation(layout(tmp_path)).token_vectors is None
    assert open_collection("c", root=tmp_path / "root").search("stone path").hits
    assert (
        ingest(tmp_path, tiny_model_folder, [*ROWS, {"id": "d", "title": "x", "text": "sea"}]).num_documents
        == 4
    )
