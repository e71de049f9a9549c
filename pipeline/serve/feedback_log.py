"""What was asked and what was clicked, as Parquet in a folder: nothing is written unless a folder is named.

    queries-20261123T231500.000000Z-4f1c.parquet     one file a server and span of time, in order of time

Requests append to memory and never wait for the disk. A thread writes what has come every few seconds: the
server's newest file is written again with the new rows in it, whole or not at all, until it is large; then
another one begins. The oldest files go where all together grow beyond their bound. The files hold queries and
ids of documents, and nothing that says who asked; only their owner may read them. A kill loses the last
seconds.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.errors import CairnError
from cairn.pipeline.types import SearchResult

log = logging.getLogger(__name__)

FEEDBACK_SCHEMA: Final = pa.schema(
    [
        pa.field("at", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("collection", pa.string(), nullable=False),
        pa.field("generation", pa.int64()),
        pa.field("query", pa.string(), nullable=False),
        pa.field("doc_ids", pa.list_(pa.string()), nullable=False),
        pa.field("rank", pa.int32()),
    ]
)
"""``kind`` is ``search``, with the ids of its hits, or ``click``, with the one that was opened."""

WRITE_SECONDS: Final = 10.0
FILE_BYTES: Final = 4 << 20
"""A larger file is not written again."""
MAX_WAITING_ROWS: Final = 20_000
"""Rows in memory while the disk takes none; later ones are lost, and counted in the server's log."""
_NAME: Final = "queries-*.parquet"


class FeedbackLog:
    """Writes searches and clicks; safe to use from several threads. ``max_bytes`` bounds all files."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._rows: list[dict[str, Any]] = []
        self._num_lost = 0
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._file: Path | None = None
        self._thread = threading.Thread(target=self._run, name="cairn-feedback", daemon=True)

    def start(self) -> None:
        """Make the folder, and begin to write; raises :class:`StorageError` where it cannot be made."""
        with durable.storage_errors("making the folder of the feedback log"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._thread.start()

    def stop(self) -> None:
        """Write what is left."""
        self._ended.set()
        self._thread.join()

    def searched(self, collection: str, results: Sequence[SearchResult]) -> None:
        """Note queries with the documents that answered them, best first."""
        at = dt.datetime.now(dt.UTC)
        self._append(
            {
                "at": at,
                "kind": "search",
                "collection": collection,
                "generation": result.generation,
                "query": result.query,
                "doc_ids": [hit.doc_id for hit in result.hits],
                "rank": None,
            }
            for result in results
        )

    def clicked(self, collection: str, query: str, doc_id: str, rank: int | None) -> None:
        """Note that a document was opened from the answer to a query; ``rank`` counts from 1."""
        click = {"at": dt.datetime.now(dt.UTC), "kind": "click", "collection": collection}
        self._append([{**click, "generation": None, "query": query, "doc_ids": [doc_id], "rank": rank}])

    def _append(self, rows: Any) -> None:
        with self._lock:
            self._rows.extend(rows)
            self._num_lost += max(0, len(self._rows) - MAX_WAITING_ROWS)
            del self._rows[MAX_WAITING_ROWS:]

    def _run(self) -> None:
        is_ended = False
        while not is_ended:
            is_ended = self._ended.wait(WRITE_SECONDS)
            with self._lock:
                rows, num_lost = list(self._rows), self._num_lost
                self._num_lost = 0
            if num_lost:
                log.warning("serve.feedback_lost rows=%d", num_lost)
            if not rows:
                continue
            try:
                self._write(rows)
            except (CairnError, OSError, pa.ArrowException) as error:
                log.warning("serve.feedback_not_written error=%s", type(error).__name__)
                continue
            with self._lock:
                del self._rows[: len(rows)]

    def _write(self, rows: list[dict[str, Any]]) -> None:
        table = pa.Table.from_pylist(rows, FEEDBACK_SCHEMA)
        path = self._file
        if path is not None and path.is_file() and path.stat().st_size < FILE_BYTES:
            table = pa.concat_tables([pq.read_table(path, schema=FEEDBACK_SCHEMA), table])
        else:
            began = rows[0]["at"].strftime("%Y%m%dT%H%M%S.%fZ")
            path = self._folder / f"queries-{began}-{secrets.token_hex(2)}.parquet"
        with durable.storage_errors("writing the feedback log"), durable.replacing(path) as temporary:
            temporary.touch(mode=0o600)
            pq.write_table(table, temporary, compression="zstd")
        self._file = path
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        files = sorted(self._folder.glob(_NAME))  # names sort by time
        sizes = [path.stat().st_size for path in files]
        for path, size in zip(files[:-1], sizes, strict=False):
            if sum(sizes) <= self._max_bytes:
                return
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            sizes.remove(size)
