"""The generation a searcher answers from: the newest that is whole.

A new generation is opened when ``CURRENT`` changes; the old one stays if the new one is damaged. A generation
that is damaged while it is served is replaced within the call that notices; what is known to be damaged is
not read, though much of it may be whole. A search takes one generation and keeps it until its answer is
complete; an old generation is closed after the last search that uses it. Checking for a publication costs one
``stat``. A damaged generation is tried again at most every :data:`RETRY_SECONDS`. For a collection in an
object store, a thread keeps this machine's copy up to date.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from cairn.pipeline.config import NO_MODEL
from cairn.pipeline.errors import (
    CairnError,
    FingerprintMismatchError,
    IntegrityError,
    PartitionsMissingError,
    StorageError,
)
from cairn.pipeline.index.files import use_lance
from cairn.pipeline.index.generation import (
    Generation,
    OpenOne,
    open_generation,
    open_latest_intact_generation,
)
from cairn.pipeline.index.layout import Checks, CollectionLayout
from cairn.pipeline.index.replica import REFRESH_SECONDS, note_outage
from cairn.pipeline.search.reader import IndexReader, LocalReader
from cairn.pipeline.search.shards.sharded_generation import ShardedGeneration
from cairn.pipeline.search.shards.sharded_reader import ShardedReader
from cairn.pipeline.types import QueryEncoder

log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""A repair in place leaves ``CURRENT`` as it is; until it is noticed the older generation serves."""

