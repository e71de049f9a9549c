"""The writers of a server's collections: opened by the first write, fed with what is published, and stopped.

At its start a server opens those whose logs hold writes that a killed one has acknowledged. Called by
``write_routes``; what a writer does is :mod:`cairn.pipeline.line.live`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import pyarrow as pa
import pyarrow.compute as arrow_compute
from cairn.pipeline.client.errors import FieldProblem
from cairn.pipeline.errors import (
    CairnError,
    CollectionBusyError,
    DocumentsRefusedError,
    StorageError,
)
from cairn.pipeline.index.aliases import other_names_of
from cairn.pipeline.index.layout import CollectionLayout, list_states
from cairn.pipeline.index.maintenance import drop_collection
from cairn.pipeline.line.live import REST_SHARE, LiveWriter
from cairn.pipeline.line.waiting_writes import KEPT_KEYS
from cairn.pipeline.search.contents import ids_of_matches, read_row
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.serve.collections import Collections, ServedCollection
from cairn.pipeline.serve.problems import Kind, ProblemError, search_problem
from cairn.pipeline.serve.schemas import MAX_TOLD
from cairn.pipeline.serve.settings import ServeSettings
from cairn.pipeline.types import RESERVED_COLUMNS

if TYPE_CHECKING:
    from cairn.pipeline.model.engine.backbone import Backbone

log = logging.getLogger(__name__)
pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers

TAKE_UP_SECONDS: Final = 60.0
STOP_SECONDS: Final = 8.0
DROP_SHARE: Final = 0.6
"""Of a request's time, what the removal of a collection waits for a batch that is being encoded."""
REPLAY_SECONDS: Final = 30.0
"""While another server has a log: it may be the one before, which stops."""
REPLAY_PAUSE_SECONDS: Final = 1.0
ACCEPTING_THREADS: Final = 4
LONGEST_REST_SECONDS: Final = 0.1
"""While searches wait, from a write that was accepted to the next; ``live`` has that of publications."""

_Result = TypeVar("_Result")
_REFUSED: Final = "the server cannot write this collection now; its log says more"


class ServedDocuments:
    """What is published of a collection, for its writer.

    Where ``searcher`` is None, ``find`` looks again at each call: a write may wait while the first documents
    are published.
    """

    def __init__(self, searcher: Searcher | None, find: Callable[[], Searcher | None] = lambda: None) -> None:
        self._known, self._find = searcher, find

    @property
    def _searcher(self) -> Searcher | None:
        if self._known is None:
            self._known = self._find()
        return self._known

    def _reading(self, read: Callable[..., Any], *args: Any) -> Any:
        """Return what is read of the generation that answers, None before there is one."""
        return None if self._searcher is None else self._searcher.reading(read, *args)

    def read(self, doc_id: str) -> pa.Table | None:
        """See :class:`cairn.pipeline.line.written_rows.Stored`."""
        return self._reading(read_row, doc_id)

    def present(self, doc_ids: Sequence[str]) -> set[str]:
        """See :class:`cairn.pipeline.line.written_rows.Stored`."""
        if self._searcher is None or not doc_ids:
            return set()
        position_of = self._searcher.generation.position_of
        return {doc_id for doc_id in doc_ids if position_of(doc_id) is not None}

    def fields(self) -> Sequence[pa.Field[Any]]:
        """See :class:`cairn.pipeline.line.written_rows.Stored`."""
        schema = () if self._searcher is None else self._searcher.generation.document_schema
        return [field.remove_metadata() for field in schema if field.name not in RESERVED_COLUMNS]

    def matching(self, filters: Mapping[str, Any]) -> list[str]:
        """See :class:`cairn.pipeline.line.written_rows.Stored`."""
        return self._reading(ids_of_matches, filters) or []


