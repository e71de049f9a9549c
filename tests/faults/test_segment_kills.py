"""A writer of segments killed anywhere, in a publication that adds one and in one that merges them."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import Generation, open_generation, open_latest_intact_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import repair_collection, verify_collection
from cairn.pipeline.index.publish import COMMIT_POINTS
from cairn.pipeline.index.segments.parts import PART_COMMIT_POINTS

from tests.index import stones
from tests.nightly import readings

pytestmark = pytest.mark.slow

WORK = """
sys.path.insert(0, {folder!r})
import stones
from cairn.pipeline.index import tiers
from cairn.pipeline.index.segments import parts
from cairn.pipeline.index.layout import CollectionLayout
tiers.WHOLE_CHUNKS = 0
tiers.MAX_DELETED_SHARE = 0.8
def work(root, factor, is_cut=""):
    tiers.FACTOR = int(factor)
    tiers.tier_of = lambda rows: 0
    parts.PART_CHUNKS = 5
    run_tasks = (lambda tasks, folder: [task.run() for task in tasks]) if is_cut else None
    stones.publish_change(CollectionLayout(Path(root), "stones"), "n", run_tasks)
"""
OLD = stones.document_ids(20)
NEW = [*stones.document_ids(20), *stones.document_ids(10, "n")]
MERGE_KILLS, KILLS_A_MERGE = 100, 10
FACTORS = {"added": 100, "merged": 2}


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)


@pytest.fixture(scope="module")
def write(start_forks: Callable[[str], Callable[..., int]]) -> Callable[..., int]:
    return start_forks(WORK.format(folder=str(Path(stones.__file__).parent)))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    stones.publish_documents(CollectionLayout(root, "stones"), OLD, with_tokens=True)
    return root


def ids(generation: Generation) -> list[str]:
    return sorted(generation.doc_ids.to_pylist())


@pytest.mark.parametrize("point", COMMIT_POINTS)
@pytest.mark.parametrize("kind", FACTORS)
def test_writer_of_segments_killed_at_a_commit_point_tears_nothing(
    template: Path, tmp_path: Path, write: Callable[..., int], kind: str, point: str
) -> None:
    shutil.copytree(template, tmp_path / "root")
    layout = CollectionLayout(tmp_path / "root", "stones")
    assert write(point, str(layout.root), str(FACTORS[kind])) == -signal.SIGKILL
    is_published = COMMIT_POINTS.index(point) >= COMMIT_POINTS.index("current-replaced")
    assert ids(open_generation(layout)) == sorted(NEW if is_published else OLD)
    assert write("no-point", str(layout.root), str(FACTORS[kind])) == 0
    generation = open_generation(layout)
    assert ids(generation) == sorted(NEW)
    assert (len(generation.segments) > 1) == (kind == "added")
    assert verify_collection(layout) == []


@pytest.mark.parametrize("point", PART_COMMIT_POINTS)
def test_writer_in_parts_killed_at_a_commit_point_tears_nothing(
    template: Path, tmp_path: Path, write: Callable[..., int], point: str
) -> None:
    shutil.copytree(template, tmp_path / "root")
    layout = CollectionLayout(tmp_path / "root", "stones")
    factor = str(FACTORS["merged" if point == "merged-by-worker" else "added"])
    assert write(point, str(layout.root), factor, is_cut="yes") == -signal.SIGKILL
    assert ids(open_generation(layout)) == sorted(OLD)
    assert write("no-point", str(layout.root), factor, is_cut="yes") == 0
    assert ids(open_generation(layout)) == sorted(NEW)
    assert list(layout.generations_folder.glob(".*")) == []
    assert verify_collection(layout) == []


def search_until(stop: threading.Event, root: Path, answers: list[readings.State | str]) -> None:
    while not stop.is_set():
        readings.by_word(root, OLD[3], {"type": "gte", "key": "year", "value": 2000})
        answers.append(readings.nearest(root, OLD[3], 0))
        answers.append(readings.all_documents(root))


def test_merges_killed_at_random_times_under_searches_tear_nothing(
    template: Path, tmp_path: Path, write: Callable[..., int]
) -> None:
    rng, kills, runs, answers = random.Random(0), 0, 0, list[readings.State | str]()
    changed = {doc_id: int(doc_id not in OLD[1:]) for doc_id in NEW}
    seconds = 0.0
    while kills < MERGE_KILLS:
        runs += 1
        layout = CollectionLayout(tmp_path / str(runs), "stones")
        shutil.copytree(template, layout.root)
        stop = threading.Event()
        searches = threading.Thread(target=search_until, args=(stop, layout.root, answers))
        searches.start()
        for _ in range(KILLS_A_MERGE if seconds else 0):
            kills += write(rng.uniform(0.01, seconds), str(layout.root), "2") == -signal.SIGALRM
            assert ids(open_generation(layout)) in (sorted(OLD), sorted(NEW))
        begun = time.monotonic()
        assert write("no-point", str(layout.root), "2") == 0
        seconds = time.monotonic() - begun
        stop.set()
        searches.join()
        assert len(open_generation(layout).segments) == 1, "merged"
        assert verify_collection(layout) == []
        assert readings.all_documents(layout.root) == changed
        assert list(layout.generations_folder.glob(".*")) == []
    assert answers
    assert [each for each in answers if each not in (dict.fromkeys(OLD, 0), changed, OLD[3])] == []


@pytest.fixture
def layout(template: Path, tmp_path: Path, write: Callable[..., int]) -> CollectionLayout:
    """Two generations: a segment of twenty documents, and one more of eleven."""
    shutil.copytree(template, tmp_path / "root")
    assert write("no-point", str(tmp_path / "root"), "100") == 0
    return CollectionLayout(tmp_path / "root", "stones")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize(
    "name", ["00000002-chunks.faiss", "00000002-passages.arrow", "00000002-tokens.arrow"]
)
def test_damaged_file_of_the_newest_segment_leaves_the_generation_before(
    layout: CollectionLayout, name: str, damage: Callable[[Path], None]
) -> None:
    damage(layout.generation_folder(2) / name)
    assert open_latest_intact_generation(layout).number == 1
    assert [(problem.generation, problem.file) for problem in verify_collection(layout)] == [(2, name)]
    repair_collection(layout)
    assert ids(open_generation(layout)) == sorted(NEW)
    assert verify_collection(layout) == []


def test_damaged_file_that_two_generations_share_is_named_in_both_and_made_again(
    layout: CollectionLayout,
) -> None:
    flip(layout.generation_folder(2) / "chunks.faiss")
    found = [(problem.generation, problem.file) for problem in verify_collection(layout)]
    assert found == [(2, "chunks.faiss"), (1, "chunks.faiss")]
    repair_collection(layout)
    assert ids(open_generation(layout)) == sorted(NEW)
    assert verify_collection(layout) == []


def test_reader_of_a_generation_two_merges_old_reads_on(
    layout: CollectionLayout, write: Callable[..., int]
) -> None:
    held = open_generation(layout)
    vectors = held.chunks.reconstruct(held.chunk_documents[:5])
    for _ in range(2):
        assert write("no-point", str(layout.root), "2") == 0
    assert held.number not in layout.generation_numbers()
    held.require_whole()
    assert (held.chunks.reconstruct(held.chunk_documents[:5]) == vectors).all()
    assert ids(held) == sorted(NEW)
