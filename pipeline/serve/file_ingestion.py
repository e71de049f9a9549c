"""Read the files that are attached to collections, and write their documents: in the background, in turn.

    in_progress ─▶ read ─▶ written, as by POST …/documents ─▶ published ─▶ completed
                    └─ nothing of it can be stored ─────────────────────▶ failed, with the reason

A file is read outside of its collection's writer, so that a slow one holds up no writes. Files that were
attached together are written together, and published by one generation where they are small: the first ones
of a collection draw its context. What a killed server had not finished is read again when it starts: to write
a document twice changes nothing. So is one that met trouble which may pass, for some minutes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as arrow_compute
from cairn.pipeline.corpus.columns import pieces
from cairn.pipeline.errors import (
    CairnError,
    DocumentsRefusedError,
    SchemaError,
    SourceError,
    StorageError,
    TryAgainError,
    WritesWaitingError,
)
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.live import LiveWriter, Receipt
from cairn.pipeline.line.waiting_writes import PUBLICATION_BYTES
from cairn.pipeline.line.written_rows import FileRows, UnreadKindError, with_values
from cairn.pipeline.serve.problems import ProblemError
from cairn.pipeline.serve.uploads import Attachment, ErrorCode, Uploads
from cairn.pipeline.serve.writers import Writers

log = logging.getLogger(__name__)
pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers

READERS: Final = 2
"""Files that are read at a time."""
TOGETHER_FILES: Final = 32
TOGETHER_SECONDS: Final = 5.0
"""For which files that were read wait for others that were attached with them."""
PATIENCE_SECONDS: Final = 1.0
"""Between two tries to write where as many writes wait as are kept."""
TROUBLE_SECONDS: Final = 600.0
"""For which a file is tried again: a full disk, or another server that writes the collection."""
PAUSE_SECONDS: Final = 15.0
CLEAR_SECONDS: Final = 600.0
"""Between two removals of what has expired."""
WRITE_DOCUMENTS: Final = 1_000
WRITE_BYTES: Final = 4 << 20
MAX_TOLD: Final = 5
_MAY_PASS: Final = (TryAgainError, StorageError, ProblemError, TimeoutError)
_LASTING: Final = "the server could not store it for ten minutes; put it into the collection again later"
_FAILED: Final = "the server could not store it; its log says more"

_Result = TypeVar("_Result")


@dataclass(kw_only=True, slots=True)
class _ReadFile:
    """A file that was read: its documents are written by ``calls``, in this order."""

    attachment: Attachment
    writer: LiveWriter
    read: FileRows
    doc_ids: Sequence[str]
    num_bytes: int
    calls: list[Callable[[], Receipt | None]]
    others: Sequence[Attachment] = ()
    """Files that have had some of the documents it leaves, and are read again."""
    receipts: list[Receipt] = field(default_factory=list[Receipt])
    fault: Exception | None = None


class FileIngestion:
    """Brings attached files into their collections; used from one event loop."""

    def __init__(self, root: Path, uploads: Uploads, writers: Writers) -> None:
        self._root, self._uploads, self._writers = root, uploads, writers
        self._waiting: asyncio.Queue[tuple[Sequence[Attachment], float | None]] = asyncio.Queue()
        """Files of one collection to read, and when to give up those that have met trouble."""
        self.order = asyncio.Lock()
        """Held while a part of a file is written, and while it is noted that one is taken out."""
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="cairn-file")
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin, with what a server before has left."""
        self._spawn(self._tend())
        for _ in range(READERS):
            self._spawn(self._work())

    def begin(self, attachments: Sequence[Attachment]) -> None:
        """Let files be read; those of one collection are written together."""
        groups: dict[str, list[Attachment]] = {}
        for each in attachments:
            groups.setdefault(each.collection, []).append(each)
        for group in groups.values():
            self._waiting.put_nowait((group, None))

    async def close(self) -> None:
        """Stop; what is not finished is read when the server is started again."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._uploads.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tend(self) -> None:
        """Go on with what a server before has left, and remove what expires."""
        is_resumed = False
        while True:
            try:
                await asyncio.to_thread(self._uploads.clear)
                if not is_resumed:
                    self.begin(await asyncio.to_thread(self._uploads.unfinished))
                    is_resumed = True
            except CairnError as error:
                log.error("files.not_tended sentence=%s", error)  # noqa: TRY400 - it says it
            await asyncio.sleep(CLEAR_SECONDS)

    async def _work(self) -> None:
        """Read files, and write those that were read in a few seconds together."""
        while True:
            group, until = await self._waiting.get()
            read: list[_ReadFile] = []
            write_at = time.monotonic() + TOGETHER_SECONDS
            for start in range(0, len(group), READERS):
                few = group[start : start + READERS]
                found = await asyncio.gather(*(self._settled(each, until, self._read(each)) for each in few))
                read += [each for each in found if each is not None]
                is_much = (
                    len(read) >= TOGETHER_FILES or sum(each.num_bytes for each in read) > PUBLICATION_BYTES
                )
                if is_much or time.monotonic() > write_at or few[-1] is group[-1]:
                    await self._write(read, until)
                    read, write_at = [], time.monotonic() + TOGETHER_SECONDS

    async def _again(self, attachment: Attachment, until: float) -> None:
        await asyncio.sleep(PAUSE_SECONDS)
        self._waiting.put_nowait(([attachment], until))

    async def _settled(
        self, attachment: Attachment, until: float | None, work: Awaitable[_Result]
    ) -> _Result | None:
        """Await work on a file; try it again later, or note why it failed."""
        fault: tuple[ErrorCode, str]
        try:
            return await work
        except UnreadKindError as error:
            fault = "unsupported_file", str(error)
        except DocumentsRefusedError as error:
            fault = "invalid_file", "; ".join(detail for _, detail in error.faults[:MAX_TOLD]) or str(error)
        except (SourceError, SchemaError) as error:
            fault = "invalid_file", str(error)
        except Exception as error:  # noqa: BLE001 - the other files are read
            may_pass, name = isinstance(error, _MAY_PASS), type(error).__name__
            told = error if isinstance(error, CairnError | ProblemError) else ""
            log.error("files.failed collection=%s error=%s sentence=%s", attachment.collection, name, told)  # noqa: TRY400
            until = until or time.monotonic() + TROUBLE_SECONDS
            if may_pass and time.monotonic() < until:
                self._spawn(self._again(attachment, until))
                return None
            fault = "server_error", _LASTING if may_pass else _FAILED
        try:
            failed = {"status": "failed", "error_code": fault[0], "error_message": fault[1], "warnings": []}
            await asyncio.to_thread(self._uploads.note, attachment, **failed)
        except CairnError as error:
            log.error("files.not_noted sentence=%s", error)  # noqa: TRY400 - it says it
        return None

    async def _read(self, attachment: Attachment) -> _ReadFile | None:
        """Read a file; None where its collection was removed."""
        file = await asyncio.to_thread(lambda: self._uploads.file(attachment.file_id))
        layout = CollectionLayout.at(self._root, attachment.collection)
        if not layout.is_begun():  # removed: a writer would make it again
            await asyncio.to_thread(lambda: self._uploads.forget(attachment.collection))
            return None
        if file is None:
            raise SourceError("the file must stay until it is read, got a removed one; send it again")
        writer = await self._writers.of(attachment.collection)
        stored = self._writers.stored(attachment.collection, None)
        read = await asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: writer.read_file(self._uploads.path(file), stored)
        )
        rows = _own_rows(read, attachment)
        doc_ids = rows["doc_id"].to_pylist()
        num_bytes = int(pc.sum(pc.binary_length(rows["text"])).as_py())
        noted = list(dict.fromkeys([*attachment.doc_ids, *doc_ids]))
        note = partial(self._uploads.note, attachment, doc_ids=noted, num_bytes=num_bytes)
        write = partial(writer.write, stored=stored, source_file=file.filename)
        found = _ReadFile(
            attachment=attachment,
            writer=writer,
            read=read,
            doc_ids=doc_ids,
            num_bytes=num_bytes,
            calls=[note, *(partial(write, part) for part in _batches(rows))],
        )
        if replaced := sorted({*noted}.difference(doc_ids)):  # what it replaces has had them

            def delete_replaced() -> Receipt:
                found.others = self._uploads.read_again(attachment, replaced)
                return writer.delete(replaced, stored)

            found.calls.append(delete_replaced)
        return found

    async def _write(self, files: Sequence[_ReadFile], until: float | None) -> None:
        """Write what was read of files, so that one publication takes it; tasks wait until that is done."""
        calls = deque((file, call) for file in files for call in file.calls)
        while calls:
            async with self.order:
                await asyncio.to_thread(self._write_together, files[0].writer, calls)
            if calls:
                await asyncio.sleep(PATIENCE_SECONDS)
        for file in files:
            self.begin(file.others)
            self._spawn(self._settled(file.attachment, until, self._published(file)))

    def _write_together(
        self, writer: LiveWriter, calls: deque[tuple[_ReadFile, Callable[[], Receipt | None]]]
    ) -> None:
        """Write until no more may wait; nothing of a file that failed, or that is not to be written now."""
        with writer.together():
            while calls:
                file, call = calls[0]
                try:
                    if file.fault is None and self._uploads.is_in_progress(file.attachment):
                        receipt = call()
                        file.receipts += [] if receipt is None else [receipt]
                except WritesWaitingError:
                    return
                except Exception as error:  # noqa: BLE001 - the other files are written
                    file.fault = error
                calls.popleft()

    async def _published(self, file: _ReadFile) -> None:
        if file.fault is not None:
            raise file.fault
        for receipt in file.receipts:
            outcome = await asyncio.wrap_future(receipt.published)
            if outcome.state == "failed":
                raise CairnError(outcome.fault)
        completed = {"status": "completed", "doc_ids": file.doc_ids, "warnings": _warnings(file.read)}
        await asyncio.to_thread(self._uploads.note, file.attachment, **completed)


def _own_rows(read: FileRows, attachment: Attachment) -> pa.Table:
    """Return the documents of a file with what its attachment says of them."""
    own = {"doc_id": attachment.doc_id} if read.is_document else {}
    return with_values(read.rows, {**attachment.attributes, **own}, read.rows.schema)


def _warnings(read: FileRows) -> list[str]:
    more = len(read.refused) - MAX_TOLD
    others = [f"and {more:,} more"] if more > 0 else []
    return [*read.warnings, *read.refused[:MAX_TOLD], *others]


def _batches(rows: pa.Table) -> Iterator[pa.Table]:
    """Cut rows into what one write may hold."""
    sizes = np.asarray(pc.binary_length(rows["text"])).astype(np.int64)
    for start, stop in pieces(sizes, WRITE_BYTES):
        for first in range(start, stop, WRITE_DOCUMENTS):
            yield rows.slice(first, min(WRITE_DOCUMENTS, stop - first))
