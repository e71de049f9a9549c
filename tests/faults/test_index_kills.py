"""Fault matrix 1, 2, 20, 21, 23: a writer killed anywhere, several writers at once, readers meanwhile."""

from __future__ import annotations

import importlib.util
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from cairn.pipeline.errors import CollectionBusyError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import delete_documents, verify_collection
from cairn.pipeline.index.publish import COMMIT_POINTS

pytestmark = pytest.mark.slow

STONES = Path(__file__).parents[1] / "index" / "stones.py"
WORK = f"""
sys.path.insert(0, {str(STONES.parent)!r})
import stones
from cairn.pipeline.index.layout import CollectionLayout
def work(root):
    stones.publish_change(CollectionLayout(Path(root), "stones"), "n")
"""


@pytest.fixture(scope="module")
def stones() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stones_of_kills", STONES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def layout(tmp_path: Path) -> CollectionLayout:
    return CollectionLayout(tmp_path, "stones")


@pytest.fixture(scope="module")
def write(start_forks: Callable[[str], Callable[..., int]]) -> Callable[..., int]:
    return start_forks(WORK)


@pytest.fixture(scope="module")
def killed(
    stones: ModuleType, write: Callable[..., int], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, CollectionLayout]:
    """For each commit point, a collection of twenty documents whose second publication died there."""
    template = tmp_path_factory.mktemp("template")
    stones.publish_documents(CollectionLayout(template, "stones"), stones.document_ids(20))
    roots = {point: tmp_path_factory.mktemp(point) for point in COMMIT_POINTS}
    for root in roots.values():
        shutil.copytree(template, root, dirs_exist_ok=True)
    assert {write(point, str(root)) for point, root in roots.items()} == {-signal.SIGKILL}
    return {point: CollectionLayout(root, "stones") for point, root in roots.items()}


@pytest.fixture(scope="module")
def first_killed(
    write: Callable[..., int], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, CollectionLayout]:
    """For each commit point, a collection whose very first publication died there."""
    roots = {point: tmp_path_factory.mktemp(f"first-{point}") for point in FIRST_POINTS}
    assert {write(point, str(root)) for point, root in roots.items()} == {-signal.SIGKILL}
    return {point: CollectionLayout(root, "stones") for point, root in roots.items()}


FIRST_POINTS = tuple(point for point in COMMIT_POINTS if not point.endswith("-deleted"))
"""A first publication replaces nothing."""


def assert_converged(layout: CollectionLayout, stones: ModuleType, expected: list[str]) -> None:
    assert sorted(stones.served_ids(layout)) == sorted(expected)
    assert verify_collection(layout) == []


@pytest.mark.parametrize("point", COMMIT_POINTS)
def test_writer_killed_at_a_commit_point_leaves_one_whole_generation_and_a_rerun_converges(
    killed: dict[str, CollectionLayout], stones: ModuleType, point: str
) -> None:
    layout, old = killed[point], stones.document_ids(20)
    new = [*old, *stones.document_ids(10, "n")]
    is_published = COMMIT_POINTS.index(point) >= COMMIT_POINTS.index("current-replaced")
    assert sorted(stones.served_ids(layout)) == sorted(new if is_published else old)
    stones.publish_change(layout, "n")
    assert_converged(layout, stones, new)


@pytest.mark.parametrize("point", FIRST_POINTS)
def test_first_writer_killed_at_a_commit_point_is_completed_by_a_rerun(
    first_killed: dict[str, CollectionLayout], stones: ModuleType, point: str
) -> None:
    layout = first_killed[point]
    stones.publish_change(layout, "n")
    assert_converged(layout, stones, [*stones.document_ids(10, "n"), "d0"])


def test_writers_killed_at_random_times_never_tear_a_generation(
    layout: CollectionLayout, stones: ModuleType, write: Callable[..., int]
) -> None:
    old = stones.document_ids(20)
    stones.publish_documents(layout, old)
    clock = random.Random(0)
    for _ in range(25):
        assert write(clock.uniform(0.01, 0.4), str(layout.root)) in (0, -signal.SIGALRM)
        served = open_generation(layout).doc_ids.to_pylist()
        assert len(served) == len(set(served))
        assert sorted(served) in (sorted(old), sorted([*old, *stones.document_ids(10, "n")]))
    stones.publish_change(layout, "n")
    assert_converged(layout, stones, [*old, *stones.document_ids(10, "n")])


def test_concurrent_writers_are_one_at_a_time_and_the_others_busy(
    layout: CollectionLayout, stones: ModuleType
) -> None:
    stones.publish_documents(layout, stones.document_ids(20))
    with layout.writer_lock():
        for _ in range(3):
            with pytest.raises(CollectionBusyError):
                delete_documents(layout, ["d0"])
    outcomes: list[str] = []

    def write(prefix: str) -> None:
        try:
            stones.publish_change(layout, prefix)
            outcomes.append(prefix)
        except CollectionBusyError:
            pass

    threads = [threading.Thread(target=write, args=(f"p{i}-",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes
    expected = {
        *stones.document_ids(20),
        *(doc_id for prefix in outcomes for doc_id in stones.document_ids(10, prefix)),
    }
    assert_converged(layout, stones, sorted(expected))


def test_readers_during_publications_see_whole_generations_only(
    layout: CollectionLayout, stones: ModuleType
) -> None:
    stones.publish_documents(layout, stones.document_ids(20))
    stop = threading.Event()
    faults: list[str] = []
    seen: set[int] = set()

    def read() -> None:
        while not stop.is_set():
            try:
                generation = open_generation(layout)
                texts = generation.fetch_documents(range(generation.num_documents), ["doc_id", "year"])
                if texts.column("doc_id").to_pylist() != generation.doc_ids.to_pylist():
                    faults.append("rows of another generation")
                seen.add(generation.number)
            except Exception as error:  # noqa: BLE001 - any failure of a reader is the finding
                faults.append(repr(error))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for prefix in ("p", "q", "r", "s"):
            stones.publish_change(layout, prefix)
            newest = open_generation(layout).number
            while newest not in seen and not faults:
                time.sleep(0.01)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert faults == []
    assert len(seen) >= 4
