"""What benchmarks share: calls timed beside one another, lines that say so, and a server of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
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


@contextmanager
def serving(root: Path, *options: str) -> Generator[int]:
    """Run `cairn serve` in a process of its own until it is no longer needed; give its port."""
    command = [sys.executable, "-m", "cairn.cli.main", "serve", "--quiet", "--port", "0", "--root", str(root)]
    with tempfile.NamedTemporaryFile() as log:
        said = Path(log.name)
        process = subprocess.Popen([*command, *options], stderr=log)
        try:
            while not (found := re.search(r"serving .*:(\d+)$", said.read_text("utf-8"), re.MULTILINE)):
                assert process.poll() is None, said.read_text("utf-8")
                time.sleep(0.2)
            while not _is_ready(int(found[1])):
                time.sleep(0.2)
            yield int(found[1])
        finally:
            process.terminate()
            process.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz") as answer:
            return answer.status == 200
    except urllib.error.HTTPError:
        return False
