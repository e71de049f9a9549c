"""The work of a run that is not published yet, kept so that a killed run goes on where it stopped.

``pending/PENDING.json`` holds the key of the work: every setting that shapes an encoded shard, and the
generation it builds on. Another key means the leftovers fit no longer, and they are dropped before anything
is read from them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as arrow_compute

from jobs.compatibility import SPEED_ONLY
from pipeline import durable
from pipeline.config import IngestConfig
from pipeline.corpus.ledger import Ledger
from pipeline.encode.shards import EncodedTable, finished_shards, read_document_hashes, read_encoded
from pipeline.index.layout import CollectionLayout
from pipeline.manifest import fingerprint

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers


def work_key(config: IngestConfig, schema_fingerprint: str, base_generation: int | None) -> str:
    """Name the work that ``config`` asks for; equal keys mean that encoded shards can be taken over."""
    settings = config.to_dict()
    encoder = {name: value for name, value in settings["encoder"].items() if name not in SPEED_ONLY}
    return fingerprint(
        encoder=encoder,
        cluster=settings["cluster"],
        context=settings["context"],
        schema=schema_fingerprint,
        base=base_generation,
    )


@contextmanager
def open_ledger(layout: CollectionLayout, key: str) -> Generator[Ledger]:
    """Keep what earlier runs left for ``key``, else start empty; yield a ledger of the documents kept."""
    if _read_key(layout) != key:
        discard(layout)
        with durable.storage_errors(f"preparing {layout.pending_folder.name}/ of collection {layout.name!r}"):
            layout.encoded_folder.mkdir(parents=True)
            durable.write_json(layout.pending_path, {"key": key})
    with Ledger(layout.ledger_path) as ledger:
        for number in finished_shards(layout.encoded_folder):
            hashes = read_document_hashes(layout.encoded_folder, number)
            ledger.load_encoded(
                number, hashes.column("doc_id").to_pylist(), hashes.column("content_sha256").to_pylist()
            )
        yield ledger


def discard(layout: CollectionLayout) -> None:
    """Remove everything; called when it is published, or fits no longer."""
    # The key goes first: a folder without it is never believed, however far the removal got.
    layout.pending_path.unlink(missing_ok=True)
    shutil.rmtree(layout.pending_folder, ignore_errors=True)


class EncodedShards:
    """Everything in ``pending/encoded`` that this run commits.

    Its own shards, and of earlier runs' what is still the source's content.
    """

    def __init__(self, layout: CollectionLayout, ledger: Ledger, first_own_shard: int) -> None:
        self._folder = layout.encoded_folder
        earlier = [number for number in finished_shards(self._folder) if number < first_own_shard]
        self._stale = {number: _stale_ids(self._folder, number, ledger) for number in earlier}

    def count(self) -> tuple[int, int]:
        """Return the number of documents and chunks to commit."""
        documents = chunks = 0
        for batch in read_encoded(self._folder, "documents", stale=self._stale):
            documents += batch.num_rows
            chunks += pc.sum(batch.column("num_chunks")).as_py() or 0
        return documents, chunks

    def stream(self, table: EncodedTable, schema: pa.Schema) -> pa.RecordBatchReader:
        """Stream one table's rows, both tables in the same document order."""
        batches = read_encoded(self._folder, table, stale=self._stale)
        return pa.RecordBatchReader.from_batches(schema, (batch.cast(schema) for batch in batches))


def _stale_ids(folder: Path, number: int, ledger: Ledger) -> frozenset[str]:
    current = set(chain.from_iterable(ledger.current_in_shard(number)))
    return frozenset(read_document_hashes(folder, number).column("doc_id").to_pylist()) - current


def _read_key(layout: CollectionLayout) -> str | None:
    try:
        content: Any = json.loads(layout.pending_path.read_bytes())
    except (OSError, ValueError):
        return None
    return content.get("key") if isinstance(content, dict) else None
