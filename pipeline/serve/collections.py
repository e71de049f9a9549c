"""The collections a server answers for: opened once, shared by all requests, closed when gone or damaged.

Opening runs on a thread of its own, hashes every file and loads the encoder; collections with one encoder
share it and its queue. The searcher opens newly published generations; where one has another encoder, the
collection is opened again. A failure is remembered for some seconds, so that requests do not repeat it.

A damaged collection is mended where derived files are lost, and no row is: a file is made again from the
tables, as ``cairn repair`` does, and published. Where an older generation answers meanwhile, requests go on;
where a file that both kept generations share is damaged, they wait within their time. Nothing is given up
here: lost rows and older generations are for the keeper to decide on. Nor is a large collection mended, since
that takes memory and minutes of a process that serves others, nor one in an object store, nor one that is
read-only.

Texts of concurrent requests meet in their encoder's queue and go through it together, on a thread of its own:

    request ─▶ [ text text ] ─┐                      ┌─▶ vectors ─▶ request
    request ─▶ [ text ]       ├─▶ one pass (bytes) ──┤
    request ─▶ [ text … ]     ┘   a text of each     └─▶ vectors ─▶ request
                                  in turn

A pass takes the texts that arrived while the last one ran, so a single query is encoded at once. It takes one
text of each request in turn, so a long list does not delay other requests. The queue is bounded in bytes. A
request that does not fit is refused, and one whose client has disconnected is dropped. A text that the
encoder fails on fails alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol

import numpy as np
from cairn.pipeline.collection import encode_sparse
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import (
    CairnError,
    ConfigError,
    EndpointDownError,
    FingerprintMismatchError,
    IntegrityError,
    StorageError,
)
from cairn.pipeline.index.aliases import Alias, aliases_path, read_aliases
from cairn.pipeline.index.generation import Generation, OpenOne, open_latest_intact_generation
from cairn.pipeline.index.layout import (
    FIRST_INGEST,
    SIZES,
    CollectionLayout,
    FirstIngest,
    list_collections,
    list_states,
    read_manifest,
    wholes,
)
from cairn.pipeline.index.names import store_uri
from cairn.pipeline.index.recovery import repair_collection
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.model.folders.checkpoint import weights_in_memory
from cairn.pipeline.search.searcher import Searcher, Vectors, encode_for_search
from cairn.pipeline.serve.problems import Kind, ProblemError, opening_problem, search_problem
from cairn.pipeline.serve.settings import TABLE_TIMEOUT_SECONDS, ServeSettings
from cairn.pipeline.types import CollectionSummary, EncodedQueries, QueryEncoder
from jaxtyping import Float32

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0
OPENING_SHARE: Final = 0.8
"""Of a request's time, what it waits for its collection to be opened; the rest is left to answer in."""

LOOK_SECONDS: Final = 5.0
"""How long a probe believes what another one found of collections that no one has asked for."""
HEAL_AGAIN_SECONDS: Final = 60.0
"""Until another attempt, which hashes all files again."""
HEALED_BYTES: Final = 2**30
"""Size of the files of a generation up to which a server makes some of them again: some seconds' work."""

_UNPUBLISHED: Final[Mapping[FirstIngest, Kind]] = {
    "building": Kind.COLLECTION_BUILDING,
    "empty": Kind.COLLECTION_EMPTY,
    "unfinished": Kind.COLLECTION_UNFINISHED,
    "damaged": Kind.COLLECTION_DAMAGED,
}

_CANNOT: Final = "cannot be served: {}"


@dataclass(frozen=True, eq=False, slots=True)
class ServedCollection:
    """An opened collection."""

    name: str
    searcher: Searcher
    encoder: EncoderQueue


@dataclass(frozen=True, slots=True)
class _Failure:
    problem: ProblemError
    retry_at: float


