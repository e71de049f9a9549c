"""Measure what looking for damage costs a search that meets none: goal at most 1.02 times the search without.

Run ``python -m pytest -m bench -p no:xdist -s tests/benchmarks/test_bench_looks.py``. A search looks at the
files of its generation three times. With leases, as in a server, mapped files need no look.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from cairn.pipeline.index import held_files
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search.searcher import Searcher

from tests.index import stones
from tests.nightly.served import StoneEncoder

pytestmark = pytest.mark.bench

LOOKS, REPETITIONS = 3, 500


def microseconds(work: Callable[[], object]) -> float:
    """Return the median time of a call."""
    spent = list[float]()
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return 1e6 * statistics.median(spent)


def test_looks_of_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = CollectionLayout(tmp_path, "stones")
    stones.publish_documents(layout, stones.document_ids(3_000), with_tokens=True)
    stones.publish_documents(layout, stones.document_ids(5, "n"), with_tokens=True)
    monkeypatch.setattr(held_files._Leases, "is_on", False)
    before = signal.getsignal(signal.SIGIO)
    shares = dict[str, float]()
    for name in ("without leases", "with leases"):
        if name == "with leases":
            held_files.lease_held_files()
        searcher = Searcher(layout, StoneEncoder())
        search = microseconds(partial(searcher.search, "stone d1234 w0x1"))
        looks = LOOKS * microseconds(searcher.generation.require_whole)
        shares[name] = search / (search - looks)
        print(f"\n{name}: {looks:.0f} of {search:.0f} us, {shares[name]:.4f} x")
    signal.signal(signal.SIGIO, before if callable(before) else signal.SIG_IGN)
    assert shares["with leases"] <= 1.02
