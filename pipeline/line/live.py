"""Writes to one collection while it is being searched: acknowledged at once, published within a second.

    write, patch, delete ─▶ checked ─▶ log, flushed ─▶ acknowledged
                                        │
                                        ▼   one thread
                              all that waits ─▶ build_index ─▶ a generation ─▶ taken up ─▶ found

Documents are checked when they come, as an ingest checks its rows, so that what was acknowledged can be
published. The thread takes all that waits and publishes it at once; the last write of an id counts. It holds
the collection's lock for one publication at a time and lets go of it in between: an ingest of another process
takes its turn. A killed server replays its log: to publish a write twice changes nothing.

Beside it: ``write_log`` is the file, ``waiting_writes`` the queue and the idempotency keys, and
``written_rows`` makes rows of documents.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from cairn.pipeline.config import CorpusConfig, IngestConfig
from cairn.pipeline.corpus.scan import Scan
from cairn.pipeline.corpus.sources import BoundedSource, Source
from cairn.pipeline.errors import (
    CairnError,
    ChangedDocumentError,
    CollectionBusyError,
    CollectionExistsError,
    DocumentsRefusedError,
    FingerprintMismatchError,
    ModelError,
    SchemaError,
    SourceError,
    StorageError,
    TryAgainError,
    UsageError,
    WritesWaitingError,
)
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.build_index import build_index, stored_fields
from cairn.pipeline.line.compatibility import stored_settings
from cairn.pipeline.line.ingest_settings import resolve_ingest_config
from cairn.pipeline.line.live_engine import LiveEngine
from cairn.pipeline.line.waiting_writes import KeptKeys, Outcome, WaitingWrites, Write, digest_of
from cairn.pipeline.line.write_log import WriteLog
from cairn.pipeline.line.written_rows import (
    SOURCE_NAME,
    Documents,
    FileRows,
    Stored,
    changed_row,
    checked_rows,
    documents_of,
    kept_documents,
    last_rows,
    rows_of_file,
    typed_documents,
)
from cairn.pipeline.types import BETWEEN_BATCHES, GIVEN_VECTORS

if TYPE_CHECKING:
    from cairn.pipeline.model.engine.backbone import Backbone

log = logging.getLogger(__name__)

TURN_SECONDS: Final = 0.03
"""Between two publications: an ingest that waits looks at the lock three times in it."""
TURN_EVERY_SECONDS: Final = 1.0
REST_SHARE: Final = 2.0
"""While searches wait: how many times as long as a publication took the next one is put off.

The server does so with the acceptance of writes, too.
"""
LONGEST_REST_SECONDS: Final = 6.0
RETRY_SECONDS: Final = 2.0
DRAIN_SECONDS: Final = 10.0
KEPT_OUTCOMES: Final = 10_000
NICENESS: Final = 5

_COMMITS: Final = ("commit", "index")
"""Stages of an ingest that are not given up in the middle."""
_ITS_FAULT: Final = (DocumentsRefusedError, ModelError, SchemaError, SourceError)
"""What a write itself is to blame for, where it fails alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """An acknowledged write; ``published`` resolves to its :class:`Outcome`."""

    number: int
    answer: Mapping[str, Any]
    published: Future[Outcome]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Content:
    """A write that is to be accepted: what the log keeps, the answer, its rows, and the columns with it."""

    kept: Mapping[str, Any]
    answer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rows: pa.RecordBatch | None = None
    fields: Sequence[pa.Field[Any]] | None = None


class _GivenUpError(Exception):
    """The writer has to end before a publication is committed."""