class Collections:
    """Opens collections by name; used from one event loop."""

    def __init__(
        self,
        settings: ServeSettings,
        load_encoder: LoadEncoder,
        *,
        on_start: Callable[[], None] | None = None,
        observe: Observer = lambda *_: None,
        open_one: OpenOne | None = None,
    ) -> None:
        self._settings = settings
        self._aliases_path = aliases_path(settings.root)
        self._open_one = open_one
        self._load_encoder = load_encoder
        self._on_start = on_start
        self._observe = observe
        self._healing: dict[str, asyncio.Task[float]] = {}
        """What became of mending each collection: when to try again, 0 where it was mended."""
        self._opened: dict[str, asyncio.Task[ServedCollection | _Failure]] = {}
        self._encoders: dict[str, EncoderQueue] = {}
        self._encoder_of: dict[str, EncoderQueue] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cairn-open")
        self._preloading: asyncio.Task[None] | None = None
        self._switched: Mapping[str, Alias] = {}
        self._aliases_stamp: tuple[int, int] | None = None
        self._answering: dict[str, str] = {}
        self._look_at, self._damaged = 0.0, frozenset[str]()

    def names(self) -> list[str]:
        """List what can be asked for, by name."""
        found = {*list_collections(self._settings.root), *self._aliases()}
        return sorted(filter(self.serves, found))

    def listed(self) -> list[str]:
        """List what can be asked for and what was begun, by name."""
        found = {*list_states(self._settings.root), *self._aliases()}
        return sorted(filter(self.serves, found))

    def serves(self, name: str) -> bool:
        """Tell whether the server was started for this collection."""
        return not self._settings.collections or name in self._settings.collections

    async def get(self, name: str) -> ServedCollection:
        """Return an opened collection.

        Anything that prevents it raises :class:`ProblemError`, also that it takes long. A switched name
        answers from the collection before until the new one is open.
        """
        if not self.serves(name):
            raise Kind.UNKNOWN_COLLECTION()
        target = self.target(name)
        before = self._outcome(self._answering.get(name, target))
        if isinstance(before, ServedCollection) and before.name != target and name in self._switched:
            with contextlib.suppress(ProblemError):
                self._begin(target)
            if not isinstance(self._outcome(target), ServedCollection):
                return before
        found = await self._opened_within(target, OPENING_SHARE * self._settings.deadline_seconds)
        self._answering[name] = target
        return found

    async def own(self, name: str) -> ServedCollection:
        """Return the collection of that name, opened, also where the name answers from another one."""
        return await self._opened_within(name, OPENING_SHARE * self._settings.deadline_seconds)

    def _aliases(self) -> Mapping[str, Alias]:
        """Return the switched names, as they were last read where they cannot be read now."""
        try:
            found = self._aliases_path.stat()
            stamp = found.st_ino, found.st_mtime_ns
        except OSError:
            stamp = None
        if stamp != self._aliases_stamp:
            self._aliases_stamp = stamp
            try:
                self._switched = read_aliases(self._settings.root)
            except (IntegrityError, StorageError) as error:
                log.error("serve.aliases_unreadable sentence=%s", error)  # noqa: TRY400 - it says it
        return self._switched

    def target(self, name: str) -> str:
        """Return the collection that a name answers from."""
        alias = self._aliases().get(name)
        return name if alias is None else alias.to

    async def _opened_within(self, name: str, timeout_seconds: float | None) -> ServedCollection:
        task = self._begin(name)
        if not task.done():
            await asyncio.wait({task}, timeout=timeout_seconds)
        if not task.done():
            raise Kind.COLLECTION_OPENING(
                "its files are checked and its model is loaded; that goes on, so try again"
            )
        outcome = task.result()
        if isinstance(outcome, _Failure):
            raise outcome.problem.with_traceback(None)
        return outcome

    def _begin(self, name: str) -> asyncio.Task[ServedCollection | _Failure]:
        """Open a collection, once more where that failed a while ago, and return at once."""
        task = self._opened.get(name)
        if task is None or (
            isinstance(found := self._outcome(name), _Failure) and time.monotonic() >= found.retry_at
        ):
            self._require_published(name)
            task = self._opened[name] = asyncio.create_task(self._open(name))
        return task

    async def reopen(self, stale: ServedCollection) -> ServedCollection:
        """Open a collection again whose generation or encoder is another now; callers share the work."""
        if self._outcome(stale.name) is stale:
            del self._opened[stale.name]
        return await self._opened_within(stale.name, OPENING_SHARE * self._settings.deadline_seconds)

    async def is_healed(self, name: str) -> bool:
        """Mend a damaged collection where that costs no row; tell whether another attempt may succeed.

        What failed, or takes longer, is not tried again for :data:`HEAL_AGAIN_SECONDS`; callers share the
        work.
        """
        task = self._heal(name)
        await asyncio.wait({task}, timeout=OPENING_SHARE * self._settings.deadline_seconds)
        return task.done() and task.result() == 0

    def heal_outdated(self, served: ServedCollection) -> None:
        """Begin to mend the published generation where an older one answers."""
        if served.searcher.is_outdated:
            self._heal(served.name)

    def _heal(self, name: str) -> asyncio.Task[float]:
        task = self._healing.get(name)
        if task is None or (task.done() and time.monotonic() >= task.result()):
            work = asyncio.to_thread(_heal, CollectionLayout.at(self._settings.root, name))
            task = self._healing[name] = asyncio.create_task(work)
        return task

    def forget(self, gone: ServedCollection) -> None:
        """Let go of a collection that is no longer there."""
        if self._outcome(gone.name) is gone:
            self.let_go(gone.name)

    def let_go(self, name: str) -> None:
        """Forget what was opened by a name: one made again is opened by the next request."""
        if self._opened.pop(name, None) is not None:
            self._pool.submit(self._use_encoder, name, None)

    def start_preloading(self) -> None:
        """Open all collections in the background."""
        self._preloading = asyncio.create_task(self._preload())

    def readiness(self) -> str | None:
        """Return what keeps the server from being ready, None when nothing does.

        A collection it was started for, or every one there is. One that was removed is missed only where
        the server was started for it.
        """
        if self._preloading is None or not self._preloading.done():
            return "collections are being opened"
        outcomes = {name: self._outcome(name) for name in self._standing()}
        wanted = {self.target(name) for name in self._settings.collections} or set(outcomes)
        ready = {
            name
            for name, found in outcomes.items()
            if isinstance(found, ServedCollection) and found.searcher.is_answering
        }
        is_ready = wanted <= ready if self._settings.collections else bool(ready) or not wanted
        return (
            None
            if is_ready
            else f"{len(wanted - ready)} of {len(wanted)} collection(s) cannot be served; the server's "
            "log says more"
        )

    def degraded(self) -> list[str]:
        """Say which collections are not served as they were published, and why.

        Of those that are not open, which are listed as damaged; of a store, which takes long, none.
        """
        told = {name: self._trouble(found) for name in self._standing() if (found := self._outcome(name))}
        if store_uri(self._settings.root) is None:
            now = time.monotonic()
            unopened = [name for name in self.listed() if self.target(name) not in self._opened]
            if now >= self._look_at:  # each probe would read the manifest of each
                self._look_at = now + LOOK_SECONDS
                self._damaged = frozenset(
                    name for name in unopened if self.summarise(name).status == "damaged"
                )
            damaged = (name for name in unopened if name in self._damaged)
            told |= dict.fromkeys(damaged, _CANNOT.format(Kind.COLLECTION_DAMAGED.title))
        return [f"collection {name!r} {trouble}" for name, trouble in told.items() if trouble is not None]

    @staticmethod
    def _trouble(found: ServedCollection | _Failure) -> str | None:
        if isinstance(found, _Failure):
            return _CANNOT.format(found.problem.kind.title)
        if not found.searcher.is_answering:
            return _CANNOT.format(Kind.COLLECTION_DAMAGED.title)
        if found.searcher.is_outdated:
            return "serves an older generation: the published one is damaged"
        if found.encoder.outage is not None:
            return "cannot encode queries: its endpoint gives no vectors; the server's log says why"
        if found.searcher.warnings:
            return (
                "answers, but not all of its files are whole or up to date: its keeper has to verify and "
                "repair it"
            )
        return None

    def _standing(self) -> list[str]:
        """List the collections that were opened and have not been removed since, by name."""
        root = self._settings.root
        return [name for name in sorted(self._opened) if _stands(CollectionLayout.at(root, name))]

    def summarise(self, name: str) -> CollectionSummary:
        """Describe what answers for a name in a line, as it is served where open, else as its files say."""
        return replace(self._summary(self.target(name)), name=name)

    def _summary(self, name: str) -> CollectionSummary:
        found = self._outcome(name)
        if isinstance(found, _Failure) and found.problem.kind is Kind.COLLECTION_DAMAGED:
            return CollectionSummary(name=name, status="damaged")
        if isinstance(found, ServedCollection):
            try:
                return _ready(name, found.searcher.generation.manifest)
            except IntegrityError:
                return CollectionSummary(name=name, status="damaged")
            except CairnError:  # another encoder's, or gone: as its files say
                pass
        layout = CollectionLayout.at(self._settings.root, name)
        try:
            number = layout.current_generation_number()
            manifest = None if number is None else read_manifest(layout, number)
        except (IntegrityError, StorageError):
            return CollectionSummary(name=name, status="damaged")
        if manifest is None:
            return CollectionSummary(name=name, status=layout.first_ingest() or "unfinished")
        return _ready(name, manifest)

    def _outcome(self, name: str) -> ServedCollection | _Failure | None:
        """Return what opening a collection came to, None before it is tried or while it lasts."""
        task = self._opened.get(name)
        return None if task is None or not task.done() or task.cancelled() else task.result()

    async def close(self) -> None:
        """Stop all threads."""
        if self._preloading is not None:
            self._preloading.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for queue in self._encoders.values():
            await asyncio.to_thread(queue.stop)

    async def _preload(self) -> None:
        names = self._settings.collections or self.names()
        for name in dict.fromkeys(map(self.target, names)):
            try:
                await self._opened_within(name, None)
            except ProblemError as problem:
                log.warning("serve.not_opened collection=%s problem=%s", name, problem.kind.code)
        gc.freeze()  # else collections of garbage stop all searches for 0.3 s: they look through all modules

    def _require_published(self, name: str) -> None:
        """Refuse a name without a published generation, and do no work for unknown names."""
        try:
            layout = CollectionLayout.at(self._settings.root, name)
        except ConfigError:
            raise Kind.UNKNOWN_COLLECTION() from None
        if not _stands(layout):
            self._opened.pop(name, None)
            begun = layout.first_ingest()
            if begun is not None:
                raise _UNPUBLISHED[begun](FIRST_INGEST[begun])
            raise Kind.UNKNOWN_COLLECTION()

    async def _open(self, name: str) -> ServedCollection | _Failure:
        loop = asyncio.get_running_loop()
        try:
            try:
                return await loop.run_in_executor(self._pool, self._open_now, name)
            except IntegrityError:
                if not await self.is_healed(name):
                    raise
                return await loop.run_in_executor(self._pool, self._open_now, name)
        except CairnError as error:
            log.error(  # noqa: TRY400 - the sentence says it
                "serve.open_failed collection=%s error=%s sentence=%s", name, type(error).__name__, error
            )
            problem = opening_problem(error)
        except Exception as error:
            log.exception("serve.open_failed collection=%s error=%s", name, type(error).__name__)
            problem = Kind.INTERNAL_ERROR()
        return _Failure(problem, time.monotonic() + RETRY_SECONDS)

    def _open_now(self, name: str) -> ServedCollection:
        parts = None if self._open_one is None else range(0)  # others have the partitions
        layout = CollectionLayout.at(self._settings.root, name, parts)
        self._use_encoder(name, None)
        # The searcher checks every hash; here only the manifest and the context are read.
        generation = open_latest_intact_generation(layout, SIZES, self._open_one)
        queue = self._queue_for(generation)
        try:
            if generation.manifest.encoder.sparse_model is not None:
                encode_sparse(generation, ["."])  # one that cannot be had is told now, and tried again later
            searcher = Searcher(
                layout,
                queue.encoder,
                timeout_seconds=TABLE_TIMEOUT_SECONDS,
                open_one=self._open_one,
                encode_sparse=encode_sparse,
                verify=self._settings.verify,
                encode=lambda _, texts: queue.submit(texts, "search").result(),
            )
            opened = ServedCollection(name, searcher, queue)
        except FingerprintMismatchError:
            if open_latest_intact_generation(layout, SIZES, self._open_one).number == generation.number:
                raise
            return self._open_now(name)  # another one was published in between, and it has another encoder
        self._use_encoder(name, queue)
        log.info("serve.opened collection=%s generation=%d", name, opened.searcher.last_generation.number)
        return opened

    def _use_encoder(self, name: str, queue: EncoderQueue | None) -> None:
        """Note a collection's encoder, and retire unused ones; called on the opening thread only."""
        self._encoder_of.pop(name, None)
        if queue is None:
            return
        self._encoder_of[name] = queue
        for fingerprint, known in list(self._encoders.items()):
            if known not in self._encoder_of.values():
                self._encoders.pop(fingerprint).retire()

    def _queue_for(self, generation: Generation) -> EncoderQueue:
        fingerprint = generation.manifest.fingerprints["encoder"]
        queue = self._encoders.get(fingerprint)
        if queue is None:
            with weights_in_memory():
                encoder = self._load_encoder(generation)
            queue = self._encoders.get(encoder.fingerprint) or EncoderQueue(
                encoder, on_start=self._on_start, observe=self._observe
            )
            self._encoders[encoder.fingerprint] = queue
            queue.check()
        return queue


