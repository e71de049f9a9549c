"""Partitions published on a Ray cluster, each by a worker without a model, as one process publishes it.

A worker that sees the driver's folder publishes there. Another says so. Of a collection in an object store it
is then handed the encoded shards by the store, publishes in its own copy of the partition, uploads it, and
answers with what the collection is to name. Where machines have no such store in common, the driver publishes
the partition.

A worker that was believed dead may wake when another has done its task: it changes nothing in the driver's
folder once that has removed the mark, and the driver looks at each partition after that. What such a worker
uploads no one names.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from cairn.jobs.ray_cluster.pool import WorkerPool
from cairn.pipeline.durable import is_locked, remove_entry, storage_errors
from cairn.pipeline.errors import CairnError, DiskFullError
from cairn.pipeline.index.layout import CollectionLayout, read_manifest
from cairn.pipeline.index.names import cache_folder
from cairn.pipeline.index.object_folder import TRANSFERS, ObjectFolder
from cairn.pipeline.index.partitions import ChangePartition
from cairn.pipeline.index.recovery import prepare_writer
from cairn.pipeline.index.replica import Replica
from cairn.pipeline.manifest import MANIFEST_NAME, FileRecord, PartitionRecord, record_file

log = logging.getLogger(__name__)

TASK_DEADLINE_SECONDS: Final = 14_400.0
"""What one task took says nothing of the next; a worker that dies is noticed at once in any case."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Files of the driver's folder in the store of the collection, by their paths there.

    One that a killed driver leaves is swept with old files of no generation.
    """

    uri: str
    prefix: str
    records: Mapping[str, FileRecord]

    @classmethod
    def upload(cls, task: ChangePartition) -> HandedOver:
        """Upload what a change reads beside its partition."""
        whole, mark = task.layout.whole, task.mark
        assert whole is not None
        assert whole.replica is not None
        assert mark is not None
        handed = cls(
            whole.replica.uri,
            f"files/{mark.stem}",
            {path.relative_to(whole.folder).as_posix(): record_file(path) for path in task.files},
        )
        with storage_errors(f"uploading to {handed.uri}"):
            handed._each(lambda store, key, path: store.write(key, whole.folder / path))
        return handed

    def download(self, folder: Path) -> None:
        """Write the files to the same paths below a folder."""
        self._each(lambda store, key, path: store.download(key, folder / path, self.records[path]))

    def remove(self) -> None:
        """Remove the files from the store."""
        with suppress(CairnError):  # they are swept later
            ObjectFolder(self.uri).delete(f"{self.prefix}/{path}" for path in self.records)

    def _each(self, do: Callable[[ObjectFolder, str, str], object]) -> None:
        store = ObjectFolder(self.uri)
        with ThreadPoolExecutor(TRANSFERS) as pool:
            list(pool.map(lambda path: do(store, f"{self.prefix}/{path}", path), self.records))


def _copies_folder(handed: HandedOver) -> Path:
    """Return where this machine has its copies of a collection's partitions."""
    return cache_folder() / "workers" / handed.uri.removeprefix("s3://")


def publish_elsewhere(task: ChangePartition, handed: HandedOver) -> PartitionRecord:
    """Publish a partition in this machine's own copy of it, and upload that."""
    whole = task.layout.whole
    assert whole is not None
    folder = _copies_folder(handed)
    copy = CollectionLayout(folder / task.record.name, whole.name)
    replica = Replica(handed.uri, copy.folder, task.part)
    copy = replace(copy, replica=replica)
    with copy.copy_lock():
        if not task.record.generation:  # what stands here is of a collection that was removed
            for entry in set(copy.folder.iterdir()) - {copy.lock_path}:
                remove_entry(entry)
        replica.pull()
        number = copy.current_generation_number()
        if number:
            _drop_copies(folder, whole.name, read_manifest(copy, number).partitions)
        handed.download(copy.folder)
        record = replace(task, layout=copy.partition(task.record), mark=None).run()
        replica.upload(record)
        remove_entry(copy.pending_folder)
    return record


