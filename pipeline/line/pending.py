"""The work of a run that is not published yet, kept so that a killed run goes on where it stopped.

``pending/PENDING.json`` holds the key of the work: every setting that shapes an encoded shard, its format,
and the generation it builds on. Leftovers with another key are dropped before anything is read from them. It
also names the area of an object store in which workers may leave shards of this work.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from cairn.pipeline import durable
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.corpus.ledger import Ledger
from cairn.pipeline.encode.shards import (
    ENCODED_TABLES,
    SHARD_FORMAT,
    EncodedTable,
    count_rows,
    finished_shards,
    is_stored,
    read_chunk_counts,
    read_cluster_ids,
    read_document_hashes,
    read_encoded,
    stored_files,
    table_paths,
    unfinish_shard,
)
from cairn.pipeline.errors import CairnError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.worker_files import PendingArea, WorkerFiles
from cairn.pipeline.line.compatibility import SPEED_ONLY
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.types import TOKEN_FIELDS
from jaxtyping import Int64


def work_key(config: IngestConfig, schema_fingerprint: str, base_generation: int | None) -> str:
    """Name the work that ``config`` asks for; equal keys mean that encoded shards can be taken over."""
    settings = config.to_dict()
    encoder = {name: value for name, value in settings["encoder"].items() if name not in SPEED_ONLY}
    return fingerprint(
        format=SHARD_FORMAT,
        encoder=encoder,
        cluster=settings["cluster"],
        context=settings["context"],
        schema=schema_fingerprint,
        base=base_generation,
    )


@contextmanager
def open_ledger(layout: CollectionLayout, key: str, record: Path | None = None) -> Generator[Ledger]:
    """Keep what earlier runs left for ``key``, else start empty; yield a ledger of the documents kept.

    ``record`` says what is published; without one nothing is.
    """
    if _read(layout).get("key") != key:
        discard(layout)
        with durable.storage_errors(f"preparing {layout.pending_folder.name}/ of collection {layout.name!r}"):
            layout.encoded_folder.mkdir(parents=True)
            durable.write_json(layout.pending_path, {"key": key, "area": uuid.uuid4().hex})
    _unfinish_lost(layout)
    with Ledger(layout.ledger_path, record) as ledger:
        for number in finished_shards(layout.encoded_folder):
            hashes = read_document_hashes(layout.encoded_folder, number)
            ledger.load_encoded(
                number, hashes.column("doc_id").to_pylist(), hashes.column("content_sha256").to_pylist()
            )
        yield ledger


def discard(layout: CollectionLayout) -> None:
    """Remove everything; called when it is published, or fits no longer."""
    area = pending_area(layout)
    if area is not None:
        with contextlib.suppress(CairnError):  # what stays goes as the files of no generation do
            area.clear()
    # The key goes first: a folder without it is never believed, however far the removal got.
    with durable.storage_errors(f"removing {layout.pending_folder.name}/ of collection {layout.name!r}"):
        if layout.pending_folder.is_dir():
            durable.remove_entry(layout.pending_path)
        durable.remove_entry(layout.pending_folder)


def pending_area(layout: CollectionLayout) -> PendingArea | None:
    """Return where in an object store shards of the pending work may lie, None where there is none."""
    name = _read(layout).get("area")
    if layout.replica is None or name is None:
        return None
    return PendingArea(uri=layout.replica.uri, name=name)


def _note_stored(layout: CollectionLayout, numbers: Iterable[int]) -> None:
    """Tell the collection's replica which files of these shards are in the store."""
    area = pending_area(layout)
    if area is not None and layout.replica is not None:
        layout.replica.worker_files.pending_area = area
        for number in numbers:
            if is_stored(layout.encoded_folder, number):
                files = stored_files(layout.encoded_folder, number)
                layout.replica.worker_files.note({path: area.record(file) for path, file in files.items()})


def _unfinish_lost(layout: CollectionLayout) -> None:
    """Let shards count as not encoded whose files are not in the store; hashes are checked by who reads."""
    folder, area = layout.encoded_folder, pending_area(layout)
    stored = [number for number in finished_shards(folder) if is_stored(folder, number)]
    sizes = area.sizes() if area is not None and stored else {}
    for number in stored:
        records = [area.record(file) for file in stored_files(folder, number).values()] if area else []
        if not records or any(sizes.get(record.key) != record.size_bytes for record in records):
            unfinish_shard(folder, number)


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
        _note_stored(layout, numbers)
        earlier = (number for number in numbers if number < first_own_shard)
        stale = {number: _stale_chunks(folder, number, ledger) for number in earlier}
        counts: dict[int, tuple[int, int]] = {}
        for number in numbers:
            documents, chunks = (count_rows(folder, table, number) for table in ("documents", "chunks"))
            gone = stale.get(number, {})
            counts[number] = documents - len(gone), chunks - sum(gone.values())
        return cls(folder=folder, counts=counts, stale=stale)

    def count(self) -> tuple[int, int]:
        """Return the number of documents and chunks to commit, by the footers of their files."""
        counts = self.counts.values()
        return sum(documents for documents, _ in counts), sum(chunks for _, chunks in counts)

    def cut(self, parts: int) -> list[EncodedShards]:
        """Cut into at most so many runs of shards of about as many chunks each."""
        numbers = list(self.counts)
        ends = np.cumsum([self.counts[number][1] for number in numbers])
        aims = [int(ends[-1]) * part // parts for part in range(1, parts)] if numbers else []
        bounds = np.unique([0, *np.searchsorted(ends, aims, side="left") + 1, len(numbers)]).tolist()
        return [
            replace(self, counts={number: self.counts[number] for number in numbers[begin:end]})
            for begin, end in pairwise(bounds)
        ]

    def files(self, table: EncodedTable) -> Iterator[Path]:
        """Yield the files that a stream of one table reads."""
        for number in self.counts:
            yield from table_paths(self.folder, table, number)

    def fetch(self, files: WorkerFiles) -> None:
        """Bring shards here that are in an object store.

        Raises :class:`LostFilesError` for those that are not there as they were written.
        """
        files.fetch(path for table in ENCODED_TABLES for path in self.files(table) if not path.is_file())

    def unfinish(self, lost: Collection[Path]) -> int:
        """Let those count as not encoded that have one of these files; return how many they are."""
        paths, unfinished = set(lost), 0
        for number in self.counts:
            files = (path for table in ENCODED_TABLES for path in table_paths(self.folder, table, number))
            if not paths.isdisjoint(files):
                unfinish_shard(self.folder, number)
                unfinished += 1
        return unfinished

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