Stamp = tuple[int, int, int]
LoadEncoder = Callable[[Generation], QueryEncoder]
_Answer = TypeVar("_Answer")
_Asked = ParamSpec("_Asked")


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A generation with the encoder that made it and what reads its segments.

    ``timeout`` bounds reading a filter's documents.
    """

    generation: Generation
    encoder: QueryEncoder
    reader: IndexReader
    timeout: dt.timedelta | None = None

    @property
    def encodes_no_queries(self) -> bool:
        """Tell whether documents brought their vectors, and texts are ranked by words alone."""
        return self.generation.manifest.settings["encoder"]["model"] == NO_MODEL

    def reachable(self) -> Served:
        """Return it without what lies on shards that do not answer now."""
        whole = self.generation
        left = whole.reachable() if isinstance(whole, ShardedGeneration) else whole
        return self if left is whole else replace(self, generation=left, reader=_reader_of(left))


def of_whole(
    method: Callable[Concatenate[Any, Served, _Asked], _Answer],
) -> Callable[Concatenate[Any, _Asked], _Answer]:
    """Hand a method the newest whole generation, which it takes behind ``self``.

    Where it meets damage and another generation is whole, it is handed that one: the one place where a call
    falls back.
    """

    @wraps(method)
    def reading(own: ServedGeneration, *args: _Asked.args, **named: _Asked.kwargs) -> _Answer:
        served = own.take()
        try:
            return method(own, served, *args, **named)
        except PartitionsMissingError:
            raise
        except (IntegrityError, StorageError):
            if not own.is_replaced(served.generation):
                raise
            return method(own, own.take(), *args, **named)

    return reading


class ServedGeneration:
    """Hands out the newest intact generation, with the encoder that made it.

    ``timeout_seconds`` bounds reading a filter's documents. ``verify`` hashes every file when it is opened
    first, also those that this machine has hashed before. ``encoder`` is the one encoder there is, or loads
    that of a generation; ``open_one`` opens a generation elsewhere than here, and raises
    :class:`StorageError` where the one before is to be served on. Safe to ask from several threads.
    """

    def __init__(
        self,
        layout: CollectionLayout,
        encoder: QueryEncoder | LoadEncoder,
        open_one: OpenOne | None = None,
        *,
        timeout_seconds: float | None = None,
        verify: bool = False,
    ) -> None:
        layout.require_exists()
        self._layout = layout
        self._current_path = layout.current_path
        self._timeout = None if timeout_seconds is None else dt.timedelta(seconds=timeout_seconds)
        self._load_encoder = (lambda _: encoder) if isinstance(encoder, QueryEncoder) else encoder
        self._lock, self._look_lock = threading.Lock(), threading.Lock()
        self._look_at = 0.0
        self._stamp = self._read_stamp()
        self._open_one = open_one
        generation = open_latest_intact_generation(layout, Checks(verify=verify), open_one)
        loaded = self._load_encoder(generation)
        require_encoder(generation, loaded)
        self._served = Served(generation, loaded, _reader_of(generation), self._timeout)
        self._describe(generation)
        self._refusal: FingerprintMismatchError | None = None
        self._damage: IntegrityError | None = None
        self._damaged_files: frozenset[str] = frozenset()
        """Files of Lance that were found damaged: hashed before a generation with one is served again."""
        if layout.replica is not None:
            threading.Thread(
                target=_follow, args=[weakref.ref(self), layout], name="cairn-follow", daemon=True
            ).start()

    @property
    def generation(self) -> Generation:
        """The generation that the next call would answer from, where it has all its partitions."""
        found = self.take().generation
        found.require_all()
        return found

    @property
    def last_generation(self) -> Generation:
        """The generation that answered last, without a look at what has become of it."""
        return self._served.generation

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know.

        A sentence while an older generation than the published one is served or files of this one are
        damaged, nothing when all is well.
        """
        return () if self._warning is None else (self._warning,)

    @property
    def is_answering(self) -> bool:
        """Tell whether calls are answered: not where all generations are damaged, or lack partitions."""
        return self._damage is None and not self.last_generation.missing

    @of_whole
    def reading(
        self,
        served: Served,
        read: Callable[Concatenate[Served, _Asked], _Answer],
        *args: _Asked.args,
        **named: _Asked.kwargs,
    ) -> _Answer:
        """Return what ``read`` reads of the newest whole generation, and is asked for.

        Where that lacks partitions, :class:`PartitionsMissingError` is raised.
        """
        served.generation.require_all()
        return read(served, *args, **named)

    def take(self) -> Served:
        """Return the generation to answer one call from; a newly published one is taken up.

        While one thread opens a new generation, the others go on with the old one, or wait where its tables
        went away with it. A new generation made by another encoder than there is raises
        :class:`FingerprintMismatchError`.
        """
        use_lance()
        if self._is_due() and self._lock.acquire(blocking=not self.last_generation.folder.exists()):
            try:
                if self._is_due():
                    self._take_up()
            finally:
                self._lock.release()
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        served, damage = self._served, self._damage
        if damage is None:
            try:
                served.generation.require_whole()
            except IntegrityError as error:
                damage = error
            else:
                return served
        return self._fall_back(served.generation, damage)

    def is_replaced(self, failed: Generation) -> bool:
        """Look for a publication or damage after a read failed; tell whether another generation answers now.

        Hashes what the failed one reads of Lance, at most every :data:`RETRY_SECONDS`. Raises the
        :class:`IntegrityError` of damage that leaves no generation to answer.
        """
        with contextlib.suppress(CairnError):
            self.take()
        with self._look_lock:
            if self.last_generation is failed and self._damage is None and time.monotonic() >= self._look_at:
                self._look_at = self._next_retry()
                error = failed.damage_of_rows()
                if error is not None:
                    with contextlib.suppress(IntegrityError):
                        self._fall_back(failed, error)
        if self.last_generation is failed and self._damage is not None:
            raise self._damage.with_traceback(None)
        return self.last_generation is not failed

    def _fall_back(self, damaged: Generation, error: IntegrityError) -> Served:
        """Serve the newest whole generation in the place of one that was damaged while it was served.

        Where there is none, ``error`` is raised, and files are looked at again every :data:`RETRY_SECONDS`.
        """
        with self._lock:
            is_due = self._damage is None or self._retry_at is None or time.monotonic() >= self._retry_at
            if self.last_generation is damaged and is_due:
                self._damaged_files |= {name for each in damaged.lance_files for name in each.damaged}
                try:
                    checks = Checks(suspects=self._damaged_files)
                    opened = open_latest_intact_generation(self._layout, checks, self._open_one)
                    self._serve(opened)
                except (IntegrityError, StorageError):
                    self._damage, self._retry_at = error, self._next_retry()
                    raise error from None
                log.warning(
                    "search.fell_back collection=%s damaged=%d generation=%d",
                    self._layout.name,
                    damaged.number,
                    opened.number,
                )
        served = self._served
        if served.generation is damaged:
            raise error
        return served

    def _is_due(self) -> bool:
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            return True
        return self._read_stamp() != self._stamp

    def _take_up(self) -> None:
        stamp = self._read_stamp()
        generation = self.last_generation
        try:
            checks = Checks(suspects=self._damaged_files)
            opened = open_generation(self._layout, checks=checks, open_one=self._open_one)
            self._serve(opened)
        except (IntegrityError, StorageError) as error:
            self.is_outdated = self._is_behind(generation)
            self._warning = (
                f"generation {generation.number} is still served, the published one is not: {error}"
            )
            self._retry_at = self._next_retry()
            self._stamp = stamp
            log.warning("search.take_up_failed collection=%s served=%d", self._layout.name, generation.number)
            return
        self._stamp, self._damaged_files = stamp, frozenset()
        log.info("search.taken_up collection=%s generation=%d", self._layout.name, opened.number)

    def _serve(self, opened: Generation) -> None:
        """Answer from a generation with its encoder; where that is not there, every call is refused."""
        encoder = self._served.encoder
        try:
            if encoder.fingerprint != opened.manifest.fingerprints["encoder"]:
                encoder = self._load_encoder(opened)
            require_encoder(opened, encoder)
        except FingerprintMismatchError as error:
            self._refusal = error
        else:
            self._served = Served(opened, encoder, _reader_of(opened), self._timeout)
            self._refusal = None
        self._damage = None
        self._describe(opened)

    def _describe(self, opened: Generation) -> None:
        """Note what the user should know of a generation, and when to look for a better one."""
        self._warning: str | None = opened.warning
        self.is_outdated = self._is_behind(opened)
        self._retry_at = None if opened.warning is None else self._next_retry()

    def _is_behind(self, generation: Generation) -> bool:
        try:
            return self._layout.current_generation_number() not in (None, generation.number)
        except IntegrityError:  # what was published cannot be told
            return False

    def _read_stamp(self) -> Stamp | None:
        try:
            found = self._current_path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    @staticmethod
    def _next_retry() -> float:
        return time.monotonic() + RETRY_SECONDS


def _reader_of(generation: Generation) -> IndexReader:
    return ShardedReader(generation) if isinstance(generation, ShardedGeneration) else LocalReader(generation)


def require_encoder(generation: Generation, encoder: QueryEncoder) -> None:
    """Raise :class:`FingerprintMismatchError` unless this encoder made the generation."""
    expected = generation.manifest.fingerprints["encoder"]
    if encoder.fingerprint != expected:
        raise FingerprintMismatchError(
            f"the query encoder must be the one collection {generation.layout.name!r} was built with "
            f"({expected[:12]}…), got {encoder.fingerprint[:12]}…; open the collection with its own model "
            "and settings, or build it again"
        )


def _follow(served: weakref.ref[ServedGeneration], layout: CollectionLayout) -> None:
    """Keep a copy up to date while it is being searched; failures are noted as outages of its store."""
    while served() is not None:
        time.sleep(REFRESH_SECONDS)
        try:
            layout.refresh()
        except CairnError as error:
            note_outage(layout.replica.uri if layout.replica else layout.name, error)