class LiveWriter:
    """The one writer of a collection in a server; its calls come from any thread.

    ``backbone`` gives the model that searches have in memory, None where none is. ``take_up`` lets searches
    answer from a published generation, ``is_busy`` tells whether some wait: then more writes are gathered
    before they are published. Of sources, only what lies below ``allowed_sources`` is read; None bounds
    nothing. Raises :class:`CollectionBusyError` where another server writes.
    """

    def __init__(
        self,
        layout: CollectionLayout,
        *,
        backbone: Callable[[], Backbone | None],
        take_up: Callable[[int], None],
        is_busy: Callable[[], bool] = lambda: False,
        allowed_sources: Sequence[str] | None = None,
    ) -> None:
        self.layout = layout
        self._backbone, self._take_up, self._is_busy = backbone, take_up, is_busy
        self._changed = threading.Condition()
        """Held from the check of a write to its place in the log: writes have one order."""
        self._allowed_sources = allowed_sources
        self._is_draining = False
        self._writes = WaitingWrites()
        self._fields: Sequence[pa.Field[Any]] = ()
        """The metadata columns that there will be once all is published."""
        self._keys = KeptKeys()
        self._outcomes: OrderedDict[int, Outcome] = OrderedDict()
        self._engine: LiveEngine | None = None
        self._number = self._applied = 0
        self._settings: Mapping[str, Any] = {}
        self._known_config: tuple[object, IngestConfig] | None = None
        self._stop_at: float | None = None
        self._turn_at = 0.0
        self._is_begun = layout.is_begun()
        self.trouble: str | None = None
        """Why nothing is published just now, None where nothing is wrong."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(layout.only_server())
            self._log = WriteLog(layout.writes_path)
            stack.callback(self._log.close)
            self._replay()
            self._held = stack.pop_all()
        self._thread = threading.Thread(target=self._work, name=f"cairn-write-{layout.name}", daemon=True)
        self._thread.start()

    def _replay(self) -> None:
        self._fields = stored_fields(self.layout) or ()
        for _, record in self._log.records:
            self._settings = record.get("settings", self._settings)
            self._applied = max(self._applied, record.get("applied", 0))
            self._number = max(self._number, record.get("number", 0), self._applied)
            self._keys.add(record.get("keys", {}))
            for number, fault in record.get("faults", ()):
                self._outcomes[number] = Outcome(state="failed", fault=fault)
        waiting = [each for each in self._log.records if each[1].get("number", 0) > self._applied]
        if waiting:
            self._config()  # what is wrong with the collection is no fault of its writes
        for position, record in waiting:
            rows = None
            try:
                if "documents" in record:
                    documents = documents_of(record["documents"])
                    rows, scan = self._checked(documents, record["source_file"])
                    self._fields = scan.metadata_fields
            except UsageError as error:  # an ingest has given a column another type since
                name, fault = self.layout.name, str(error)
                log.error("writes.failed collection=%s sentence=%s", name, fault)  # noqa: TRY400
                self._outcomes[record["number"]] = Outcome(state="failed", fault=fault)
            else:
                self._writes.add(_write_of(record, position, rows))
        self._log.records.clear()

    @property
    def is_open(self) -> bool:
        """Tell whether it takes writes: not once it was stopped, or its collection was removed."""
        return self._stop_at is None and self.layout.writes_path.exists()

    def create(self, settings: Mapping[str, Any], asked: Mapping[str, Any], key: str | None = None) -> None:
        """Keep the settings of a new collection; ``asked`` is the request, which the same key brings again.

        Raises :class:`CollectionExistsError` where it was begun before.
        """
        with self._entered():
            if self._is_begun:
                raise CollectionExistsError("a new collection must have a new name, got one that there is")
            keys = {} if key is None else {key: (digest_of(["create", asked]), 0, {})}
            try:
                self._require_room()
                self._log.append({"settings": settings, "keys": keys})
            except CairnError:
                if not self._log.size:  # an empty log would stand for a collection that was created
                    self.layout.writes_path.unlink(missing_ok=True)
                raise
            self._keys.add(keys)
            self._is_begun, self._settings, self._known_config = True, settings, None

    def was_created_by(self, asked: Mapping[str, Any], key: str) -> bool:
        """Tell whether a request with this key has made the collection."""
        with self._entered():
            return self._keys.find(key, digest_of(["create", asked])) is not None

    def write(
        self,
        documents: Documents,
        stored: Stored,
        *,
        types: Mapping[str, str] | None = None,
        if_match: Sequence[str] | None = None,
        key: str | None = None,
        source_file: str = SOURCE_NAME,
    ) -> Receipt:
        """Add documents, or replace those of the same ids; ``source_file`` is where they came from.

        Values of JSON are read as the ``types`` of their columns. ``if_match`` has the hashes of which one
        must be the document's, or ``*`` for any; none if it must be new. A table comes without a ``key``.
        """
        asked = ["write", documents, *([types] if types else [])]

        def write() -> _Content:
            typed = documents
            if types and not isinstance(documents, pa.Table):
                typed = typed_documents(documents, types, self._known_fields(stored))
            return self._written(typed, stored, if_match, source_file=source_file)

        return self._accept(asked, key, write)

    def read_file(self, path: Path, stored: Stored) -> FileRows:
        """Read a file as an ingest of the collection would; nothing is written."""
        own = self._config().remembered_corpus
        assert own is not None, "a publication has the columns of HTTP, and remembers the collection's"
        return rows_of_file(path, own, self._known_fields(stored))

    def patch(
        self,
        doc_id: str,
        metadata: Mapping[str, Any],
        stored: Stored,
        *,
        if_match: Sequence[str] | None = None,
        key: str | None = None,
    ) -> Receipt | None:
        """Change metadata of a document, None takes a value away; None where there is no such document."""
        asked = ["patch", doc_id, metadata]
        with self._entered():
            before = self._read(doc_id, stored)
            if before is None and key not in self._keys.answers:
                return None

            def change() -> _Content:
                assert before is not None, "its key is not known"
                changed = changed_row(before, metadata, self._known_fields(stored))
                source_file: str = before["source_file"][0].as_py()
                return self._written(changed, stored, if_match, source_file=source_file)

            return self._accept(asked, key, change)

    def delete(
        self,
        doc_ids: Sequence[str],
        stored: Stored,
        *,
        if_match: Sequence[str] | None = None,
        key: str | None = None,
    ) -> Receipt:
        """Delete documents; the answer names the ids that are not there."""
        return self._accept(["delete", doc_ids], key, lambda: self._deleted(doc_ids, stored, if_match))

    def delete_matching(
        self, filters: Mapping[str, Any], stored: Stored, timeout: float, *, key: str | None = None
    ) -> Receipt:
        """Delete what matches a filter tree once all writes before are published."""

        def matching() -> _Content:
            self._is_draining = True
            try:
                if not self._changed.wait_for(lambda: not self._writes, timeout):
                    raise WritesWaitingError(
                        "a filter must be applied to published documents, got writes that wait; try again"
                    )
                self._require_room()  # it may be stopping by now
                return self._deleted(stored.matching(filters), stored)
            finally:
                self._is_draining = False
                self._changed.notify_all()

        return self._accept(["matching", filters], key, matching)

    def ingest(self, source: str, *, key: str | None = None) -> Receipt:
        """Ingest a source in the order of the writes."""
        return self._accept(["source", source], key, lambda: _Content(kept={"source": source}))

    def outcome(self, number: int) -> Outcome | None:
        """Return what became of a write, None of one that was never or is no longer known.

        Of those before the server started, the log names the failed ones.
        """
        if not max(0, self._applied - KEPT_OUTCOMES) < number <= self._number:
            return None
        is_applied = number <= self._applied
        return self._outcomes.get(number, Outcome(state="searchable" if is_applied else "waiting"))

    def stop(self, seconds: float, patience: float = 1.0) -> bool:
        """Publish what waits within some seconds, and let go; what is left stays in the log.

        A publication that is not committed by then is given up with the batch that is being encoded. Tells
        whether all that has ended within the ``patience``, in seconds, beyond.
        """
        with self._changed:
            if self._stop_at is None:
                self._stop_at = time.monotonic() + seconds
            self._changed.notify_all()
        self._thread.join(seconds + patience)
        return not self._thread.is_alive()

    def fail_waiting(self, fault: str) -> None:
        """Tell who waits for writes that a stopped writer has left that they come to nothing."""
        _tell(self._writes.all(), Outcome(state="failed", fault=fault))

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """Let one publication take what this thread writes meanwhile; other writes wait."""
        with self._changed:
            yield

    @contextlib.contextmanager
    def _entered(self) -> Generator[None]:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_draining, DRAIN_SECONDS):
                raise WritesWaitingError(
                    "a write must wait for a deletion before it, which takes long; try again"
                )
            yield

    def _accept(self, asked: Any, key: str | None, make: Callable[[], _Content]) -> Receipt:
        """Put a write into the log and into the queue, unless the same key has brought it before."""
        digest = "" if key is None else digest_of(asked)
        with self._entered():
            known = None if key is None else self._keys.find(key, digest)
            if known is not None:
                return self._repeated(*known)
            self._require_room()
            content, number = make(), self._number + 1
            keys = {} if key is None else {key: (digest, number, content.answer)}
            position = self._log.append({"number": number, "keys": keys, **content.kept})
            self._number = number
            self._fields = self._fields if content.fields is None else content.fields
            self._keys.add(keys)
            write = _write_of({"number": number, **content.kept}, position, content.rows)
            self._writes.add(write)
            self._changed.notify_all()
        return Receipt(number=number, answer=content.answer, published=write.published)

    def _repeated(self, number: int, answer: Mapping[str, Any]) -> Receipt:
        published = self._writes.published(number)
        if published is None:
            published = Future[Outcome]()
            published.set_result(self._outcomes.get(number, Outcome(state="searchable")))
        return Receipt(number=number, answer=answer, published=published)

    # What follows up to `_work` runs while the order of writes is held, or before the thread is started.

    def _written(
        self, documents: Documents, stored: Stored, if_match: Sequence[str] | None, *, source_file: str
    ) -> _Content:
        rows, scan = self._checked(documents, source_file, stored)
        doc_ids, hashes = rows.column("doc_id").to_pylist(), rows.column("content_sha256").to_pylist()
        if if_match is not None:
            self._require_match(doc_ids[0], if_match, stored)
        written = [{"doc_id": each, "content_sha256": sha} for each, sha in zip(doc_ids, hashes, strict=True)]
        answer = {"documents": written, "warnings": list(scan.warnings)}
        kept = {"documents": kept_documents(documents), "source_file": source_file}
        return _Content(kept=kept, answer=answer, rows=rows, fields=scan.metadata_fields)

    def _checked(
        self, documents: Documents, source_file: str, stored: Stored | None = None
    ) -> tuple[pa.RecordBatch, Scan]:
        """Return documents as rows, with their scan."""
        if self._config().encoder.given_dims is not None:
            told = (
                "documents must come with vectors, as this collection's do, got some over HTTP, which takes "
                "none; ingest them with --vector-column"
            )
            raise DocumentsRefusedError(told, [(0, told)])
        fields = self._fields if stored is None else self._known_fields(stored)
        return checked_rows(documents, self._config().corpus, fields, source_file)

    def _known_fields(self, stored: Stored) -> Sequence[pa.Field[Any]]:
        """Return the metadata columns that there will be, as they are published where they are."""
        return [*{field.name: field for field in (*self._fields, *stored.fields())}.values()]

    def _deleted(
        self, doc_ids: Sequence[str], stored: Stored, if_match: Sequence[str] | None = None
    ) -> _Content:
        if if_match is not None:
            self._require_match(doc_ids[0], if_match, stored)
        wanted = list(dict.fromkeys(doc_ids))
        newest = self._writes.newest
        there = stored.present([doc_id for doc_id in wanted if doc_id not in newest])
        there |= {doc_id for doc_id in wanted if doc_id in newest and newest[doc_id][1] is not None}
        deleted = [doc_id for doc_id in wanted if doc_id in there]
        missing = [doc_id for doc_id in wanted if doc_id not in there]
        return _Content(kept={"deleted": deleted}, answer={"deleted": len(deleted), "missing": missing})

    def _require_room(self) -> None:
        if self._stop_at is not None:
            raise CollectionBusyError(
                "a write must not meet the end of its writer: the server stops, or the collection is removed "
                "or made again; write once more"
            )
        if self.trouble is not None:
            raise StorageError(f"writes must be publishable, got: {self.trouble}")
        self._writes.require_room()

    def _config(self) -> IngestConfig:
        """Return the settings of a publication, read again where another generation is served."""
        stamp = self._stamp()
        if self._known_config is None or self._known_config[0] != stamp:
            stored = stored_settings(self.layout.place, self.layout.name)
            own = resolve_ingest_config(self._settings if stored is None else {}, stored)
            sizes = {name: getattr(own.corpus, name) for name in ("max_document_bytes", "max_id_characters")}
            given = None if own.corpus.vector_column is None else GIVEN_VECTORS
            columns = CorpusConfig(
                id_column="doc_id", text_column="text", title_column="title", vector_column=given, **sizes
            )
            self._known_config = stamp, replace(own, corpus=columns, remembered_corpus=own.corpus)
        return self._known_config[1]

    def _stamp(self) -> object:
        """Return what another served generation changes."""
        with contextlib.suppress(FileNotFoundError):
            found = self.layout.current_path.stat()
            return found.st_ino, found.st_mtime_ns
        return None

    def _read(self, doc_id: str, stored: Stored) -> pa.Table | None:
        """Return the row of a document as the last acknowledged write left it."""
        if doc_id not in self._writes.newest:
            return stored.read(doc_id)
        write, row = self._writes.newest[doc_id]
        return None if row is None or write.rows is None else pa.table(write.rows.slice(row, 1))

    def _require_match(self, doc_id: str, wanted: Sequence[str], stored: Stored) -> None:
        """Refuse a document whose content is none of these, ``*`` is any; without one it must be new."""
        found = self._read(doc_id, stored)
        has = () if found is None else ("*", found["content_sha256"][0].as_py())
        holds = not wanted if found is None else not {*has}.isdisjoint(wanted)
        if not holds:
            raise ChangedDocumentError(
                "a document must be as If-Match or If-None-Match says, got another content; read it again"
            )

    def _work(self) -> None:
        try:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # searches come first
            while writes := self._next():
                started = time.monotonic()
                self._publish(writes)
                self._rest(time.monotonic() - started)
        except Exception:
            log.exception("writes.stopped collection=%s", self.layout.name)
        finally:  # the next to write opens another writer, which replays the log
            with self._changed:
                self._stop_at = self._stop_at or time.monotonic()
                self._held.close()
                self._changed.notify_all()

    def _rest(self, seconds: float) -> None:
        """Let an ingest take its turn, then searches that wait, for longer than a publication took."""
        until = time.monotonic() + min(REST_SHARE * seconds, LONGEST_REST_SECONDS)
        if time.monotonic() >= self._turn_at:
            time.sleep(TURN_SECONDS)
            self._turn_at = time.monotonic() + TURN_EVERY_SECONDS
        while self._stop_at is None and self._is_busy() and time.monotonic() < until:
            time.sleep(TURN_SECONDS)

    def _next(self) -> list[Write]:
        """Wait for writes; return what one publication takes, nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._writes or self._stop_at is not None)
            return [] if self._is_over() else self._writes.first()

    def _is_over(self) -> bool:
        """Tell whether to end: at the end of the time to stop, or where the collection was removed."""
        if self._stop_at is not None and (not self._writes or time.monotonic() >= self._stop_at):
            return True
        return not self.layout.writes_path.exists()

    def _publish(self, writes: Sequence[Write]) -> None:
        """Publish writes, however often that has to be tried; what is not publishable alone fails."""
        while not self._is_over():
            try:
                outcome = self._build(writes)
            except _GivenUpError:
                continue
            except CollectionBusyError:  # of a lease nothing tells that it is free
                time.sleep(0.0 if self.layout.replica is None else RETRY_SECONDS)
            except (StorageError, TryAgainError) as error:
                self._pause(error)
            except Exception as error:  # noqa: BLE001 - one write must not end the thread
                if len(writes) > 1:
                    for write in writes:
                        self._publish([write])
                    return
                if isinstance(error, _ITS_FAULT) or writes[0].source is not None:
                    log.error("writes.failed collection=%s sentence=%s", self.layout.name, error)  # noqa: TRY400
                    self._settle(writes, Outcome(state="failed", fault=str(error) or type(error).__name__))
                    return
                self._pause(error)
            else:
                self._settle(writes, outcome)
                return

    def _pause(self, error: Exception) -> None:
        if self.trouble is None:
            log.error("writes.not_published collection=%s sentence=%s", self.layout.name, error)
        self.trouble = str(error) if isinstance(error, CairnError) else type(error).__name__
        with self._changed:
            if self._stop_at is None:
                self._changed.wait_for(lambda: self._stop_at is not None, RETRY_SECONDS)
            else:
                self._changed.wait(min(RETRY_SECONDS, max(0.0, self._stop_at - time.monotonic())))

    def _build(self, writes: Sequence[Write]) -> Outcome:
        """Publish writes with the settings and columns that are served, which another process may change."""
        stamp = self._stamp()
        try:
            return self._build_as(self._config(), writes)
        except (FingerprintMismatchError, SchemaError):
            if self._stamp() == stamp:
                raise
            return self._build(writes)

    def _build_as(self, config: IngestConfig, writes: Sequence[Write]) -> Outcome:
        source = writes[0].source
        before = self.layout.current_generation_number()
        sources: Sequence[Source]
        deleted: Sequence[str] = ()
        if source is not None:
            config = replace(config, corpus=config.remembered_corpus, remembered_corpus=None)
            bounds = self._allowed_sources
            sources = [source if bounds is None else BoundedSource(source=source, allowed=tuple(bounds))]
        else:
            sources, deleted = last_rows((write.rows, write.deleted) for write in writes)
            if len(sources[0].table) == 0 and not (deleted and self.layout.exists()):
                return Outcome(state="searchable", generation=before or 0)  # there is nothing to publish

        stage_now = ""

        def give_up() -> None:
            if stage_now not in _COMMITS and self._is_over():
                raise _GivenUpError

        def hear(stage: str, done: int, total: int | None, unit: str) -> None:  # noqa: ARG001 - a listener's
            nonlocal stage_now
            stage_now = stage
            give_up()
            if source is not None or stage != "index" or done != total:
                return
            generation = self.layout.current_generation_number()
            if generation is not None and generation != before:  # served; what follows only tidies up
                with self._changed, contextlib.suppress(CairnError):
                    # Published again after a kill, it would undo what another machine has written since.
                    self._log.append({"applied": writes[-1].number}, flushes=False)
                self._take_up(generation)
                outcome = Outcome(state="searchable", generation=generation)
                with self._changed:
                    self._outcomes.update({write.number: outcome for write in writes})
                _tell(writes, outcome)

        before_batches = BETWEEN_BATCHES.set(give_up)
        try:
            report = build_index(
                sources,
                self.layout.place,
                self.layout.name,
                config,
                hear,
                self._loaded(config),
                deleted_ids=deleted,
                keeps_history=source is not None,
            )
        finally:
            BETWEEN_BATCHES.reset(before_batches)
        if source is None:
            return Outcome(state="searchable", generation=report.generation)
        self._take_up(report.generation)
        return Outcome(state="searchable", generation=report.generation, report=report)

    def _loaded(self, config: IngestConfig) -> LiveEngine:
        known = self._engine
        if known is None or known.config.encoder != config.encoder:
            self._engine = known = LiveEngine(config, self.layout, self._backbone(), self._is_busy)
        return known

    def _settle(self, writes: Sequence[Write], outcome: Outcome) -> None:
        """Note that writes need nothing more, here and in the log, and tell who waits."""
        with self._changed:
            last = writes[-1].number
            self._writes.drop(writes)
            self._outcomes.update({write.number: outcome for write in writes})
            while len(self._outcomes) > KEPT_OUTCOMES:
                self._outcomes.popitem(last=False)
            self._applied, self.trouble = last, None
            with contextlib.suppress(CairnError):  # a replay publishes nothing twice
                if self._log.is_grown:
                    outcomes = self._outcomes.items()
                    faults = [(number, each.fault) for number, each in outcomes if each.fault is not None]
                    kept: dict[str, Any] = {"applied": last, "settings": self._settings, "faults": faults}
                    kept["keys"] = dict(self._keys.answers)
                    self._log.replace(kept, self._writes.position)
                else:
                    faults = [(last, outcome.fault)] if outcome.fault else []
                    self._log.append({"applied": last, "faults": faults}, flushes=False)
            self._changed.notify_all()
        _tell(writes, outcome)


def _tell(writes: Sequence[Write], outcome: Outcome) -> None:
    """Tell who waits for writes what became of them, unless they know."""
    for write in writes:
        if not write.published.done() and write.published.set_running_or_notify_cancel():
            write.published.set_result(outcome)


def _write_of(record: Mapping[str, Any], position: int, rows: pa.RecordBatch | None) -> Write:
    """Return the write that a record of the log has."""
    return Write(
        number=record["number"],
        position=position,
        num_bytes=0 if rows is None else rows.nbytes,
        rows=rows,
        deleted=record.get("deleted", ()),
        source=record.get("source"),
    )
