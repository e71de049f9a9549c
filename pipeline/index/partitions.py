"""The partitions of a collection: ordinary folders of rows, each of which has the documents of some ids.

    change of some partitions ─▶ each published in its own folder ─▶ the collection's manifest moves, last

In an object store a worker on another machine has a copy of that partition alone: it uploads what it has
published there, and the driver names it.

A partition has no ``CURRENT``: the collection's manifest says which of its generations is served. So until
that manifest moves nothing has changed for anyone, however many partitions have published; the next writer of
such a partition removes what was never named. A partition keeps its generation before the newest, which is
the one that readers have meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from cairn.pipeline.durable import commit_point
from cairn.pipeline.errors import CollectionBusyError
from cairn.pipeline.index.layout import CollectionLayout, read_manifest
from cairn.pipeline.index.names import partition_of
from cairn.pipeline.index.publish import GenerationFacts, publish_partitions
from cairn.pipeline.index.recovery import prepare_writer
from cairn.pipeline.manifest import Manifest, PartitionRecord
from cairn.pipeline.types import ProgressListener, silent_progress

Change = Callable[[CollectionLayout, Any, ProgressListener], Manifest]
"""Publishes a generation of a partition upon the one that the collection names, a manifest, or None."""


def new_records(num_partitions: int, generation: int) -> tuple[PartitionRecord, ...]:
    """Return partitions that have no rows yet, named after the generation that is to have them first."""
    return tuple(PartitionRecord(name=f"{generation:08d}-{number:04d}") for number in range(num_partitions))


def by_partition(doc_ids: Iterable[str], num_partitions: int) -> dict[int, list[str]]:
    """Return ids by their partition, of those that have some."""
    placed: dict[int, list[str]] = {}
    for doc_id in doc_ids:
        placed.setdefault(partition_of(doc_id, num_partitions), []).append(doc_id)
    return placed


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangePartition:
    """A change of the partition in ``layout``; ``record`` is what the collection names of it.

    In another process it is only made while the file ``mark`` stands, which the driver left there. ``files``
    of the collection's folder are read for it. ``part`` is its place among the partitions that have rows.
    """

    layout: CollectionLayout
    record: PartitionRecord
    change: Change
    part: range
    files: Sequence[Path] = ()
    progress: ProgressListener = silent_progress
    mark: Path | None = None

    def run(self) -> PartitionRecord:
        """Publish it under the partition's lock.

        What a killed run published there, and the collection never came to name, is undone first.
        """
        layout = self.layout
        with layout.writer_lock():
            self._require_named()
            manifest = self.change(layout, prepare_writer(layout), self.progress)
        commit_point("partition-published")
        return layout.record(manifest.generation)

    def outcome(self) -> PartitionRecord | None:
        """Return what workers have made of the partition, None where it is as it was; none may work now."""
        with self.layout.writer_lock():
            number = self.record.generation + 1
            return self.layout.record(number) if number in self.layout.generation_numbers() else None

    def _require_named(self) -> None:
        """Refuse a change that comes too late: another worker has made it, or the collection has moved on."""
        if self.mark is not None and not self.mark.is_file():
            raise CollectionBusyError(
                f"the change of partition {self.record.name} was given up; run it again"
            )
        whole = self.layout.whole
        assert whole is not None, "a partition is one of a collection"
        number = whole.current_generation_number()
        records = () if number is None else read_manifest(whole, number).partitions
        unnamed = PartitionRecord(name=self.record.name)
        if next((each for each in records if each.name == self.record.name), unnamed) != self.record:
            raise CollectionBusyError(
                f"partition {self.record.name} of collection {whole.name!r} was changed by another run "
                "meanwhile; run the same command again"
            )


RunTasks = Callable[[Sequence[ChangePartition], Path], Sequence[PartitionRecord]]
"""Run changes in other processes and return their answers in order.

The folder lies on the file system of the collection: a process that does not see it can run none.
"""


def change_collection(
    layout: CollectionLayout,
    records: Sequence[PartitionRecord],
    changes: Mapping[int, Change],
    facts: GenerationFacts,
    progress: ProgressListener = silent_progress,
    run_tasks: RunTasks | None = None,
    files: Mapping[int, Sequence[Path]] | None = None,
    *,
    refills: bool = False,
) -> Manifest:
    """Change some partitions, then publish them as one; the caller holds the lock of the collection.

    One after another in this process, or with ``run_tasks`` each in a process of its own. ``files`` of the
    collection's folder are what a change reads beside its partition. A change that ``refills`` has read its
    sources: a partition that was lost is then no longer.
    """
    places = [*accumulate((bool(record.generation) for record in records), initial=0)]
    tasks = [
        ChangePartition(
            layout=layout.partition(records[number]),
            record=records[number],
            change=change,
            part=range(*places[number : number + 2]),
            files=(files or {}).get(number, ()),
            progress=progress if run_tasks is None else silent_progress,
        )
        for number, change in changes.items()
    ]
    if run_tasks is None or len(tasks) < 2:
        changed = [task.run() for task in tasks]
    else:
        layout.partitions_folder.mkdir(exist_ok=True)
        changed = run_tasks(tasks, layout.pending_folder if layout.pending_folder.is_dir() else layout.folder)
    by_number = {
        number: replace(record, is_lost=records[number].is_lost and not refills)
        for number, record in zip(changes, changed, strict=True)
    }
    return publish_partitions(
        layout, [by_number.get(number, record) for number, record in enumerate(records)], facts, progress
    )