def _stands(layout: CollectionLayout) -> bool:
    """Tell whether a collection is there; of one that cannot be read, opening it says so."""
    try:
        return layout.exists()
    except StorageError:
        return True


def _ready(name: str, manifest: Manifest) -> CollectionSummary:
    return CollectionSummary(
        name=name,
        status="ready",
        generation=manifest.generation,
        documents=manifest.documents,
        chunks=manifest.chunks,
    )


def _heal(layout: CollectionLayout) -> float:
    """Mend a collection; return when to try again, 0 where that was done."""
    try:
        action = _mend(layout)
    except CairnError as error:
        log.warning("serve.not_healed collection=%s sentence=%s", layout.name, error)
        action = None
    except Exception:
        log.exception("serve.not_healed collection=%s", layout.name)
        action = None
    if action is None:
        return time.monotonic() + HEAL_AGAIN_SECONDS
    log.warning("serve.healed collection=%s action=%s", layout.name, action)
    return 0.0


def _mend(layout: CollectionLayout) -> str | None:
    """Mend a collection and say what was done; what is left to its keeper raises :class:`DamageError`."""
    if layout.replica is not None:
        raise layout.damaged("a server mends no collection in an object store")
    number = layout.current_generation_number()
    if number is None:
        return None
    manifest = read_manifest(layout, number)
    files = [record for _, own in wholes(layout, manifest) for record in own.files.values()]
    if sum(record.size_bytes for record in files) > HEALED_BYTES:
        raise layout.damaged(f"generation {number} exceeds the {HEALED_BYTES:,} bytes that a server mends")
    report = repair_collection(layout, keeps_all=True)
    return report.action if report.problems or report.generation != number else None


