"""The work of a run that is not published yet, kept so that a killed run goes on where it stopped.

``pending/PENDING.json`` holds the key of the work: every setting that shapes an encoded shard, its format,
and the generation it builds on, which stands beside the key, too; where the work draws a context, also what
its sparse encoder is. Leftovers with another key are dropped before anything is read from them; what servers
were paid for stays until a publication, since its own keys say what was asked.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from cairn.pipeline import durable
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.corpus.ledger import Ledger
from cairn.pipeline.encode.paid import PAID_NAME
from cairn.pipeline.encode.shards import (
    ENCODED_FILES,
    SHARD_FORMAT,
    EncodedTable,
    count_rows,
    finished_shards,
    read_chunk_counts,
    read_cluster_ids,
    read_document_hashes,
    read_encoded,
    shard_path,
)
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.ingest_settings import SPEED_ONLY
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.types import TOKEN_FIELDS
from jaxtyping import Int64

log = logging.getLogger(__name__)


def work_key(config: IngestConfig, schema_fingerprint: str, base_generation: int | None) -> str:
    """Name the work that ``config`` asks for; equal keys mean that encoded shards can be taken over."""
    settings = config.to_dict()
    encoder = {name: value for name, value in settings["encoder"].items() if name not in SPEED_ONLY}
    encoder["describe"] = bool(encoder["describe"])  # wherever its model runs
    return fingerprint(
        format=SHARD_FORMAT,
        encoder=encoder,
        cluster=settings["cluster"],
        context=settings["context"],
        partitions=config.index.partitions,
        schema=schema_fingerprint,
        base=base_generation,
    )


@contextmanager
def open_ledger(
    layout: CollectionLayout, key: str | None, record: Path | None = None, *, base: int | None
) -> Generator[Ledger]:
    """Keep what earlier runs left for ``key``, else start empty; yield a ledger of the documents kept.

    ``key`` = None keeps nothing, nor leaves what a later run could keep. ``record`` says what is published;
    without one nothing is.
    """
    found = _read(layout).get("key")
    if key is None or found != key:
        if key is not None and found is not None:
            log.warning(
                "the unfinished run of collection %r had other settings, such as another model: it is begun "
                "again with these; what servers answered is kept until it is published",
                layout.name,
            )
        discard(layout, keep_paid=True)
        with durable.storage_errors(f"preparing {layout.pending_folder.name}/ of collection {layout.name!r}"):
            layout.encoded_folder.mkdir(parents=True)
            if key is not None:
                durable.write_json(layout.pending_path, {"key": key, "base": base})
    with Ledger(layout.ledger_path, record) as ledger:
        for number in finished_shards(layout.encoded_folder):
            hashes = read_document_hashes(layout.encoded_folder, number)
            ledger.load_encoded(
                number, hashes.column("doc_id").to_pylist(), hashes.column("content_sha256").to_pylist()
            )
        yield ledger


def note_sparse(layout: CollectionLayout, sparse_fingerprint: str | None) -> None:
    """Remember the sparse encoder that the work began with."""
    durable.write_json(layout.pending_path, {**_read(layout), "sparse": sparse_fingerprint})


def noted_sparse(layout: CollectionLayout) -> str | None:
    """Return the fingerprint of the sparse encoder that the work began with, None for no such encoder."""
    return _read(layout).get("sparse")


def discard(layout: CollectionLayout, *, keep_paid: bool = False) -> None:
    """Remove everything, or all but what servers were paid for: it is published, or fits no longer."""
    # The key goes first: a folder without it is never believed, however far the removal got.
    with durable.storage_errors(f"removing {layout.pending_folder.name}/ of collection {layout.name!r}"):
        if layout.pending_folder.is_dir():
            durable.remove_entry(layout.pending_path)
        if keep_paid and layout.pending_folder.is_dir():
            for entry in layout.pending_folder.iterdir():
                if not entry.name.startswith(PAID_NAME):  # beside it lie what SQLite calls -wal and -shm
                    durable.remove_entry(entry)
            return
        durable.remove_entry(layout.pending_folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedShards:
    """Encoded shards that a run commits: its own, and of earlier runs' what is still the source's content.

    ``counts`` has the documents and chunks to commit of each shard; ``stale`` the documents of a shard that
    are not, with their chunks.
    """

    folder: Path
    counts: Mapping[int, tuple[int, int]]
    stale: Mapping[int, Mapping[str, int]]

    @classmethod
    def of(cls, layout: CollectionLayout, ledger: Ledger, first_own_shard: int) -> EncodedShards:
        """Find everything in ``pending/encoded`` that this run commits."""
        folder, numbers = layout.encoded_folder, finished_shards(layout.encoded_folder)
        earlier = (number for number in numbers if number < first_own_shard)
        stale = {number: _stale_chunks(folder, number, ledger) for number in earlier}
        counts: dict[int, tuple[int, int]] = {}
        for number in numbers:
            documents, chunks = (count_rows(folder, table, number) for table in ("documents", "chunks"))
            gone = stale.get(number, {})
            counts[number] = documents - len(gone), chunks - sum(gone.values())
        return cls(folder=folder, counts=counts, stale=stale)

    def files(self) -> list[Path]:
        """Return the files of all shards."""
        return [shard_path(self.folder, file, number) for number in self.counts for file in ENCODED_FILES]

    def count(self) -> tuple[int, int]:
        """Return the number of documents and chunks to commit, by the footers of their files."""
        counts = self.counts.values()
        return sum(documents for documents, _ in counts), sum(chunks for _, chunks in counts)

    def of_partition(self, number: int, num_partitions: int) -> EncodedShards:
        """Return the shards of one partition."""
        own = {each: counts for each, counts in self.counts.items() if each % num_partitions == number}
        return replace(self, counts=own)

    def cluster_sizes(self, num_clusters: int) -> Int64[np.ndarray, " K"]:
        """Count the documents to commit of each cluster."""
        sizes_K = np.zeros(num_clusters, np.int64)
        for number in self.counts:
            clusters = read_cluster_ids(self.folder, number, self.stale.get(number, ()))
            sizes_K += np.bincount(clusters, minlength=num_clusters)
        return sizes_K

    def stream(self, table: EncodedTable, schema: pa.Schema) -> pa.RecordBatchReader:
        """Stream one table's rows, both tables in the same document order."""
        batches = read_encoded(self.folder, table, list(self.counts), stale=self.stale)
        return pa.RecordBatchReader.from_batches(
            schema, (_with_columns(batch, schema).cast(schema) for batch in batches)
        )


def _with_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Select a table's columns; token codes that were not made are null."""
    absent = set(schema.names) - set(batch.schema.names)
    for field in (field for field in TOKEN_FIELDS if field.name in absent):
        batch = batch.append_column(field, pa.nulls(batch.num_rows, field.type))
    return batch.select(schema.names)


def _stale_chunks(folder: Path, number: int, ledger: Ledger) -> dict[str, int]:
    """Return the documents of a shard that are not the source's content now, with their chunks."""
    current = set(chain.from_iterable(ledger.current_in_shard(number)))
    if len(current) == count_rows(folder, "documents", number):
        return {}
    counts = read_chunk_counts(folder, number)
    return {doc_id: chunks for doc_id, chunks in counts.items() if doc_id not in current}


def _read(layout: CollectionLayout) -> dict[str, Any]:
    try:
        content: Any = json.loads(durable.read_bytes(layout.pending_path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
