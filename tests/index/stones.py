"""Collections of random vectors: no model, a few milliseconds each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
from cairn.pipeline.config import IndexConfig, IngestConfig
from cairn.pipeline.errors import CollectionNotFoundError, IntegrityError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import delete_documents, find_served
from cairn.pipeline.index.names import CHUNKS, DOCUMENTS
from cairn.pipeline.index.publish import GenerationFacts, publish_generation
from cairn.pipeline.index.recovery import prepare_writer
from cairn.pipeline.index.rows import LanceTables
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.token_vectors.codebook import TokenCodebook
from cairn.pipeline.token_vectors.projection import LATE_NAME
from cairn.pipeline.types import TOKEN_FIELDS, chunks_schema, documents_schema

from tests.late_models import random_codebook

VECTOR_DIM = 16
METADATA = (pa.field("year", pa.int64()),)
CODEBOOK = random_codebook(num_bytes=2, model_dim=16)


def text_of(doc_id: str, version: int = 0) -> str:
    """Return a text whose words name the document, so that BM25 finds it."""
    return f"stone {doc_id} " + " ".join(f"w{version}x{i}" for i in range(4))


def unit_vectors(key: str, count: int, vector_dim: int = VECTOR_DIM) -> np.ndarray:
    """Return vectors that depend on the key alone."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    vectors = np.random.default_rng(seed).standard_normal((count, vector_dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def num_chunks_of(doc_id: str) -> int:
    """Return between one and three chunks, by the id."""
    return 1 + len(doc_id) % 3


def document_rows(doc_ids: Sequence[str], version: int = 0, vector_dim: int = VECTOR_DIM) -> pa.RecordBatch:
    """Return rows of the documents table."""
    texts = [text_of(doc_id, version) for doc_id in doc_ids]
    vectors = np.concatenate([unit_vectors(f"{doc_id}/{version}", 1, vector_dim) for doc_id in doc_ids])
    columns = {
        "doc_id": pa.array(doc_ids, pa.string()),
        "title": pa.array([f"title {doc_id}" for doc_id in doc_ids], pa.string()),
        "text": pa.array(texts, pa.large_string()),
        "content_sha256": pa.array(
            [hashlib.sha256(text.encode()).hexdigest() for text in texts], pa.string()
        ),
        "source_file": pa.array(["part-0.parquet"] * len(doc_ids), pa.string()),
        "cluster_id": pa.array([len(doc_id) % 2 for doc_id in doc_ids], pa.int32()),
        "num_tokens": pa.array([len(text.split()) for text in texts], pa.int32()),
        "num_chunks": pa.array([num_chunks_of(doc_id) for doc_id in doc_ids], pa.int32()),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vector_dim),
        "year": pa.array([2000 + version] * len(doc_ids), pa.int64()),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=documents_schema(METADATA, vector_dim))


def chunk_rows(
    doc_ids: Sequence[str], version: int = 0, vector_dim: int = VECTOR_DIM, *, with_tokens: bool = False
) -> pa.RecordBatch:
    """Return rows of the chunks table, covering each text whole; token codes depend on chunk and version."""
    rows: list[tuple[str, str, int, int, int]] = []
    vectors = []
    for doc_id in doc_ids:
        count = num_chunks_of(doc_id)
        bounds = np.linspace(0, len(text_of(doc_id, version)), count + 1).astype(int)
        rows += [(f"{doc_id}#{i}", doc_id, i, int(bounds[i]), int(bounds[i + 1])) for i in range(count)]
        vectors.append(unit_vectors(f"{doc_id}/{version}/chunks", count, vector_dim))
    schema = chunks_schema(vector_dim, TOKEN_FIELDS if with_tokens else ())
    columns = dict(zip(schema.names, (list(column) for column in zip(*rows, strict=True)), strict=False))
    if with_tokens:
        columns["token_codes"] = [token_rows(f"{row[0]}/{version}", row[2]) for row in rows]
        columns["title_codes"] = [token_rows(row[1], 2) if row[2] == 0 else b"" for row in rows]
    vector_column = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(vectors).ravel()), vector_dim)
    return pa.RecordBatch.from_arrays(
        [
            vector_column if field.name == "vector" else pa.array(columns[field.name], field.type)
            for field in schema
        ],
        schema=schema,
    )


def token_rows(key: str, count: int) -> bytes:
    """Return codes of some tokens, with the byte of their step, that depend on the key alone."""
    row_bytes = CODEBOOK.vector_bytes + 1
    return hashlib.shake_128(key.encode()).digest(count * row_bytes)


