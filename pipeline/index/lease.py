"""The writer's lease on a collection in an object store: an object that names the holder and the time.

No kernel drops it with its holder, so it expires, and a holder renews it in time. It saves two writers from
doing the same work, and nothing else hangs on it: what is served changes by a swap that only one writer can
win, whatever its clock and its lease say.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from cairn.pipeline.errors import CollectionBusyError, TryAgainError
from cairn.pipeline.index.object_folder import ObjectFolder, StoredObject

LEASE_KEY: Final = "LEASE"
LEASE_SECONDS: Final = 60.0
"""How long others wait for a writer that was killed."""
RENEWALS: Final = 3
"""Times a lease is renewed before it would expire."""


class Lease:
    """A lease on one collection, held inside ``with``."""

    def __init__(self, store: ObjectFolder, name: str) -> None:
        self._store = store
        self._name = name
        self._token = secrets.token_hex(8)

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Hold the lease during the block; raise :class:`CollectionBusyError` where another writer does."""
        self._acquire()
        released = threading.Event()
        renewing = threading.Thread(target=self._renew, args=[released], name="cairn-lease", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            released.set()
            renewing.join()
            self._release()

    def is_held(self) -> bool:
        """Tell whether a writer holds the lease now."""
        holder = _holder(self._store.read(LEASE_KEY))
        return holder is not None and datetime.now(UTC) < holder[1]

    def _acquire(self) -> None:
        found = self._store.read(LEASE_KEY)
        holder = _holder(found)
        if holder is not None and datetime.now(UTC) < holder[1]:
            raise CollectionBusyError(
                f"collection {self._name!r} is being written by another run ({holder[0]}); try again "
                "when it has finished, "
                f"or after {holder[1]:%H:%M:%S} UTC should it have been killed"
            )
        try:
            is_mine, unsure = self._store.swap(LEASE_KEY, self._content(), found and found.e_tag), None
        except TryAgainError as error:
            is_mine, unsure = False, error
        if not is_mine and self._own() is None:  # a reply may be lost, and the write repeated on the way
            raise unsure or CollectionBusyError(
                f"collection {self._name!r} is being written by another run; try again when it has finished"
            )

    def _content(self) -> bytes:
        until = datetime.now(UTC) + timedelta(seconds=LEASE_SECONDS)
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        return json.dumps({"token": self._token, "holder": holder, "until": until.isoformat()}).encode()

    def _own(self) -> StoredObject | None:
        found = self._store.read(LEASE_KEY)
        return found if found is not None and self._token.encode() in found.content else None

    def _renew(self, released: threading.Event) -> None:
        while not released.wait(LEASE_SECONDS / RENEWALS):
            with contextlib.suppress(
                TryAgainError
            ):  # the next renewal may get through; should none, others may write, and one of us wins
                own = self._own()
                if own is None or not self._store.swap(LEASE_KEY, self._content(), own.e_tag):
                    return

    def _release(self) -> None:
        with contextlib.suppress(TryAgainError):  # it expires
            if self._own() is not None:
                self._store.delete([LEASE_KEY])


def _holder(found: StoredObject | None) -> tuple[str, datetime] | None:
    try:
        content: Any = json.loads(found.content) if found else None
        return (str(content["holder"]), datetime.fromisoformat(content["until"])) if content else None
    except (ValueError, TypeError, KeyError):
        return None
