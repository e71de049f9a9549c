"""Another number of partitions for a collection, beside the searches of it: rows are copied, none encoded.

    rows of the served generation ─▶ new folders, one a partition ─▶ one manifest that names them

A document's partition is its id's hash modulo their number, so a new partition takes its rows from a few old
ones. Killed before the manifest moves, it leaves folders that the next publication removes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
from cairn.pipeline.config import MAX_PARTITIONS, IndexConfig
from cairn.pipeline.corpus.source_record import carry_over
from cairn.pipeline.errors import CairnError, ConfigError, UsageError
from cairn.pipeline.index.layout import CollectionLayout, wholes
from cairn.pipeline.index.maintenance import require_whole_rows
from cairn.pipeline.index.names import CHUNKS, DOCUMENTS, partition_of
from cairn.pipeline.index.partitions import change_collection, new_records
from cairn.pipeline.index.publish import (
    GenerationFacts,
    next_generation_number,
    publish_generation,
    remove_generations,
    remove_strays,
)
from cairn.pipeline.index.recovery import writing
from cairn.pipeline.index.rows import LanceTables, StoredRows
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Int64


def repartition(
    layout: CollectionLayout, num_partitions: int, progress: ProgressListener = silent_progress
) -> Manifest:
    """Cut a collection into so many partitions and publish that; one that has as many is left as it is."""
    if not 1 <= num_partitions <= MAX_PARTITIONS:
        raise ConfigError(f"there must be 1 to {MAX_PARTITIONS:,} partitions, got {num_partitions:,}")
    with writing(layout) as base:
        if num_partitions == (len(base.partitions) or 1):
            return base
        facts = GenerationFacts.of(layout, base, "repartition")
        index = {**base.settings["index"], "partitions": num_partitions}
        facts = replace(facts, settings={**base.settings, "index": index})
        sources = _sources(layout, base)
        before_sha256 = layout.hash_of_manifest(base.generation)
        step = math.gcd(len(sources), num_partitions)
        documents_P, chunks_P = (_count(sources, table, num_partitions) for table in (DOCUMENTS, CHUNKS))
        if not documents_P.any():
            raise UsageError(
                f"collection {layout.name!r} must hold documents to be cut into other partitions, got none; "
                f"drop it, and ingest with `--partitions {num_partitions}`"
            )
        copies = {
            number: partial(
                _copy,
                sources=sources[number % step :: step],
                number=number,
                num_documents=int(documents_P[number]),
                num_chunks=int(chunks_P[number]),
                facts=facts,
            )
            for number in range(num_partitions)
        }
        try:
            if num_partitions == 1:
                # The new table takes the place of one that only generations before this one read.
                older = [number for number in layout.kept_generations() if number != base.generation]
                remove_generations(layout, older)
                manifest = copies[0](layout, None, progress)
            else:
                records = new_records(num_partitions, next_generation_number(layout))
                filled = {number: copy for number, copy in copies.items() if documents_P[number]}
                manifest = change_collection(layout, records, filled, facts, progress)
        except BaseException:
            # A full disk must not stay full of copies that no one will read.
            with suppress(OSError, CairnError):
                remove_strays(layout, layout.generation_numbers())
            raise
        carry_over(layout.sources_path, before_sha256, layout.hash_of_manifest(manifest.generation))
        return manifest


def _sources(layout: CollectionLayout, base: Manifest) -> list[StoredRows | None]:
    """Return the rows of each partition, None of one that has none."""
    rows = {}
    for own, each in wholes(layout, base):
        require_whole_rows(own, each)  # copies would hide what is damaged
        tables = LanceTables.open(own, each.lance_versions)
        rows[own.name] = StoredRows(tables=tables, versions=each.lance_versions)
    names = [record.name for record in base.partitions] or [layout.name]
    return [rows.get(name) for name in names]


def _count(sources: Sequence[StoredRows | None], table: str, num_partitions: int) -> Int64[np.ndarray, " P"]:
    """Count the rows that each new partition is to have."""
    counts_P = np.zeros(num_partitions, np.int64)
    for rows in sources:
        for batch in () if rows is None else rows.scan(table, ["doc_id"]):
            counts_P += np.bincount(_partitions(batch, num_partitions), minlength=num_partitions)
    return counts_P


def _partitions(batch: pa.RecordBatch, num_partitions: int) -> Int64[np.ndarray, " N"]:
    """Return the partition of each row's document."""
    doc_ids: list[str] = batch.column("doc_id").to_pylist()
    return np.array([partition_of(doc_id, num_partitions) for doc_id in doc_ids], np.int64)


def _copy(
    layout: CollectionLayout,
    _base: Manifest | None,
    progress: ProgressListener,
    *,
    sources: Sequence[StoredRows | None],
    number: int,
    num_documents: int,
    num_chunks: int,
    facts: GenerationFacts,
) -> Manifest:
    """Copy the rows of a new partition and publish them."""
    config = IndexConfig(**facts.settings["index"])
    stored = next(rows.tables for rows in sources if rows is not None)
    tables = LanceTables.open_or_create(layout, stored.metadata_fields, stored.vector_dim, added=stored.added)

    def reader(table: str) -> pa.RecordBatchReader:
        schema = tables.schemas[table]
        rows = (
            batch.filter(pa.array(_partitions(batch, config.partitions) == number)).cast(schema)
            for source in sources
            if source is not None
            for batch in source.scan(table, schema.names)
        )
        return pa.RecordBatchReader.from_batches(schema, rows)

    versions = tables.commit(
        documents=reader(DOCUMENTS),
        chunks=reader(CHUNKS),
        expected_documents=num_documents,
        expected_chunks=num_chunks,
    )
    return publish_generation(layout, tables, versions, facts, config, progress)
