"""SIGKILL writers and readers of a collection in an object store.

Others see the old or the new generation, and a rerun converges.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from cairn.pipeline.index import replica as replica_module
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import verify_collection
from cairn.pipeline.index.replica import REPLICA_POINTS

if TYPE_CHECKING:
    from tests.object_stores import ObjectStore

pytestmark = pytest.mark.slow

ROOT = "s3://cairn/indexes"
INDEX_TESTS = Path(__file__).resolve().parents[1] / "index"

# Write to the collection, or read it, with a machine's settings.
WORK = f"""
sys.path.insert(0, {str(INDEX_TESTS)!r})
import stones
from cairn.pipeline.index import lease
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
lease.LEASE_SECONDS = 0.1
def work(action, **settings):
    os.environ.update(settings)
    layout = CollectionLayout.at(Path("{ROOT}"), "stones")
    stones.publish_change(layout, "n") if action == "write" else open_generation(layout)
"""


@pytest.fixture(scope="module")
def stones() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stones_of_stores", INDEX_TESTS / "stones.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], CollectionLayout]:
    monkeypatch.setattr(replica_module, "REFRESH_SECONDS", 0.0)

    def on(name: str) -> CollectionLayout:
        monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / name))
        return CollectionLayout.at(Path(ROOT), "stones")

    return on


@pytest.fixture(scope="module")
def forks(start_forks: Callable[[str], Callable[..., int]]) -> Callable[..., int]:
    return start_forks(WORK)


@pytest.fixture
def kill(forks: Callable[..., int]) -> Callable[[str, str], None]:
    def kill_at(point: str, action: str) -> None:
        assert (
            forks(
                point,
                action,
                **{name: value for name, value in os.environ.items() if name.startswith(("AWS_", "CAIRN_"))},
            )
            == -signal.SIGKILL
        )
        time.sleep(0.2)  # until its lease has expired

    return kill_at


def served(layout: CollectionLayout) -> list[str]:
    return sorted(open_generation(layout).doc_ids.to_pylist())


@pytest.mark.parametrize("same_machine", [True, False], ids=["rerun-here", "rerun-elsewhere"])
@pytest.mark.parametrize(
    "point", ["chunks-added", "generation-renamed", *REPLICA_POINTS[:2], "current-replaced"]
)
def test_killed_writer_shows_old_or_new_to_all_and_a_rerun_converges(
    machine: Callable[[str], CollectionLayout],
    stones: ModuleType,
    kill: Callable[[str, str], None],
    point: str,
    same_machine: bool,
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(20))
    old = served(machine("reader"))
    new = sorted({*old, *stones.document_ids(10, "n")})
    machine("a")
    kill(point, "write")
    is_new = point in ("store-current-swapped", "current-replaced")
    assert served(machine("reader")) == (new if is_new else old)
    stones.publish_change(machine("a" if same_machine else "b"), "n")
    for name in ("a", "b", "reader"):
        assert served(machine(name)) == new
        assert verify_collection(machine(name)) == []


@pytest.mark.parametrize("point", REPLICA_POINTS[2:])
def test_killed_reader_leaves_a_copy_that_the_next_one_completes(
    machine: Callable[[str], CollectionLayout],
    stones: ModuleType,
    kill: Callable[[str, str], None],
    point: str,
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(20))
    old = served(machine("reader"))
    stones.publish_change(machine("a"), "n")
    machine("reader")
    kill(point, "read")
    assert served(machine("reader")) == sorted({*old, *stones.document_ids(10, "n")})
    assert verify_collection(machine("reader")) == []


def test_first_writer_killed_before_the_swap_leaves_nothing_to_see(
    machine: Callable[[str], CollectionLayout], stones: ModuleType, kill: Callable[[str, str], None]
) -> None:
    machine("a")
    kill("store-files-written", "write")
    assert not machine("reader").exists()
    stones.publish_documents(machine("b"), stones.document_ids(20))
    assert served(machine("reader")) == sorted(stones.document_ids(20))
