"""Work in processes of its own, which may be killed at a commit point or at any time.

They are forks of a server that has only imported: LanceDB and FAISS start threads where they are used, and
threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Self

from cairn.pipeline import durable
from cairn.pipeline.errors import CairnError
from cairn.pipeline.index import tiers
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.verify import verify_collection

from tests.nightly.campaign import require

PATIENCE_SECONDS = 240.0
"""After which work hangs, on a busy machine."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "cairn.pipeline.collection",
        "cairn.pipeline.index.maintenance",
        "cairn.pipeline.line.recontextualise",
        "cairn.pipeline.line.publish",
        "cairn.pipeline.serve.app",
        "cairn.pipeline.encode.documents",
        "pytest",
    ]
)
SEGMENT_SIZES = ("WHOLE_CHUNKS", "FACTOR", "MAX_DELETED_SHARE")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of work: a value, a refusal in a sentence, a fault of ours, or a death by signal."""

    value: Any = None
    refusal: str | None = None
    exit_code: int = 0
    fault: str | None = None
    signal: int | None = None

    @property
    def was_killed(self) -> bool:
        """Whether the process died as it was told to."""
        return self.signal in (signal.SIGKILL, signal.SIGALRM)

    def value_of(self, what: str) -> Any:
        """Return the value; anything else is a fault of what was done."""
        require(self.signal is None, f"{what} died of signal {self.signal}")
        require(self.fault is None, f"{what} failed: {self.fault}")
        require(self.refusal is None, f"{what} was refused: {self.refusal}")
        return self.value


class Worker:
    """A process that does one piece of work after the other, and is replaced once it was killed.

    Functions and arguments go to it pickled, so functions are those of a module. Work has the environment
    and the sizes of segments that are set here.
    """

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._reap()

    def run(self, work: Callable[..., Any], *arguments: Any, kill: str | float | None = None) -> Outcome:
        """Do some work; ``kill`` names a commit point to die at, or seconds to live."""
        if self._process is None:
            self._pipe, theirs = FORKS.Pipe()
            self._process = start(_work_on, theirs)
            theirs.close()
        assert self._pipe is not None
        assert self._process.pid is not None
        sizes = {name: getattr(tiers, name) for name in SEGMENT_SIZES}
        self._pipe.send((work, arguments, kill, dict(os.environ), sizes))
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self._pipe.poll(PATIENCE_SECONDS):
                return self._pipe.recv()
            os.kill(self._process.pid, signal.SIGQUIT)  # another signal than a kill that was asked for
        return Outcome(signal=-self._reap())

    def _reap(self) -> int:
        assert self._process is not None
        assert self._pipe is not None
        self._process.join()
        self._pipe.close()
        code = self._process.exitcode or 0
        self._process = self._pipe = None
        return code


def forked(work: Callable[..., Any], *arguments: Any, kill: str | float | None = None) -> Outcome:
    """Do one piece of work in a process of its own."""
    with Worker() as worker:
        return worker.run(work, *arguments, kill=kill)


def problems(layout: CollectionLayout) -> list[str]:
    """Return what ``verify`` finds."""
    return [problem.sentence for problem in verify_collection(layout)]


def start(work: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start work that ends with this process at the latest."""
    process = FORKS.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def _work_on(pipe: Connection) -> None:
    deadly = list[str | float | None]()
    durable.observe_commit_points(
        lambda name: os.kill(os.getpid(), signal.SIGKILL) if name in deadly else None
    )
    with contextlib.suppress(EOFError):
        while True:
            work, arguments, kill, environment, sizes = pipe.recv()
            os.environ.clear()
            os.environ.update(environment)
            for name, size in sizes.items():
                setattr(tiers, name, size)
            deadly[:] = [kill]
            pipe.send(_outcome(work, arguments, kill))


def _outcome(work: Callable[..., Any], arguments: tuple[Any, ...], kill: str | float | None) -> Outcome:
    if isinstance(kill, float):
        signal.setitimer(signal.ITIMER_REAL, kill)  # nothing handles the alarm, so it kills
    try:
        return Outcome(value=work(*arguments))
    except CairnError as error:
        return Outcome(refusal=f"{type(error).__name__}: {error}", exit_code=error.exit_code)
    except BaseException as error:  # noqa: BLE001 - the finding
        return Outcome(fault=f"{type(error).__name__}: {error}"[:500])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
