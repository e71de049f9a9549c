"""Partitions published on a Ray cluster, each by a worker without a model, as one process publishes it.

A worker that does not see the root, since it is on a machine without that file system, says so, and the
driver publishes that partition itself. A worker that was believed dead may wake when another has done its
task: it changes nothing once the driver has removed the mark, and the driver looks at each partition after
that.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from cairn.jobs.ray_cluster.pool import WorkerPool
from cairn.pipeline.durable import storage_errors
from cairn.pipeline.errors import ClusterError
from cairn.pipeline.index.partitions import ChangePartition
from cairn.pipeline.manifest import PartitionRecord

log = logging.getLogger(__name__)

TASK_DEADLINE_SECONDS: Final = 14_400.0
"""What one task took says nothing of the next; a worker that dies is noticed at once in any case."""


class TaskWorker:
    """Runs tasks in a process of a cluster."""

    def load(self) -> str:
        """Return the version of Cairn, which must be the driver's workers' all."""
        return version("cairn-index")

    def run(self, task: ChangePartition) -> bool:
        """Publish a partition; False where the file that the driver left is not to be seen."""
        assert task.mark is not None, "a driver leaves one"
        is_seen = task.mark.is_file()
        if is_seen:
            task.run()
        return is_seen


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
        done: set[int] = set()
        try:
            mapped = self._pool.map(
                "run", lambda number: (replace(tasks[number], mark=mark),), [1] * len(tasks)
            )
            done.update(number for number, is_done in mapped if is_done)
        except ClusterError as error:
            log.warning("tasks.given_up: workers did not do them, done here: %s", error)
            self._pool.close()
        mark.unlink(missing_ok=True)
        if len(done) < len(tasks):
            log.info("tasks.done_here tasks=%d: no disk in common, or no worker", len(tasks) - len(done))
        return [(number in done and task.outcome()) or task.run() for number, task in enumerate(tasks)]

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