def _drop_copies(folder: Path, name: str, records: Sequence[PartitionRecord]) -> None:
    """Remove copies of partitions that another machine has published since, or that are no more.

    So all machines together hold one copy of each, whichever worker gets its next task.
    """
    newest = {record.name: record for record in records}
    for entry in list(folder.iterdir()):
        copy = CollectionLayout(entry, name)
        record = newest.get(entry.name, PartitionRecord(name=entry.name))
        manifest = copy.partition(record).generation_folder(record.generation) / MANIFEST_NAME
        is_newest = manifest.is_file() and record_file(manifest).sha256 == record.sha256
        if not is_newest and not is_locked(copy.lock_path):
            gone = entry.with_name(f".{entry.name}.{os.getpid()}")
            with suppress(OSError):  # another worker may be removing it
                entry.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


class TaskWorker:
    """Runs tasks in a process of a cluster."""

    def load(self) -> str:
        """Return the version of Cairn, which must be the driver's workers' all."""
        return version("cairn-index")

    def run(self, task: ChangePartition, handed: HandedOver | None) -> bool | str | PartitionRecord:
        """Publish a partition: True in the driver's folder, a record elsewhere, False nowhere.

        A sentence says that it does not fit on this machine, and nothing of it is left here.
        """
        assert task.mark is not None, "a driver leaves one"
        if task.mark.is_file():
            task.run()
            return True
        if handed is None:
            return False
        try:
            return publish_elsewhere(task, handed)
        except DiskFullError as error:
            shutil.rmtree(_copies_folder(handed) / task.record.name, ignore_errors=True)
            return f"on a worker's machine, {error}"


class TaskPool:
    """Task workers of a cluster, started with the first tasks; a :data:`RunTasks`."""

    def __init__(self, ray: Any, max_workers: int, worker_cpus: int) -> None:
        self._pool = WorkerPool(
            ray,
            TaskWorker,
            (),
            {"num_cpus": worker_cpus},
            min_workers=1,
            max_workers=max_workers,
            deadline_seconds=TASK_DEADLINE_SECONDS,
        )
        self._pool.step("load")

    def __call__(self, tasks: Sequence[ChangePartition], folder: Path) -> list[PartitionRecord]:
        """See :data:`cairn.pipeline.index.partitions.RunTasks`."""
        mark = _leave_mark(folder)
        marked = [replace(task, mark=mark) for task in tasks]
        whole = tasks[0].layout.whole
        is_in_store = whole is not None and whole.replica is not None
        is_unseen = False
        handed: dict[int, HandedOver] = {}
        answers: dict[int, bool | str | PartitionRecord] = {}

        def sent(number: int) -> tuple[ChangePartition, HandedOver | None]:
            if is_unseen and number not in handed:
                handed[number] = HandedOver.upload(marked[number])
            return marked[number], handed.get(number)

        def goes_again(answer: bool | str | PartitionRecord) -> bool:
            nonlocal is_unseen  # by a machine without the folder: from here on all are sent with their files
            is_unseen = is_unseen or (answer is False and is_in_store)
            return answer is False and is_in_store

        try:
            answers.update(self._pool.map("run", sent, [1] * len(tasks), goes_again))
        except CairnError as error:
            log.warning("tasks.given_up: workers did not do them, done here: %s", error)
            self._pool.close()
        mark.unlink(missing_ok=True)
        for each in handed.values():
            each.remove()
        return [self._outcome(task, answers.get(number, False)) for number, task in enumerate(tasks)]

    @staticmethod
    def _outcome(task: ChangePartition, answer: bool | str | PartitionRecord) -> PartitionRecord:
        """Return what has become of a partition, and publish it where nothing has."""
        if isinstance(answer, PartitionRecord):
            with task.layout.writer_lock():
                prepare_writer(task.layout)  # nothing that was killed here is in the way of a copy of it
            return answer
        if answer is not True:
            reason = answer or "no disk or store in common, or no worker"
            log.info("task.done_here partition=%s: %s", task.layout.name, reason)
        return (answer is True and task.outcome()) or task.run()

    def close(self) -> None:
        """Stop all workers."""
        self._pool.close()


def _leave_mark(folder: Path) -> Path:
    """Leave a file to know the folder by, and no other: workers of a killed driver find theirs no more."""
    mark = folder.absolute() / f"{uuid.uuid4().hex}.mark"
    with storage_errors("preparing the folder that workers may share"):
        for older in folder.glob("*.mark"):
            older.unlink()
        mark.touch()
    return mark
