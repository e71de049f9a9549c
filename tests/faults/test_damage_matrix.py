"""Each kind of stored file, damaged in each way, under each verb: a right state, or a sentence what to run.

``make test`` and ``make slow`` try a part of the cells, ``make faults`` the others.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cairn.pipeline.errors import CairnError
from cairn.pipeline.index.generation import Generation, open_generation, open_latest_intact_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import compact_collection, delete_documents
from cairn.pipeline.index.recovery import repair_collection
from cairn.pipeline.index.verify import verify_collection

from tests.damages import cut, flip
from tests.index import stones

OLD = stones.document_ids(20)
CHANGED = [*stones.document_ids(10, "n"), "d0"]
NEW = [doc_id for doc_id in OLD if doc_id != "d0"] + CHANGED

GENERATION_FILES = (
    "MANIFEST.json",
    "documents.faiss",
    "chunks.faiss",
    "documents.arrow",
    "chunks.arrow",
    "passages.arrow",
    "titles.arrow",
    "lengths.arrow",
    "context.arrow",
    "clusters.arrow",
)
TABLE_FILES = {
    "newest version": ("_versions/*.manifest", 0),
    "older version": ("_versions/*.manifest", -1),
    "deletions": ("_deletions/*", 0),
    "first rows": ("data/*", 0),
    "last rows": ("data/*", -1),
}
KINDS = (
    "CURRENT",
    *(f"generations/00000002/{name}" for name in GENERATION_FILES),
    *(f"{table}: {kind}" for table in ("documents", "chunks") for kind in TABLE_FILES),
)


def path_of(layout: CollectionLayout, kind: str) -> Path:
    table, _, name = kind.partition(": ")
    if not name:
        return layout.folder / kind
    pattern, place = TABLE_FILES[name]
    found = list((layout.lance_folder / f"{table}.lance").glob(pattern))
    # Fragments by age; the names of version manifests ascend from the newest on.
    found.sort(key=lambda path: path.stat().st_mtime_ns if path.parent.name == "data" else path.name)
    return found[place]


def older_copy(layout: CollectionLayout, kind: str) -> Path | None:
    if kind.startswith("generations/"):
        return layout.generation_folder(1) / Path(kind).name
    table, _, name = kind.partition(": ")
    return path_of(layout, f"{table}: older version") if name == "newest version" else None


def replace_by_older_copy(layout: CollectionLayout, kind: str) -> None:
    older = older_copy(layout, kind)
    if older is None:
        pytest.skip("there is no older copy of this kind")
    shutil.copyfile(older, path_of(layout, kind))


def flip_a_random_bit(layout: CollectionLayout, kind: str) -> None:
    path = path_of(layout, kind)
    place, bit = divmod(random.Random(kind).randrange(8 * path.stat().st_size), 8)
    flip(path, place, 1 << bit)


DAMAGES: dict[str, Callable[[CollectionLayout, str], None]] = {
    "deleted": lambda layout, kind: path_of(layout, kind).unlink(),
    "emptied": lambda layout, kind: path_of(layout, kind).write_bytes(b""),
    "cut": lambda layout, kind: cut(path_of(layout, kind)),
    "last byte flipped": lambda layout, kind: flip(path_of(layout, kind), bits=0x80),
    "random bit flipped": flip_a_random_bit,
    "replaced by an older copy": replace_by_older_copy,
}


def texts(generation: Generation) -> dict[str, str]:
    rows = generation.fetch_documents(range(generation.num_documents), ["doc_id", "text"])
    return dict(zip(rows.column("doc_id").to_pylist(), rows.column("text").to_pylist(), strict=True))


def right_texts(doc_ids: list[str], *, is_changed: bool) -> dict[str, str]:
    return {doc_id: stones.text_of(doc_id, int(is_changed and doc_id in CHANGED)) for doc_id in doc_ids}


RIGHT = {1: right_texts(OLD, is_changed=False), 2: right_texts(NEW, is_changed=True)}


def whole(layout: CollectionLayout) -> dict[str, str]:
    """Return the texts of a collection in which ``verify`` finds nothing."""
    assert verify_collection(layout) == []
    return texts(open_latest_intact_generation(layout))


def require_sentence(layout: CollectionLayout, error: CairnError) -> None:
    """Hold a refusal to one line that names a command, or says that nothing can be done here."""
    assert "\n" not in str(error)
    assert "LanceError" not in str(error)
    assert layout.command("repair") in str(error) or "ingest the sources again" in str(error)


def read(layout: CollectionLayout, path: Path) -> None:
    is_derived = any(fault.part == "derived" for fault in verify_collection(layout))
    if is_derived:
        with pytest.raises(CairnError, match=path.name) as caught:
            open_generation(layout)
        require_sentence(layout, caught.value)
    try:
        generation = open_latest_intact_generation(layout)
    except CairnError as error:
        require_sentence(layout, error)
        assert repair_collection(layout).lost, "no generation was whole, but nothing is lost"
        return
    assert generation.num_documents == len(RIGHT[generation.number])
    assert generation.number == (1 if is_derived else generation.number)
    assert generation.number == 2 or generation.warning is not None
    try:
        is_right = texts(generation) == RIGHT[generation.number]
    except Exception:  # noqa: BLE001 - rows of Lance are read without hashes; verify finds what is wrong
        is_right = False
    assert is_right or verify_collection(layout) != []


def verify(layout: CollectionLayout, path: Path) -> None:
    problems = verify_collection(layout)
    assert all(problem.sentence and "\n" not in problem.sentence for problem in problems)
    if problems:
        assert path.name in {Path(problem.file).name for problem in problems}
    else:
        assert texts(open_latest_intact_generation(layout)) == RIGHT[2]


def repair(layout: CollectionLayout, _: Path) -> None:
    report = repair_collection(layout)
    served = whole(layout)
    assert {doc_id for doc_id, text in RIGHT[2].items() if served.get(doc_id) != text} <= set(report.lost)


def write(layout: CollectionLayout, work: Callable[[], object], added: set[str], removed: set[str]) -> None:
    """Write; where that is refused, or damage stays to be found, a repair and the same again succeed."""
    try:
        work()
        refused = None
    except CairnError as error:
        refused = error
        require_sentence(layout, error)
    lost: tuple[str, ...] = ()
    if refused is not None or verify_collection(layout):
        lost = repair_collection(layout).lost
        work()
    served = whole(layout)
    assert set(served) - set(lost) - added == set(NEW) - set(lost) - removed
    assert added <= set(served)


def ingest(layout: CollectionLayout, _: Path) -> None:
    write(layout, lambda: stones.publish_documents(layout, ["z"], replaced=["z"]), {"z"}, set())


def compact(layout: CollectionLayout, _: Path) -> None:
    write(layout, lambda: compact_collection(layout), set(), set())


def delete(layout: CollectionLayout, _: Path) -> None:
    write(layout, lambda: delete_documents(layout, ["dx1"]), set(), {"dx1"})


VERBS = (read, verify, repair, ingest, compact, delete)
MARKS = {
    ("cut", repair): (),
    ("random bit flipped", read): (),
    ("random bit flipped", verify): (),
    ("cut", read): pytest.mark.slow,
    ("random bit flipped", ingest): pytest.mark.slow,
}
CELLS = [
    pytest.param(
        kind,
        damage,
        verb,
        id=f"{kind}-{damage}-{verb.__name__}",
        marks=MARKS.get((damage, verb), pytest.mark.faults),
    )
    for kind in KINDS
    for damage in DAMAGES
    for verb in VERBS
]


@pytest.mark.parametrize(("kind", "damage", "verb"), CELLS)
def test_damaged_file_leaves_a_right_state_or_one_sentence(
    layout: CollectionLayout, kind: str, damage: str, verb: Callable[[CollectionLayout, Path], None]
) -> None:
    path = path_of(layout, kind)
    DAMAGES[damage](layout, kind)
    verb(layout, path)
