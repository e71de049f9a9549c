"""The generation a searcher answers from: the newest that is whole.

A new generation is opened when ``CURRENT`` changes; the old one stays if the new one is damaged. A generation
that is damaged while it is served is replaced within the call that notices. A search takes one generation and
keeps it until its answer is complete; an old generation is closed after the last search that uses it.
Checking for a publication costs one ``stat``. A damaged generation is tried again at most every
:data:`RETRY_SECONDS`. For a collection in an object store, a thread keeps this machine's copy up to date.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

from pipeline.errors import CairnError, FingerprintMismatchError, IntegrityError, StorageError
from pipeline.index.generation import Generation, open_generation, open_latest_intact_generation
from pipeline.index.layout import CollectionLayout
from pipeline.index.replica import REFRESH_SECONDS
from pipeline.types import QueryEncoder

log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""A repair in place leaves ``CURRENT`` as it is; until it is noticed the older generation serves."""

Stamp = tuple[int, int, int]
LoadEncoder = Callable[[Generation], QueryEncoder]


class ServedGeneration:
    """Hands out the newest intact generation, with the encoder that made it.

    ``encoder`` is the one encoder there is, or loads that of a generation. Safe to ask from several threads.
    """

    def __init__(self, layout: CollectionLayout, encoder: QueryEncoder | LoadEncoder) -> None:
        layout.require_exists()
        self._layout = layout
        self._load_encoder = (lambda _: encoder) if isinstance(encoder, QueryEncoder) else encoder
        self._lock = threading.Lock()
        self._stamp = self._read_stamp()
        generation = open_latest_intact_generation(layout)
        self._served = generation, self._load_encoder(generation)
        require_encoder(*self._served)
        self._warning = generation.warning
        self._retry_at = self._next_retry() if self._warning else None
        self._refusal: FingerprintMismatchError | None = None
        self._damage: IntegrityError | None = None
        if layout.replica is not None:
            threading.Thread(
                target=_follow, args=[weakref.ref(self), layout], name="cairn-follow", daemon=True
            ).start()

    @property
    def warning(self) -> str | None:
        """A sentence for the user while an older generation is served than was published."""
        return self._warning

    @property
    def damage(self) -> IntegrityError | None:
        """What keeps every call from being answered: the generation was damaged, and no other is whole."""
        return self._damage

    def take(self) -> tuple[Generation, QueryEncoder]:
        """Return the generation to answer one call from, and its encoder; a newly published one is taken up.

        While one thread opens a new generation, the others go on with the old one, or wait where its tables
        went away with it. A new generation made by another encoder than there is raises
        :class:`FingerprintMismatchError`.
        """
        if self._is_due() and self._lock.acquire(blocking=not self._served[0].folder.exists()):
            try:
                if self._is_due():
                    self._take_up()
            finally:
                self._lock.release()
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        served = self._served
        try:
            served[0].require_whole()
        except IntegrityError as error:
            return self._fall_back(served[0], error)
        return served

    def _fall_back(self, damaged: Generation, error: IntegrityError) -> tuple[Generation, QueryEncoder]:
        """Serve the newest whole generation in the place of one that was damaged while it was served.

        Where there is none, ``error`` is raised, and files are looked at again every :data:`RETRY_SECONDS`.
        """
        with self._lock:
            if self._served[0] is damaged and (self._retry_at is None or time.monotonic() >= self._retry_at):
                self._retry_at = self._next_retry()
                try:
                    opened = open_latest_intact_generation(self._layout)
                except (IntegrityError, StorageError):
                    self._damage = error
                    raise error from None
                self._serve(opened)
                self._retry_at = self._next_retry() if opened.warning else None
                log.warning(
                    "search.fell_back collection=%s damaged=%d generation=%d",
                    self._layout.name,
                    damaged.number,
                    opened.number,
                )
        served = self._served
        if served[0] is damaged:
            raise error
        return served

    def _is_due(self) -> bool:
        return self._read_stamp() != self._stamp or (
            self._retry_at is not None and time.monotonic() >= self._retry_at
        )

    def _take_up(self) -> None:
        stamp = self._read_stamp()
        generation = self._served[0]
        try:
            opened = open_generation(self._layout)
        except (IntegrityError, StorageError) as error:
            self._warning = (
                f"generation {generation.number} is still served, the published one is not: {error}"
            )
            self._retry_at = self._next_retry()
            self._stamp = stamp
            log.warning("search.take_up_failed collection=%s served=%d", self._layout.name, generation.number)
            return
        self._serve(opened)
        self._retry_at, self._stamp = None, stamp
        log.info("search.taken_up collection=%s generation=%d", self._layout.name, opened.number)

    def _serve(self, opened: Generation) -> None:
        """Answer from a generation with its encoder; where that is not there, every call is refused."""
        encoder = self._served[1]
        try:
            if encoder.fingerprint != opened.manifest.fingerprints["encoder"]:
                encoder = self._load_encoder(opened)
            require_encoder(opened, encoder)
        except FingerprintMismatchError as error:
            self._refusal = error
        else:
            self._served, self._refusal = (opened, encoder), None
        self._warning, self._damage = opened.warning, None

    def _read_stamp(self) -> Stamp | None:
        try:
            found = self._layout.current_path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    @staticmethod
    def _next_retry() -> float:
        return time.monotonic() + RETRY_SECONDS


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
    """Keep a copy up to date while it is being searched."""
    while served() is not None:
        time.sleep(REFRESH_SECONDS)
        try:
            layout.refresh()
        except CairnError as error:
            log.warning("search.not_followed collection=%s error=%s", layout.name, error)
