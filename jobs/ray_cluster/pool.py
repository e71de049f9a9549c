"""Workers of a Ray cluster that share a list of calls; each call is answered once, even if workers die.

    calls waiting ─▶ one a worker ─▶ result, in any order
          ▲              │
          └── worker dead, or past its deadline: the call goes to another worker

A worker has one call and none queued behind it, so a killed driver loses at most one call a worker. The gap
until the next call is some milliseconds, where a shard takes seconds. Plain actors and not Ray Data: a Ray
Data stage waits for a hung worker for ever and takes a gigabyte more, while here every call has a deadline.
Calls must be idempotent: one that was given to two workers is answered by the second, and the first is
killed.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cairn.pipeline.errors import CairnError, ClusterError

MAX_ATTEMPTS: Final = 4
"""How many workers a call may lose before the run fails: then the call itself is what kills them."""

START_SECONDS: Final = 600.0
"""How long the first worker may take to start and load its model; a machine may have to be started for it."""

FIRST_DEADLINE_SECONDS: Final = 1_800.0
"""Of shards before any has been timed; a large model on a CPU may take that long for one."""

CALL_DEADLINE_SECONDS: Final = 7_200.0
"""Of a call that is no shard: a sample of 32,768 documents and their queries through a model on a CPU."""

LEAST_DEADLINE_SECONDS: Final = 60.0
DEADLINE_FACTOR: Final = 10.0
"""A shard is late after so many times what the slowest one took for as many bytes."""

_TICK_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Call:
    """A method called with one worker; ``number`` = None is a step that every worker must pass."""

    number: int | None
    reference: Any
    began_seconds: float


@dataclass(slots=True, eq=False)
class _Worker:
    actor: Any
    steps_passed: int = 0
    call: _Call | None = None


@dataclass(slots=True)
class _Work:
    """What :meth:`WorkerPool.map` was asked for, and what waits; without ``sizes`` it is a single call."""

    method: str
    arguments: Callable[[int], tuple[Any, ...]]
    sizes: Sequence[int] | None
    waiting: deque[int]
    attempts: dict[int, int] = field(default_factory=dict[int, int])


class WorkerPool:
    """Actors of one class on a cluster; ``options`` are what each asks of its machine."""

    def __init__(
        self,
        ray: Any,
        worker_class: type,
        arguments: Sequence[Any],
        options: dict[str, Any],
        *,
        min_workers: int,
        max_workers: int,
        deadline_seconds: float | None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._ray = ray
        # SPREAD: what one machine takes with it when it dies should be little.
        self._make = ray.remote(max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD", **options)(
            worker_class
        )
        self._arguments = arguments
        self._options = options
        self._min_workers, self._max_workers = min_workers, max_workers
        self._deadline_seconds = deadline_seconds
        self._start_seconds = start_seconds
        self._workers: list[_Worker] = []
        self._steps: list[tuple[str, tuple[Any, ...]]] = []
        self._answers: list[Any] = []
        self._slowest_seconds_a_byte: float | None = None
        self._deaths_in_a_row = 0
        self._enough_seconds = time.monotonic()

    def step(self, method: str, *arguments: Any) -> Any:
        """Have every worker, later ones too, run ``method`` first; return the answer they must all give."""
        self._steps.append((method, tuple(self._ray.put(argument) for argument in arguments)))
        while len(self._answers) < len(self._steps):
            for _ in self._turn(1, None):
                pass
        return self._answers[-1]

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method with one worker and return its answer."""
        references = tuple(self._ray.put(argument) for argument in arguments)
        work = _Work(method=method, arguments=lambda _: references, sizes=None, waiting=deque([0]))
        while True:
            for _, answer in self._turn(1, work):
                return answer

    def map(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]],
        sizes: Sequence[int],
        goes_again: Callable[[Any], bool] = lambda _: False,
    ) -> Iterator[tuple[int, Any]]:
        """Call ``method(*arguments(number))`` for each shard; yield number and answer as they come.

        ``sizes`` are in bytes, one a shard. Arguments are made when they are sent, so that memory holds only
        those of running calls. A call whose answer ``goes_again`` is made once more.
        """
        work = _Work(method=method, arguments=arguments, sizes=sizes, waiting=deque(range(len(sizes))))
        outstanding = len(sizes)
        while outstanding:
            for number, answer in self._turn(outstanding, work):
                if goes_again(answer):
                    work.waiting.appendleft(number)
                    continue
                outstanding -= 1
                yield number, answer

    def close(self) -> None:
        """Stop all workers."""
        while self._workers:
            self._ray.kill(self._workers.pop().actor)

    def _turn(self, outstanding: int, work: _Work | None) -> Iterator[tuple[int, Any]]:
        """Keep workers and hand out calls, wait a moment, give what is finished, and see who is late."""
        while len(self._workers) < min(self._max_workers, outstanding):
            self._workers.append(_Worker(actor=self._make.remote(*self._arguments)))
        for worker in self._workers:
            self._hand_out(worker, work)
        yield from self._finished(work)
        self._give_up_late(work)

    def _hand_out(self, worker: _Worker, work: _Work | None) -> None:
        if worker.call:
            return
        if worker.steps_passed < len(self._steps):
            self._send(worker, None, *self._steps[worker.steps_passed])
        elif work and work.waiting:
            number = work.waiting.popleft()
            self._send(worker, number, work.method, work.arguments(number))

    def _send(self, worker: _Worker, number: int | None, method: str, arguments: tuple[Any, ...]) -> None:
        reference = getattr(worker.actor, method).remote(*arguments)
        worker.call = _Call(number, reference, began_seconds=time.monotonic())

    def _finished(self, work: _Work | None) -> Iterator[tuple[int, Any]]:
        under_way = {worker.call.reference: (worker, worker.call) for worker in self._workers if worker.call}
        done, _ = self._ray.wait(list(under_way), num_returns=1, timeout=_TICK_SECONDS)
        if done:  # take along whatever else is finished by now
            done, _ = self._ray.wait(list(under_way), num_returns=len(under_way), timeout=0)
        for reference in done:
            worker, call = under_way[reference]
            try:
                answer = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:
                raise _as_ours(error) from None
            except self._ray.exceptions.RayError as error:
                self._lose(worker, work, str(error))
                continue
            worker.call = None
            if call.number is None:
                self._pass_step(worker, answer)
                continue
            assert work is not None
            self._deaths_in_a_row = 0
            if work.sizes:
                pace = (time.monotonic() - call.began_seconds) / max(1, work.sizes[call.number])
                self._slowest_seconds_a_byte = max(self._slowest_seconds_a_byte or 0.0, pace)
            yield call.number, answer

    def _pass_step(self, worker: _Worker, answer: Any) -> None:
        if worker.steps_passed == len(self._answers):
            self._answers.append(answer)
        elif answer != self._answers[worker.steps_passed]:
            raise ClusterError(
                "all workers must have the same model and version of Cairn, got "
                f"{self._answers[worker.steps_passed]} and {answer}; "
                "give every machine of the cluster the same image"
            )
        worker.steps_passed += 1

    def _give_up_late(self, work: _Work | None) -> None:
        now = time.monotonic()
        ready = sum(worker.steps_passed > 0 for worker in self._workers)
        if ready >= min(self._min_workers, len(self._workers)):
            self._enough_seconds = now
        elif now - self._enough_seconds > self._start_seconds:
            raise self._too_few(ready)
        for worker in list(self._workers):
            if worker.call:
                deadline_seconds = self._deadline(work, worker.call.number)
                # Who asked may have been busy with other answers for long, and this one may have come
                # meanwhile.
                if (
                    now - worker.call.began_seconds > deadline_seconds
                    and not self._ray.wait([worker.call.reference], timeout=0)[0]
                ):
                    self._lose(worker, work, f"it was not done after {deadline_seconds:.0f} seconds")

    def _deadline(self, work: _Work | None, number: int | None) -> float:
        if number is None or work is None:
            return self._start_seconds
        if work.sizes is None:
            seconds = CALL_DEADLINE_SECONDS
        elif self._deadline_seconds is not None:
            seconds = self._deadline_seconds
        elif self._slowest_seconds_a_byte is None:
            seconds = FIRST_DEADLINE_SECONDS
        else:
            seconds = max(
                LEAST_DEADLINE_SECONDS, DEADLINE_FACTOR * self._slowest_seconds_a_byte * work.sizes[number]
            )
        # Each attempt has twice the time of the one before: a call that is merely long is finished in the
        # end.
        return seconds * 2 ** work.attempts.get(number, 0)

    def _lose(self, worker: _Worker, work: _Work | None, reason: str) -> None:
        """Give a worker's call to another one; it is killed, as it may only seem dead."""
        self._workers.remove(worker)
        self._ray.kill(worker.actor)
        if "ModuleNotFoundError" in reason:
            missing = reason.rpartition("ModuleNotFoundError: ")[2].strip()
            raise ClusterError(
                f"every machine of the cluster must have Cairn installed, got one that says {missing!r}; "
                "install the same version"
            )
        self._deaths_in_a_row += 1
        number = worker.call.number if worker.call else None
        if work and number is not None:
            work.attempts[number] = work.attempts.get(number, 0) + 1
            work.waiting.appendleft(number)
        is_hopeless = work is not None and number is not None and work.attempts[number] >= MAX_ATTEMPTS
        if is_hopeless or self._deaths_in_a_row >= MAX_ATTEMPTS * self._max_workers:
            what = (
                "a worker must start and stay alive"
                if work is None or number is None
                else f"call {number} of `{work.method}` must be answered by a worker"
            )
            raise ClusterError(
                f"{what}, got {MAX_ATTEMPTS} that failed, the last because: {_first_sentence(reason)}; "
                "look into the cluster's logs, or give workers more memory or time"
            )

    def _too_few(self, ready: int) -> ClusterError:
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        return ClusterError(
            f"a cluster must start {self._min_workers} worker(s) within {self._start_seconds:.0f} "
            f"seconds, got {ready}; each asks for "
            f"{_resources(self._options)}, and of {_resources(total)} {_resources(free)} are free"
        )


def _as_ours(error: Any) -> CairnError:
    """Return what a worker raised: our own errors as they are, another one as a sentence."""
    cause = error.cause
    if isinstance(cause, CairnError):
        return cause
    machine = re.search(r"ip=([^,)]+)", str(error))
    return ClusterError(
        f"a worker at {machine.group(1) if machine else '?'} failed: {type(cause).__name__}: {cause}"
    )


def _first_sentence(reason: str) -> str:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("The actor is dead because")]
    return (causes or lines or ["unknown"])[0].partition(". ")[0]


def _resources(amounts: dict[str, Any]) -> str:
    cpus, gpus = (
        amounts.get(name, amounts.get(short, 0)) for name, short in (("num_cpus", "CPU"), ("num_gpus", "GPU"))
    )
    return f"{cpus:g} CPUs and {gpus:g} GPUs"
