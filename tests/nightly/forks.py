"""Work in processes of its own, which may be killed at a commit point or at any time.

The process that forks only imports: LanceDB and FAISS start threads where they are used, and threads do not
survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from cairn.pipeline import durable
from cairn.pipeline.errors import CairnError

from tests.nightly.campaign import require

PATIENCE_SECONDS = 240.0
"""After which work hangs, on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of work: a value, a refusal in a sentence, a fault of ours, or a death by signal."""

    value: Any = None
    refusal: str | None = None
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
    """A fork that does one piece of work after the other, and is replaced by another once it was killed.

    Functions and arguments go to it pickled, so functions are those of a module.
    """

    def __init__(self) -> None:
        self._pid: int | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def run(self, work: Callable[..., Any], *arguments: Any, kill: str | float | None = None) -> Outcome:
        """Do some work; ``kill`` names a commit point to die at, or seconds to live."""
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        assert self._pid is not None
        self._pipe.send((work, arguments, kill))
        try:
            if self._pipe.poll(PATIENCE_SECONDS):
                return self._pipe.recv()
            os.kill(self._pid, signal.SIGQUIT)  # another signal than a kill that was asked for
        except (EOFError, ConnectionResetError):
            pass
        return Outcome(signal=-self._reap())

    def kill(self) -> None:
        """Kill the process if there is one."""
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
            self._reap()

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._pid = fork(_work_on, theirs, self._pipe)
        theirs.close()

    def _reap(self) -> int:
        assert self._pid is not None
        assert self._pipe is not None
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._pipe.close()
        self._pid = self._pipe = None
        return code


def forked(work: Callable[..., Any], *arguments: Any, kill: str | float | None = None) -> Outcome:
    """Do one piece of work in a process of its own."""
    with Worker() as worker:
        return worker.run(work, *arguments, kill=kill)


def fork(work: Callable[..., Any], *arguments: Any) -> int:
    """Start work in a fork that ends with it, and with its parent; return the process id."""
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lance and LanceDB, which the parent never uses
        pid = os.fork()
    if pid:
        return pid
    warnings.simplefilter("ignore")
    try:
        if os.getppid() == parent:
            work(*arguments)
    finally:
        os._exit(0)


def _work_on(pipe: Connection, of_parent: Connection) -> None:
    of_parent.close()
    parent, deadly = os.getppid(), list[str | float | None]()
    durable.observe_commit_points(
        lambda name: os.kill(os.getpid(), signal.SIGKILL) if name in deadly else None
    )
    while os.getppid() == parent:
        if pipe.poll(1.0):
            work, arguments, kill = pipe.recv()
            deadly[:] = [kill]
            pipe.send(_outcome(work, arguments, kill))


def _outcome(work: Callable[..., Any], arguments: tuple[Any, ...], kill: str | float | None) -> Outcome:
    if isinstance(kill, float):
        signal.setitimer(signal.ITIMER_REAL, kill)  # nothing handles the alarm, so it kills
    try:
        return Outcome(value=work(*arguments))
    except CairnError as error:
        return Outcome(refusal=f"{type(error).__name__}: {error}")
    except BaseException as error:  # noqa: BLE001 - the finding
        return Outcome(fault=f"{type(error).__name__}: {error}"[:500])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