MAX_PASS_BYTES: Final = 16 << 10
"""About 4,000 tokens, some 0.4 s on two cores.

How long a query may have to wait for the pass before its own.
"""
MAX_WAITING_BYTES: Final = 512 << 10
"""About 130,000 tokens: more than is encoded within any deadline."""
MAX_REQUEST_BYTES: Final = 128 << 10
"""About 32,000 tokens, some 3 s on two cores: what one request may have encoded within its deadline."""
STOP_SECONDS: Final = 5.0

TextKind = Literal["query", "document", "search"]
"""A search takes a query with its tokens, where the encoder shows them: :class:`EncodedQueries`."""


class TextVectors(QueryEncoder, Protocol):
    """What the API needs of an encoder: queries, documents, and what they count in tokens."""

    @property
    def config(self) -> EncoderConfig:
        """Return the settings: whether documents bring their vectors, and which model reads queries."""
        ...

    @property
    def vector_dim(self) -> int:
        """Return V."""
        ...

    def encode_documents(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        """Embed documents, L2-normalised, in the order given."""
        ...

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Count the texts' own tokens."""
        ...


LoadEncoder = Callable[[Generation], TextVectors]
Observer = Callable[[int, float], None]
"""Hears of each pass: how many texts, how many seconds."""


@dataclass(eq=False, slots=True)
class _Job:
    """The texts of one request, and the vectors it has so far."""

    texts: Sequence[str]
    sizes: Sequence[int]
    kind: TextKind
    future: Future[Any] = field(default_factory=Future[Any])
    rows: list[Vectors] = field(default_factory=list[Vectors])
    num_taken: int = 0
    is_over: bool = False


class EncoderQueue:
    """One encoder behind one thread."""

    def __init__(
        self,
        encoder: TextVectors,
        *,
        on_start: Callable[[], None] | None = None,
        observe: Observer = lambda *_: None,
    ) -> None:
        self.encoder = encoder
        self._on_start = on_start
        self._observe = observe
        self._jobs: deque[_Job] = deque()
        self._waiting_bytes = 0
        self._is_stopping = False
        self._is_retired = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="cairn-encoder", daemon=True)
        self._thread.start()

    @property
    def outage(self) -> str | None:
        """Why an endpoint cannot be asked, None of an encoder that runs here."""
        return getattr(self.encoder, "outage", None)

    def check(self) -> None:
        """Ask an endpoint whether it answers, before the first query does."""
        check = getattr(self.encoder, "check_endpoint", None)
        if check is not None:
            check()

    async def encode(self, texts: Sequence[str], kind: TextKind = "query") -> Any:
        """Await what :meth:`submit` returns."""
        return await asyncio.wrap_future(self.submit(texts, kind))

    def submit(self, texts: Sequence[str], kind: TextKind = "query") -> Future[Any]:
        """Let the texts wait for the next pass; return what resolves to their vectors in their order.

        Too much text, a full queue, a failing encoder or a stop raises :class:`ProblemError`, here or from
        the future. Texts that no request waits for any more are not encoded.
        """
        sizes = [len(text.encode(errors="replace")) for text in texts]
        if sum(sizes) > MAX_REQUEST_BYTES:
            raise Kind.INVALID_REQUEST(
                f"its texts may have {MAX_REQUEST_BYTES:,} bytes together; send several requests"
            )
        job = _Job(texts, sizes, kind)
        with self._condition:
            if self._is_stopping:
                raise Kind.STOPPING()
            # What is larger than the queue is let in where nothing waits, or it never would be.
            if self._waiting_bytes and self._waiting_bytes + sum(sizes) > MAX_WAITING_BYTES:
                raise Kind.OVERLOADED("the encoder's queue is full")
            self._waiting_bytes += sum(sizes)
            self._jobs.append(job)
            self._condition.notify()
        return job.future

    def stop(self) -> None:
        """End the thread after its pass; what still waits fails as stopping."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        self._thread.join(STOP_SECONDS)

    def retire(self) -> None:
        """End the thread, and let go of the encoder, once everything that waits is done."""
        with self._condition:
            self._is_retired = True
            self._condition.notify()

    def _work(self) -> None:
        if self._on_start is not None:
            self._on_start()
        while taken := self._wait():
            self._encode(taken)
        while self._jobs:
            self._finish(self._jobs.popleft(), Kind.STOPPING())

    def _wait(self) -> list[tuple[_Job, str]]:
        """Return the texts of the next pass, nothing when the queue stops."""
        with self._condition:
            while not self._is_stopping:
                if (taken := self._take()) or self._is_retired:
                    return taken
                self._condition.wait()
        return []

    def _take(self) -> list[tuple[_Job, str]]:
        """Take a text of each request of one kind in turn, until the pass is full; one at least."""
        taken: list[tuple[_Job, str]] = []
        left: list[_Job] = []
        kind, num_bytes = None, 0
        while self._jobs:
            job = self._jobs.popleft()
            if job.is_over or job.future.cancelled():
                self._waiting_bytes -= sum(job.sizes[job.num_taken :])
                continue
            size = job.sizes[job.num_taken]
            if taken and (job.kind != kind or num_bytes + size > MAX_PASS_BYTES):
                left.append(job)
                continue
            taken.append((job, job.texts[job.num_taken]))
            kind = job.kind
            num_bytes += size
            self._waiting_bytes -= size
            job.num_taken += 1
            if job.num_taken < len(job.texts):
                self._jobs.append(job)
        self._jobs.extend(left)
        return taken

    def _encode(self, taken: Sequence[tuple[_Job, str]]) -> None:
        started_seconds = time.perf_counter()
        outcomes = self._outcomes([text for _, text in taken], taken[0][0].kind)
        self._observe(len(taken), time.perf_counter() - started_seconds)
        for (job, _), outcome in zip(taken, outcomes, strict=True):
            if not job.is_over and not isinstance(outcome, ProblemError):
                job.rows.append(outcome)
                outcome = _joined(job.rows) if len(job.rows) == len(job.texts) else None
            if not job.is_over and outcome is not None:
                self._finish(job, outcome)

    def _outcomes(self, texts: Sequence[str], kind: TextKind) -> Sequence[Vectors | ProblemError]:
        """Return each text's vectors or problem; where the encoder fails in any way, each is tried alone."""
        try:
            encoded = self._encoded(list(texts), kind)
            vectors = encoded.vectors_QV if isinstance(encoded, EncodedQueries) else encoded
            if vectors.shape == (len(texts), self.encoder.vector_dim) and np.isfinite(vectors).all():
                return list(encoded) if isinstance(encoded, np.ndarray) else encoded.split()
            fault = "vectors-not-finite"
        except (EndpointDownError, FingerprintMismatchError) as error:
            log.error("serve.endpoint_failed texts=%d sentence=%s", len(texts), error)  # noqa: TRY400 - it says it
            return [search_problem(error)] * len(texts)
        except BaseException as error:  # noqa: BLE001 - a model may raise anything, a tokenizer's panic too
            fault = type(error).__name__  # its message may hold text
        log.error("serve.encoder_failed texts=%d error=%s", len(texts), fault)
        if len(texts) > 1:
            return [self._outcomes([text], kind)[0] for text in texts]
        return [Kind.ENCODER_FAILED("the model gave no vector; the server's log says more")]

    def _encoded(self, texts: list[str], kind: TextKind) -> Vectors:
        if kind == "search":
            return encode_for_search(self.encoder, texts)
        return self.encoder.encode_queries(texts) if kind == "query" else self.encoder.encode_documents(texts)

    def _finish(self, job: _Job, outcome: Vectors | ProblemError) -> None:
        job.is_over = True
        if not job.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, ProblemError):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)


def _joined(rows: Sequence[Vectors]) -> Vectors:
    """Return the vectors of a request's texts, of which there is one each."""
    parts = [row for row in rows if isinstance(row, EncodedQueries)]
    if parts:
        return EncodedQueries.joined(parts)
    return np.stack([row for row in rows if isinstance(row, np.ndarray)])
