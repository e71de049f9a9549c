"""Tasks of the commit on a Ray cluster: segments are trained, written and joined by workers without a model.

The tables and the folder of a generation lie under the collection's root. A worker that does not see the
root, since it is on a machine without that file system, says so, and the driver does its task itself.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cairn.jobs.ray_cluster.pool import WorkerPool
from cairn.pipeline.durable import storage_errors
from cairn.pipeline.errors import ClusterError
from cairn.pipeline.index.segments.parts import Task
from cairn.pipeline.index.store_tasks import StoredTask

log = logging.getLogger(__name__)


class TaskWorker:
    """Runs tasks in a process of a cluster."""

    def load(self) -> str:
        """Return the version of Cairn, which must be the driver's workers' all."""
        return version("cairn-index")

    def run(self, task: Task, mark: Path) -> tuple[Any] | None:
        """Return a task's answer in a tuple; None where its files are not to be seen.

        Those of a folder are if the file is that the driver left, those of a store if that answers.
        """
        is_seen = task.is_reached() if isinstance(task, StoredTask) else mark.is_file()
        return (task.run(),) if is_seen else None


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
            deadline_seconds=None,
        )
        self._pool.step("load")

    def __call__(self, tasks: Sequence[Task], folder: Path) -> list[Any]:
        """See :data:`cairn.pipeline.index.segments.parts.RunTasks`."""
        mark = _leave_mark(folder)
        answered: dict[int, tuple[Any]] = {}
        sizes = [task.num_rows for task in tasks]
        try:
            mapped = self._pool.map("run", lambda number: (tasks[number], mark), sizes)
            answered.update((number, answer) for number, answer in mapped if answer is not None)
        except ClusterError as error:
            log.warning("tasks.given_up: workers did not do them, done here: %s", error)
            self._pool.close()
        mark.unlink(missing_ok=True)
        left = [number for number in range(len(tasks)) if number not in answered]
        if left:
            log.info("tasks.done_here tasks=%d: no disk in common, or no worker", len(left))
        return [
            answered[number][0] if number in answered else task.run() for number, task in enumerate(tasks)
        ]

    def close(self) -> None:
        """Stop all workers."""
        self._pool.close()


def _leave_mark(folder: Path) -> Path:
    """Leave a file to know the folder by."""
    mark = folder.absolute() / f"{uuid.uuid4().hex}.mark"
    with storage_errors("preparing the folder that workers may share"):
        mark.touch()
    return mark