class Writers:
    """The writers of a server's collections; used from one event loop.

    ``is_busy`` tells whether searches wait.
    """

    def __init__(
        self, settings: ServeSettings, collections: Collections, is_busy: Callable[[], bool]
    ) -> None:
        self._settings, self._collections, self._is_busy = settings, collections, is_busy
        self._pool = ThreadPoolExecutor(ACCEPTING_THREADS, thread_name_prefix="cairn-accept")
        self._opening = WeakValueDictionary[str, asyncio.Lock]()
        self._turns = WeakKeyDictionary[LiveWriter, asyncio.Lock]()
        self._writers: dict[str, LiveWriter] = {}
        self._starting: asyncio.Task[None] | None = None
        self._removed: OrderedDict[str, str] = OrderedDict()

    def start(self) -> None:
        """Publish in the background what killed servers have acknowledged."""
        self._loop = asyncio.get_running_loop()
        self._starting = asyncio.create_task(self._replay_all())

    async def _replay_all(self) -> None:
        names = await asyncio.to_thread(list_states, self._settings.root)
        await asyncio.gather(*(self._replay(name) for name in names if self._collections.serves(name)))

    async def _replay(self, name: str) -> None:
        until = time.monotonic() + REPLAY_SECONDS
        while True:
            try:
                if self._layout(name).writes_path.exists():  # else the other server has removed it
                    await self.of(name)
            except Exception as error:  # noqa: BLE001 - other collections are replayed
                if isinstance(error, CollectionBusyError) and time.monotonic() < until:
                    await asyncio.sleep(REPLAY_PAUSE_SECONDS)
                    continue
                log.error("writes.not_replayed collection=%s sentence=%s", name, error)  # noqa: TRY400
            return

    async def run(self, call: Callable[[], _Result]) -> _Result:
        """Await a blocking call; errors become problems."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, call)
        except CairnError as error:
            raise write_problem(error) from None

    async def accept(self, writer: LiveWriter, call: Callable[[], _Result]) -> _Result:
        """Await the acceptance of a write, one of a collection at a time, in the order in which they came.

        While searches wait, the next one is put off for longer than it took: 16 that write beside 16 that
        search would take half of what the interpreter can do.
        """
        turn = self._turns.setdefault(writer, asyncio.Lock())
        await turn.acquire()
        started = time.monotonic()
        try:
            return await self.run(call)
        finally:
            seconds = REST_SHARE * (time.monotonic() - started) if self._is_busy() else 0.0
            asyncio.get_running_loop().call_later(min(seconds, LONGEST_REST_SECONDS), turn.release)

    async def of(self, name: str, *, makes: bool = False) -> LiveWriter:
        """Return the writer of a collection, opened if need be; ``makes``: of one that is to be made, too."""
        writer = self._writers.get(name)
        if writer is not None and writer.is_open:
            return writer
        async with self._opens(name):
            writer = self._writers.get(name)
            if writer is None or not writer.is_open:
                if not makes and not self._layout(name).is_begun():
                    raise Kind.UNKNOWN_COLLECTION()  # it was removed meanwhile, and would come back empty
                if not await self._stop(name, 0):
                    raise Kind.COLLECTION_BUSY("a part of a write is being finished; try again")
                open_it = partial(
                    LiveWriter,
                    self._layout(name),
                    backbone=partial(self._backbone, name),
                    take_up=partial(self._take_up, name),
                    is_busy=self._is_busy,
                    allowed_sources=self._settings.allowed_sources,
                )
                self._writers[name] = await asyncio.get_running_loop().run_in_executor(self._pool, open_it)
            return self._writers[name]

    async def opened(self, name: str, *, makes: bool = False) -> LiveWriter:
        """Return what :meth:`of` returns; errors become problems."""
        try:
            return await self.of(name, makes=makes)
        except CairnError as error:
            raise write_problem(error) from None

    def _opens(self, name: str) -> asyncio.Lock:
        """Return what is held while the writer of a collection is opened or stopped, and known as long."""
        return self._opening.setdefault(name, asyncio.Lock())

    async def drop(self, layout: CollectionLayout) -> None:
        """Remove a collection; what it writes is given up, and where that takes long, nothing is removed.

        Nor is one that another name answers from; which one is for the log alone.
        """
        if others := await self.run(lambda: other_names_of(layout.root, layout.name)):
            log.warning("writes.not_removed collection=%s answers_for=%s", layout.name, ",".join(others))
            raise Kind.COLLECTION_SWITCHED(
                "another name answers from it; let that one answer from its own first"
            )
        async with self._opens(layout.name):
            writer = self._writers.get(layout.name)
            if not await self._stop(layout.name, 0, DROP_SHARE * self._settings.deadline_seconds):
                raise Kind.COLLECTION_BUSY("a part of a write is being finished; delete it again")
            await self.run(lambda: drop_collection(layout))
            self._collections.let_go(layout.name)
            if writer is not None:
                writer.fail_waiting("the collection must stay until a write is published, and was removed")

    def note_removed(self, name: str, key: str | None) -> None:
        """Keep the key of a request that has removed a collection, and so its log."""
        if key is not None:
            self._removed[key] = name
        while len(self._removed) > KEPT_KEYS:
            self._removed.popitem(last=False)

    def was_removed_by(self, name: str, key: str | None) -> bool:
        """Tell whether a request with this key has removed the collection, since the server started."""
        if key is None or key not in self._removed:
            return False
        if self._removed[key] != name:
            raise Kind.KEY_REUSED("an idempotency key must come with one request; choose a new key")
        return True

    def troubles(self) -> list[str]:
        """Say of which collections nothing is published just now; why is for the log: anyone may ask this."""
        return [
            f"writes to collection {name!r} wait; the server's log says why"
            for name, writer in sorted(self._writers.items())
            if writer.trouble is not None
        ]

    async def _stop(self, name: str, seconds: float, patience: float = 1.0) -> bool:
        writer = self._writers.get(name)
        if writer is None or not await asyncio.to_thread(writer.stop, seconds, patience):
            return writer is None
        del self._writers[name]
        return True

    async def close(self) -> None:
        """Publish what waits within some seconds, and stop."""
        if self._starting is not None:
            self._starting.cancel()

        async def stop(name: str) -> None:
            async with self._opens(name):
                await self._stop(name, STOP_SECONDS)

        await asyncio.gather(*map(stop, [*{*self._writers, *self._opening}]))
        self._pool.shutdown(wait=False, cancel_futures=True)

    def stored(self, name: str, searcher: Searcher | None) -> ServedDocuments:
        """Return what is published of a collection, of which ``searcher`` answers if there is one yet."""
        return ServedDocuments(searcher, partial(self._find, name))

    def _find(self, name: str) -> Searcher | None:
        return self._served(name).searcher if self._layout(name).exists() else None

    def _layout(self, name: str) -> CollectionLayout:
        return CollectionLayout.at(self._settings.root, name)

    def _backbone(self, name: str) -> Backbone | None:
        """Return the model that searches of a collection have in memory; called on a writer's thread."""
        from cairn.pipeline.encode.text_encoder import TextEncoder

        if not self._layout(name).exists():
            return None
        try:
            encoder = self._served(name).encoder.encoder
        except ProblemError:
            return None
        return encoder.backbone if isinstance(encoder, TextEncoder) else None

    def _take_up(self, name: str, generation: int) -> None:
        """Let searches answer from a generation; called on a writer's thread, which pays for opening it."""
        until = time.monotonic() + TAKE_UP_SECONDS
        try:
            searcher = self._served(name).searcher
            while searcher.take().generation.number < generation and time.monotonic() < until:
                time.sleep(0.005)  # a search is opening it
        except Exception as error:  # noqa: BLE001 - it is published: the next search takes it up
            log.warning("writes.not_taken_up collection=%s error=%s", name, error)

    def _served(self, name: str) -> ServedCollection:
        found = self._collections.own(name)
        try:
            answer = asyncio.run_coroutine_threadsafe(found, self._loop)
        except RuntimeError:  # the server has stopped, and did not wait for this thread any longer
            found.close()
            raise
        return answer.result(TAKE_UP_SECONDS)


def write_problem(error: CairnError) -> ProblemError:
    """Return the problem of an error that a write raised."""
    if isinstance(error, DocumentsRefusedError):
        told = [
            FieldProblem(pointer=f"#/documents/{place}", detail=detail)
            for place, detail in error.faults[:MAX_TOLD]
        ]
        return Kind.INVALID_REQUEST(
            f"{len(error.faults)} document(s) cannot be stored; none was", errors=told
        )
    if isinstance(error, StorageError):
        log.error("writes.refused sentence=%s", error)
        return Kind.WRITES_REFUSED(_REFUSED)
    return search_problem(error)