def publish_documents(
    layout: CollectionLayout,
    doc_ids: Sequence[str],
    *,
    replaced: Sequence[str] = (),
    version: int = 0,
    config: IndexConfig | None = None,
    context: bytes = b"",
    with_tokens: bool = False,
) -> Manifest:
    """Do what an ingest does after encoding.

    Settle, commit (``replaced`` ids are deleted first where they stand), publish. Another
    ``context`` gives the generation side files of its own. Token vectors come
    from the first publication on, or never.
    """
    with layout.writer_lock():
        before = prepare_writer(layout)
        standing = set(served_ids(layout))
        layout.pending_folder.mkdir(exist_ok=True)
        side_files = {}
        for name in ("context.arrow", "clusters.arrow"):
            side_files[name] = layout.pending_folder / name
            side_files[name].write_bytes(name.encode() * 100 + context)
        return publish_rows(
            layout,
            before,
            lambda has_tokens: [
                (document_rows(doc_ids, version), chunk_rows(doc_ids, version, with_tokens=has_tokens))
            ],
            VECTOR_DIM,
            fields=METADATA,
            added=TOKEN_FIELDS if with_tokens else (),
            deleted=[doc_id for doc_id in replaced if doc_id in standing],
            side_files=side_files,
            index=config or IndexConfig(),
        )


def publish_rows(
    layout: CollectionLayout,
    before: Manifest | None,
    rows: Callable[[bool], Iterable[tuple[pa.RecordBatch, pa.RecordBatch]]],
    vector_dim: int,
    *,
    counts: tuple[int, int] | None = None,
    fields: Sequence[pa.Field] = (),
    added: Sequence[pa.Field] = (),
    deleted: Sequence[str] = (),
    side_files: Mapping[str, Path] = MappingProxyType({}),
    codebook: TokenCodebook = CODEBOOK,
    run_id: str = "run",
    encoder: str = "e" * 64,
    settings: IngestConfig = IngestConfig(),  # noqa: B008
    index: IndexConfig = IndexConfig(),  # noqa: B008
    shares: bool = True,
) -> Manifest:
    """Commit and publish, while the caller holds the lock and has settled what was ``before``.

    ``rows`` gives batches of documents and of their chunks, once for each table, and is told whether chunks
    have token vectors. ``counts`` says how many there are where there is more than one pair.
    """
    pinned = None if before is None else before.lance_versions
    tables = LanceTables.open_or_create(layout, fields, vector_dim, added=added, versions=pinned)
    tables.compact()
    has_tokens = tables.has(TOKEN_FIELDS)
    readers = [
        pa.RecordBatchReader.from_batches(tables.schemas[name], map(itemgetter(side), rows(has_tokens)))
        for side, name in enumerate((DOCUMENTS, CHUNKS))
    ]
    if counts is None:
        ((documents, chunks),) = rows(has_tokens)
        counts = documents.num_rows, chunks.num_rows
    versions = tables.commit(
        deleted_ids=deleted,
        find_documents=None if before is None else partial(find_served, layout, before),
        documents=readers[0],
        chunks=readers[1],
        expected_documents=counts[0],
        expected_chunks=counts[1],
    )
    if has_tokens:
        layout.pending_folder.mkdir(exist_ok=True)
        codebook.save(layout.pending_folder)
        side_files = {**side_files, LATE_NAME: layout.pending_folder / LATE_NAME}
    facts = GenerationFacts(
        run_id=run_id,
        side_files=side_files,
        fingerprints={"encoder": encoder, "context": "c" * 64, "clusters": "k" * 64},
        settings=settings.to_dict(),
        context_documents=4,
        context_cluster_sizes=(1, 1),
        documents_at_context=2,
        encode_tokens_per_second=1.0,
    )
    return publish_generation(layout, tables, versions, facts, index, shares=shares)


def delete(layout: CollectionLayout, doc_ids: Sequence[str]) -> None:
    """Delete documents as a user does."""
    delete_documents(layout, doc_ids)


def document_ids(count: int, prefix: str = "d") -> list[str]:
    """Return ids of different lengths, so that documents have one, two or three chunks."""
    return [f"{prefix}{'x' * (i % 4)}{i}" for i in range(count)]


def publish_change(layout: CollectionLayout, prefix: str) -> Manifest:
    """Add ten documents and replace ``d0``: the same change however often it is repeated."""
    changed = [*document_ids(10, prefix), "d0"]
    return publish_documents(layout, changed, replaced=changed, version=1)


def served(layout: CollectionLayout) -> list[str]:
    """Return the sorted ids of the served generation."""
    return sorted(open_generation(layout).doc_ids.to_pylist())


def served_ids(layout: CollectionLayout) -> list[str]:
    """Return the ids of the served generation, none where nothing is served yet."""
    try:
        return open_generation(layout).doc_ids.to_pylist()
    except (CollectionNotFoundError, IntegrityError):
        return []
