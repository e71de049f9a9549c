"""Damaged collections that a server mends by itself: where derived files are lost, and no row is.

A damaged file is made again from the tables, as ``cairn repair`` does, and published. Where an older
generation answers meanwhile, requests go on; where a file that both kept generations share is damaged, they
wait within their time. Nothing is given up here: lost rows and older generations are for the keeper to decide
on. Nor is a large collection mended, since that takes memory and minutes of a process that serves others, nor
one in an object store, nor one that is read-only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Final

from cairn.pipeline.errors import CairnError, TryAgainError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.repair import repair_collection
from cairn.pipeline.index.stored_files import read_manifest

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 30.0
KEEPER_SECONDS: Final = 600.0
"""Until another attempt where the first one found what the keeper has to decide on, or cannot write."""
MAX_BYTES: Final = 2**30
"""Size of the files of a generation up to which a server makes some of them again: some seconds' work."""


class Healer:
    """Mends collections, each on a thread of its own; used from one event loop."""

    def __init__(self) -> None:
        self._tried: dict[str, asyncio.Task[bool]] = {}
        self._retry_at: dict[str, float] = {}

    async def heal(self, layout: CollectionLayout, suspects: Collection[str], timeout_seconds: float) -> bool:
        """Mend a collection, tell whether that was done; concurrent callers share the work.

        ``suspects`` are files that another program is about to write into. What failed, or takes longer, is
        not tried again for :data:`RETRY_SECONDS`, or :data:`KEEPER_SECONDS` where that cannot help.
        """
        task = self.start(layout, suspects)
        await asyncio.wait({task}, timeout=timeout_seconds)
        return task.done() and task.result()

    def start(self, layout: CollectionLayout, suspects: Collection[str]) -> asyncio.Task[bool]:
        """Begin to mend a collection and return at once; see :meth:`heal`."""
        task = self._tried.get(layout.name)
        if task is None or (task.done() and time.monotonic() >= self._retry_at[layout.name]):
            work = asyncio.to_thread(self._heal, layout, suspects)
            task = self._tried[layout.name] = asyncio.create_task(work)
        return task

    def settle(self, name: str) -> None:
        """Note that a collection answers as it was published: what is damaged next was not tried before."""
        if name in self._retry_at:
            self._retry_at[name] = min(self._retry_at[name], time.monotonic() + RETRY_SECONDS)

    def _heal(self, layout: CollectionLayout, suspects: Collection[str]) -> bool:
        self._retry_at[layout.name] = time.monotonic() + RETRY_SECONDS
        try:
            action = _mend(layout, suspects)
        except CairnError as error:
            log.warning("serve.not_healed collection=%s sentence=%s", layout.name, error)
            if not isinstance(error, TryAgainError):
                self._retry_at[layout.name] = time.monotonic() + KEEPER_SECONDS
            return False
        except Exception:
            log.exception("serve.not_healed collection=%s", layout.name)
            return False
        if action is None:
            return False
        log.warning("serve.healed collection=%s action=%s", layout.name, action)
        self._retry_at[layout.name] = 0.0
        return True


def _mend(layout: CollectionLayout, suspects: Collection[str]) -> str | None:
    """Mend a collection; return what was done, None where nothing was.

    One that a server leaves to its keeper raises :class:`DamageError`.
    """
    if layout.replica is not None:
        raise layout.damaged("a server mends no collection in an object store")
    number = layout.current_generation_number()
    if number is None:
        return None
    files = read_manifest(layout, number).files.values()
    if sum(record.size_bytes for record in files) > MAX_BYTES:
        raise layout.damaged(f"generation {number} exceeds the {MAX_BYTES:,} bytes that a server mends")
    report = repair_collection(layout, keeps_all=True, suspects=suspects)
    return report.action if report.problems or report.generation != number else None
