"""Tasks for workers that have nothing in common with the committer but the object store of the collection.

    committer: files that a task reads ─▶ their hashes; what the store lacks is uploaded
    worker:    files fetched into a folder of its own ─▶ task ─▶ what it wrote uploaded under its hash
    committer: hashes noted; nothing is fetched but what it reads itself

Paths below the committer's root become paths in the worker's folder, and those of the answer become the
committer's again. Files that no generation comes to name are removed from the store a day later, as those of
any interrupted upload are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from cairn.pipeline.durable import commit_point, storage_errors
from cairn.pipeline.index.lance_index import LanceTables
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.object_folder import TRANSFERS, ObjectFolder
from cairn.pipeline.index.replica import Replica
from cairn.pipeline.index.segments.parts import RunTasks, Task
from cairn.pipeline.index.worker_files import Files, LostFilesError, fetch_files, is_reached, key_of
from cairn.pipeline.manifest import FileRecord, record_file


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAnswer:
    """What a task answered, and the files that it wrote to the store.

    ``lost`` are files that it could not read, each with what is wrong with it; such a task was not run.
    """

    answer: Any
    written: Files
    lost: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTask:
    """A task of a collection in a store; ``root`` is the committer's, ``inputs`` the files that it reads."""

    uri: str
    name: str
    task: Task
    root: Path
    inputs: Files
    num_rows: int

    def reads(self) -> Iterable[Path]:
        """Return nothing: what it reads it fetches."""
        return ()

    def is_reached(self) -> bool:
        """Tell whether this process can read the store."""
        return is_reached(self.uri)

    def run(self) -> StoredAnswer:
        """Run it in a folder of its own, which goes with its end."""
        store = ObjectFolder(self.uri)
        with storage_errors("preparing a folder for a task"), _own_folder() as root:
            folder = root / self.name
            folder.mkdir()
            lost = fetch_files(store, folder, self.inputs)
            if lost:
                return StoredAnswer(answer=None, written={}, lost=lost)
            task: Task = moved(self.task, self.root, root)
            answer = moved(task.run(), root, self.root)
            paths = [path for path in folder.rglob("*") if path.is_file()]
            names = {path.relative_to(folder).as_posix(): path for path in paths}
            written = {name: record_file(names[name]) for name in names.keys() - self.inputs.keys()}
            with ThreadPoolExecutor(TRANSFERS) as pool:
                list(pool.map(lambda name: store.write(key_of(written[name]), names[name]), written))
            commit_point("task-files-uploaded")
            return StoredAnswer(answer=answer, written=written, lost={})


def folder_prefix() -> str:
    """Return how temporary folders of this namespace of processes begin; a process id follows."""
    return f"cairn-task-{Path('/proc/self/ns/pid').stat().st_ino}-"


@contextlib.contextmanager
def _own_folder() -> Generator[Path]:
    """Make a temporary folder; those of processes that are dead by now are removed.

    Processes of another container, which may have the same temporary folder, are told by their namespace.
    """
    parent = Path(tempfile.gettempdir())
    prefix = folder_prefix()
    for left in parent.glob(f"{prefix}*-*"):
        pid = left.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=parent) as folder:
        yield Path(folder).resolve()


class StoreTasks:
    """A :data:`RunTasks` of a collection in a store: hands tasks on as :class:`StoredTask`."""

    def __init__(self, layout: CollectionLayout, replica: Replica, run_tasks: RunTasks) -> None:
        self._layout, self._replica, self._run_tasks = layout, replica, run_tasks
        self._published: Files | None = None

    def __call__(self, tasks: Sequence[Task], folder: Path) -> list[Any]:
        """See :data:`cairn.pipeline.index.segments.parts.RunTasks`."""
        stored = [
            StoredTask(
                uri=self._replica.uri,
                name=self._layout.name,
                task=task,
                root=self._layout.root,
                inputs=self._in_store(task.reads()),
                num_rows=task.num_rows,
            )
            for task in tasks
        ]
        answers: Sequence[StoredAnswer] = self._run_tasks(stored, folder)
        lost = {name: fault for answer in answers for name, fault in answer.lost.items()}
        if lost:
            raise LostFilesError({self._layout.folder / name: fault for name, fault in lost.items()})
        for answer in answers:
            self._replica.worker_files.note(
                {self._layout.folder / name: record for name, record in answer.written.items()}
            )
        return [answer.answer for answer in answers]

    def _in_store(self, paths: Iterable[Path]) -> Files:
        """Return the records of files that a task reads, uploading those that the store may lack."""
        if self._published is None:
            self._published = self._replica.published_files()
        files: dict[str, FileRecord] = {}
        for path in paths:
            name = path.relative_to(self._layout.folder).as_posix()
            known = self._replica.worker_files.record_of(path) or self._published.get(name)
            files[name] = known or self._replica.worker_files.upload(path)
        return files


def store_tasks(layout: CollectionLayout, run_tasks: RunTasks | None) -> RunTasks | None:
    """Return what runs tasks for a collection: by way of the store, where it lies in one."""
    if run_tasks is None or layout.replica is None:
        return run_tasks
    return StoreTasks(layout, layout.replica, run_tasks)


def moved(value: Any, root: Path, target: Path) -> Any:
    """Return a task or an answer with the paths below ``root`` as paths below ``target``."""
    if isinstance(value, Path):
        return target / value.relative_to(root) if value.is_relative_to(root) else value
    if isinstance(value, LanceTables):
        layout = CollectionLayout(moved(value.layout.root, root, target), value.layout.name)
        return LanceTables(layout, value.metadata_fields, value.vector_dim, value.has_tokens)
    if is_dataclass(value) and not isinstance(value, type):
        own = {each.name: moved(getattr(value, each.name), root, target) for each in fields(value)}
        return replace(value, **own)
    if isinstance(value, Mapping):
        items: Mapping[Any, Any] = value
        return {name: moved(each, root, target) for name, each in items.items()}
    if isinstance(value, list | tuple):
        parts: Sequence[Any] = value
        return type(value)(moved(each, root, target) for each in parts)
    return value
