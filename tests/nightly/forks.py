"""Work in a process of its own, which may be killed at a commit point or at any time.

The process that forks only imports: LanceDB and FAISS start threads where they are used, and threads do not
survive a fork.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline import durable
from pipeline.errors import CairnError

PATIENCE_SECONDS = 240.0
"""After which work hangs, on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of forked work: a value, a refusal in a sentence, a fault of ours, or a death by signal."""

    value: Any = None
    refusal: str | None = None
    fault: str | None = None
    signal: int | None = None

    @property
    def was_killed(self) -> bool:
        """Whether the process died as it was told to."""
        return self.signal in (signal.SIGKILL, signal.SIGALRM)


def forked(work: Callable[..., Any], *arguments: Any, kill: str | float | None = None) -> Outcome:
    """Run ``work`` in a fork; ``kill`` names a commit point to die at, or seconds to live."""
    reading, writing = os.pipe()
    pid = _fork()
    if pid == 0:
        os.close(reading)
        _work_and_exit(writing, work, arguments, kill)
    os.close(writing)
    content = _read_all(reading, pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        return Outcome(signal=-code)
    return pickle.loads(content)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lance and LanceDB, which the parent never uses
        return os.fork()


def _work_and_exit(writing: int, work: Callable[..., Any], arguments: Any, kill: str | float | None) -> None:
    warnings.simplefilter("ignore")
    try:
        if isinstance(kill, float):
            signal.setitimer(signal.ITIMER_REAL, kill)  # nothing handles the alarm, so it kills
        durable.observe_commit_points(
            lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == kill else None
        )
        try:
            outcome = Outcome(value=work(*arguments))
        except CairnError as error:
            outcome = Outcome(refusal=f"{type(error).__name__}: {error}")
        except BaseException as error:  # noqa: BLE001 - the finding
            outcome = Outcome(fault=f"{type(error).__name__}: {error}"[:500])
        signal.setitimer(signal.ITIMER_REAL, 0)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(outcome))
    finally:
        os._exit(0)


def _read_all(reading: int, pid: int) -> bytes:
    parts = list[bytes]()
    limit = time.monotonic() + PATIENCE_SECONDS
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            if not select.select([pipe], [], [], max(limit - time.monotonic(), 0))[0]:
                os.kill(pid, signal.SIGQUIT)  # another signal than a kill that was asked for
                break
            part = pipe.read(1 << 16)
            if not part:
                break
            parts.append(part)
    return b"".join(parts)
