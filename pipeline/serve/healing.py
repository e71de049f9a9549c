"""Damaged collections that a server mends by itself: where derived files are lost, and no row is.

A file that both kept generations share may be all that is damaged. It is then made again from the tables, as
``cairn repair`` does, and published; requests wait for it within their time. Nothing is given up here: lost
rows and older generations are for the keeper to decide on. Nor is a large collection mended, since that takes
memory and minutes of a process that serves others, nor one in an object store, nor one that is read-only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Final

from pipeline.errors import CairnError
from pipeline.index.layout import CollectionLayout
from pipeline.index.repair import repair_collection
from pipeline.index.stored_files import read_manifest

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 30.0
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
        not tried again for :data:`RETRY_SECONDS`.
        """
        task = self._tried.get(layout.name)
        if task is None or (task.done() and time.monotonic() >= self._retry_at[layout.name]):
            work = asyncio.to_thread(self._heal, layout, suspects)
            task = self._tried[layout.name] = asyncio.create_task(work)
        await asyncio.wait({task}, timeout=timeout_seconds)
        return task.done() and task.result()

    def _heal(self, layout: CollectionLayout, suspects: Collection[str]) -> bool:
        self._retry_at[layout.name] = time.monotonic() + RETRY_SECONDS
        try:
            number = None if layout.replica is not None else layout.current_generation_number()
            if number is None:
                return False
            files = read_manifest(layout, number).files.values()
            if sum(record.size_bytes for record in files) > MAX_BYTES:
                return False
            report = repair_collection(layout, keeps_all=True, suspects=suspects)
        except CairnError as error:
            log.warning("serve.not_healed collection=%s sentence=%s", layout.name, error)
            return False
        if not report.problems and report.generation == number:
            return False
        log.warning("serve.healed collection=%s action=%s", layout.name, report.action)
        self._retry_at[layout.name] = 0.0
        return True
