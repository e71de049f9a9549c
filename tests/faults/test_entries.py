"""Entries of another kind in a collection: a folder or a link for a file, a file for a folder."""

from __future__ import annotations

from typing import Any

import pytest
from cairn.pipeline.errors import DamageError, StorageError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import delete_documents
from cairn.pipeline.index.recovery import repair_collection
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.search import searcher
from cairn.pipeline.search.ranking import PreparedSearch, rank_queries
from cairn.pipeline.search.searcher import Searcher

from tests.damages import KINDS, in_turn, put
from tests.faults.test_copies import TWICE, Encoder, replace_by_random_bytes, require_answers
from tests.faults.test_damage_matrix import RIGHT, path_of, whole
from tests.index import stones


@pytest.mark.parametrize("kind", KINDS)
def test_current_of_another_kind_is_damaged_and_replaced(layout: CollectionLayout, kind: str) -> None:
    running = Searcher(layout, Encoder())
    put(layout.current_path, kind)
    require_answers(running, 2)
    assert "CURRENT" in running.warnings[0]
    require_answers(Searcher(layout, Encoder()), 2)
    assert [problem.file for problem in verify_collection(layout)] == ["CURRENT"]
    with pytest.raises(DamageError, match="run `cairn repair"):
        delete_documents(layout, ["n1"])
    report = repair_collection(layout)
    assert (report.generation, report.lost) == (2, ())
    assert whole(layout) == RIGHT[2]
    require_answers(running, 2)
    assert running.warnings == ()


@pytest.mark.parametrize("kind", KINDS)
def test_stray_entry_among_the_generations_stops_no_writer(layout: CollectionLayout, kind: str) -> None:
    stray = layout.generations_folder / ".x.tmp"
    put(stray, kind)
    assert repair_collection(layout).generation == 2
    assert not stray.is_symlink()
    assert not stray.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_generation_folder_of_another_kind_is_removed(layout: CollectionLayout, kind: str) -> None:
    put(layout.generation_folder(2), kind)
    report = repair_collection(layout)
    assert (report.generation, report.lost) == (3, ())
    assert whole(layout) == RIGHT[2]
    assert layout.generation_numbers() == [3]


FILES = (
    "generations/00000002/MANIFEST.json",
    "generations/00000002/context.arrow",
    "copies/00000002/MANIFEST.json",
    "lance/chunks.lance/_versions/*.manifest",
    "lance/documents.lance/_deletions/*",
    "generations/00000001/MANIFEST.json",
)
FOLDERS = (
    "copies/00000002",
    "copies/00000002/chunks.lance",
    "lance/chunks.lance/_versions",
    "lance/chunks.lance/_deletions",
)


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        *in_turn(FILES, KINDS[1:]),
        *((name, "file") for name in FOLDERS),
        *((kind, "random bytes") for kind in TWICE),
    ],
)
def test_damaged_small_file_or_entry_of_another_kind_costs_no_right_answer_and_no_document(
    layout: CollectionLayout, kind: str, damage: str
) -> None:
    running = Searcher(layout, Encoder())
    require_answers(running, 2)
    if damage == "random bytes":
        replace_by_random_bytes(path_of(layout, kind))
    else:
        put(min(layout.folder.glob(kind)), damage)
    require_answers(running)
    require_answers(Searcher(layout, Encoder()))
    assert verify_collection(layout) != []
    report = repair_collection(layout)
    assert report.lost == ()
    assert report.generation == 2 or damage != "random bytes"
    assert whole(layout) == RIGHT[2]
    require_answers(running, report.generation)
    assert running.warnings == ()
    delete_documents(layout, ["n1"])
    assert verify_collection(layout) == []


STRAYS = ("_versions/latest_version_hint.json", "_transactions/1-a.txn")


