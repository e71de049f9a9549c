"""SIGKILL writers and readers of a collection in an object store.

Others see the old or the new generation, and a rerun converges.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cairn.pipeline.index import replica as replica_module
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.replica import REPLICA_POINTS
from cairn.pipeline.index.verify import verify_collection

from tests.index import stones
from tests.nightly.forks import forked

pytestmark = pytest.mark.slow

ROOT = "s3://cairn/indexes"
Machine = Callable[[str], CollectionLayout]
Kill = Callable[[str, Callable[[], None]], None]


def write() -> None:
    replica_module.LEASE_SECONDS = 0.1
    stones.publish_change(CollectionLayout.at(Path(ROOT), "stones"), "n")


def read() -> None:
    open_generation(CollectionLayout.at(Path(ROOT), "stones"))


@pytest.fixture
def kill() -> Kill:
    def kill_at(point: str, work: Callable[[], None]) -> None:
        assert forked(work, kill=point).signal == signal.SIGKILL
        time.sleep(0.2)  # until its lease has expired

    return kill_at


def served(layout: CollectionLayout) -> list[str]:
    return sorted(open_generation(layout).doc_ids.to_pylist())


@pytest.mark.parametrize("same_machine", [True, False], ids=["rerun-here", "rerun-elsewhere"])
@pytest.mark.parametrize(
    "point", ["chunks-added", "generation-renamed", *REPLICA_POINTS[:2], "current-replaced"]
)
def test_killed_writer_shows_old_or_new_to_all_and_a_rerun_converges(
    machine: Machine,
    kill: Kill,
    point: str,
    same_machine: bool,
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(20))
    old = served(machine("reader"))
    new = sorted({*old, *stones.document_ids(10, "n")})
    machine("a")
    kill(point, write)
    is_new = point in ("store-current-swapped", "current-replaced")
    assert served(machine("reader")) == (new if is_new else old)
    stones.publish_change(machine("a" if same_machine else "b"), "n")
    for name in ("a", "b", "reader"):
        assert served(machine(name)) == new
        assert verify_collection(machine(name)) == []


@pytest.mark.parametrize("point", REPLICA_POINTS[2:])
def test_killed_reader_leaves_a_copy_that_the_next_one_completes(
    machine: Machine,
    kill: Kill,
    point: str,
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(20))
    old = served(machine("reader"))
    stones.publish_change(machine("a"), "n")
    machine("reader")
    kill(point, read)
    assert served(machine("reader")) == sorted({*old, *stones.document_ids(10, "n")})
    assert verify_collection(machine("reader")) == []


def test_first_writer_killed_before_the_swap_leaves_nothing_to_see(machine: Machine, kill: Kill) -> None:
    machine("a")
    kill("store-files-written", write)
    assert not machine("reader").exists()
    stones.publish_documents(machine("b"), stones.document_ids(20))
    assert served(machine("reader")) == sorted(stones.document_ids(20))
