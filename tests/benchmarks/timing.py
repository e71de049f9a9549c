"""What benchmarks share: calls timed beside one another, and lines that say so."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

WARM_CALLS = 10


class Taken(NamedTuple):
    """Seconds by the clock and of processors, a row each, and what the calls gave."""

    clock: np.ndarray
    processor: np.ndarray
    answers: list[Any]


def timed(action: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return seconds by the clock, seconds of processor time, and what the action gives."""
    clock, processor = time.perf_counter(), time.process_time()
    result = action()
    return time.perf_counter() - clock, time.process_time() - processor, result


def in_turn(
    calls: Mapping[str, Callable[[int], Any]], count: int, warm: int = WARM_CALLS
) -> dict[str, Taken]:
    """Call each with every number below ``count``, after some to warm up; load affects all of them."""
    found: dict[str, list[tuple[float, float, Any]]] = {name: [] for name in calls}
    for number in [*range(warm), *range(count)]:
        for name, call in calls.items():
            found[name].append(timed(lambda call=call, number=number: call(number)))
    counted = {name: [*zip(*rows[warm:], strict=True)] for name, rows in found.items()}
    return {name: Taken(np.array(a), np.array(b), [*answers]) for name, (a, b, answers) in counted.items()}


def line(name: str, seconds: Sequence[float] | np.ndarray, rest: str = "") -> tuple[float, float]:
    """Print and return p50 and p99 in milliseconds."""
    p50, p99 = (1e3 * np.percentile(seconds, [50, 99])).tolist()
    print(f"\n{name:<58} p50 {p50:7.2f} ms   p99 {p99:7.2f} ms   {rest}", end="")
    return p50, p99