@pytest.mark.parametrize(("name", "kind"), in_turn(STRAYS, KINDS[1:]))
def test_entry_that_nothing_reads_stops_no_writer(layout: CollectionLayout, name: str, kind: str) -> None:
    path = layout.lance_folder / "chunks.lance" / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    put(path, kind)
    require_answers(Searcher(layout, Encoder()), 2)
    assert delete_documents(layout, ["d4"]).generation == 3
    assert verify_collection(layout) == []


@pytest.mark.parametrize("table", ["documents", "chunks"])
def test_fifo_in_place_of_rows_is_waited_for_by_no_writer(layout: CollectionLayout, table: str) -> None:
    put(min(layout.folder.glob(f"lance/{table}.lance/data/*")), "FIFO")
    with pytest.raises(DamageError, match=r"data/.* of generation 2 .*run `cairn repair"):
        delete_documents(layout, ["d4"])
    assert repair_collection(layout).lost
    assert verify_collection(layout) == []
    delete_documents(layout, ["d4", "n1"])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_lock_of_another_kind_is_found_and_replaced(layout: CollectionLayout, kind: str) -> None:
    put(layout.lock_path, kind)
    assert [problem.file for problem in verify_collection(layout)] == [".lock"]
    with pytest.raises(StorageError, match="opening the lock of collection"):
        delete_documents(layout, ["d4"])
    assert repair_collection(layout).generation == 2
    assert verify_collection(layout) == []
    assert delete_documents(layout, ["d4"]).generation == 3


@pytest.mark.parametrize(("name", "kind"), in_turn(["documents.faiss", "chunks.arrow"], KINDS[1:]))
def test_derived_file_of_another_kind_is_made_again(layout: CollectionLayout, name: str, kind: str) -> None:
    path = min(layout.generation_folder(2).glob(f"*{name}"))
    put(path, kind)
    require_answers(Searcher(layout, Encoder()), 1)
    report = repair_collection(layout)
    assert report.lost == ()
    assert whole(layout) == RIGHT[2]


def test_link_in_place_of_a_folder_stays_and_is_named(layout: CollectionLayout) -> None:
    versions = layout.lance_folder / "chunks.lance" / "_versions"
    put(versions, "dangling link")
    with pytest.raises(StorageError, match=r"or remove the link: lance/chunks\.lance/_versions$"):
        repair_collection(layout)
    assert versions.is_symlink()


@pytest.mark.parametrize("table", ["documents", "chunks"])
def test_link_to_itself_in_place_of_the_rows_stops_no_writer_after_the_repair(
    layout: CollectionLayout, table: str
) -> None:
    put(layout.lance_folder / f"{table}.lance" / "data", "link to itself")
    assert set(repair_collection(layout).lost) == set(RIGHT[2])
    stones.publish_documents(layout, ["z"])
    assert whole(layout).keys() == {"z"}


def test_dangling_link_in_place_of_the_rows_gives_nothing_up(layout: CollectionLayout) -> None:
    rows, disk = layout.lance_folder / "documents.lance" / "data", layout.root / "disk"
    rows.rename(disk)
    rows.symlink_to("nowhere")
    with pytest.raises(
        StorageError, match=r"mount its disk, or remove the link: lance/documents\.lance/data$"
    ):
        repair_collection(layout)
    rows.unlink()
    rows.symlink_to(disk)
    assert repair_collection(layout).lost == ()
    assert whole(layout) == RIGHT[2]


def test_file_overwritten_during_a_search_costs_a_second_attempt_and_no_wrong_answer(
    layout: CollectionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Searcher(layout, Encoder())
    path = min(layout.generation_folder(2).glob("*chunks.faiss"))
    ranked: list[int] = []

    def overwrite_and_rank(search: PreparedSearch, *vectors: Any) -> Any:
        if not ranked:
            content = path.read_bytes()
            path.write_bytes(content[:100] + bytes(len(content) - 100))
        ranked.append(search.generation.number)
        return rank_queries(search, *vectors)

    monkeypatch.setattr(searcher, "rank_queries", overwrite_and_rank)
    require_answers(running, 1)
    assert ranked[:2] == [2, 1]
