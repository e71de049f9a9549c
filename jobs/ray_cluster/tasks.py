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

from jobs.ray_cluster.pool import WorkerPool
from pipeline.durable import storage_errors
from pipeline.index.segments.parts import Task

log = logging.getLogger(__name__)


class TaskWorker:
    """Runs tasks in a process of a cluster."""

    def load(self) -> str:
        """Return the version of Cairn, which must be the driver's workers' all."""
        return version("cairn-retrieval")

    def run(self, task: Task, mark: Path) -> tuple[Any] | None:
        """Return a task's answer in a tuple; None where the file that the driver left is not to be seen."""
        return (task.run(),) if mark.is_file() else None


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
        """See :data:`pipeline.index.segments.parts.RunTasks`."""
        mark = _leave_mark(folder)
        answers: list[Any] = [None] * len(tasks)
        sizes = [task.num_rows for task in tasks]
        for number, answer in self._pool.map("run", lambda number: (tasks[number], mark), sizes):
            if answer is None:
                log.info(
                    "tasks.not_shared task=%s: no disk in common, done here", type(tasks[number]).__name__
                )
                answer = (tasks[number].run(),)
            answers[number] = answer[0]
        mark.unlink(missing_ok=True)
        return answers

    def close(self) -> None:
        """Stop all workers."""
        self._pool.close()


def _leave_mark(folder: Path) -> Path:
    """Leave a file to know the folder by."""
    mark = folder.absolute() / f"{uuid.uuid4().hex}.mark"
    with storage_errors("preparing the folder that workers may share"):
        mark.touch()
    return mark
