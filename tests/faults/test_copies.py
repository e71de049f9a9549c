"""What a repair saves and what it names: small files that are there twice, folders, rows, a killed repair."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.errors import CairnError, DamageError, StorageError
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import open_generation, open_latest_intact_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import delete_documents
from cairn.pipeline.index.names import COPIES
from cairn.pipeline.index.recovery import RepairReport, repair_collection
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.search import searcher
from cairn.pipeline.search.ranking import PreparedSearch, rank_queries
from cairn.pipeline.search.searcher import Searcher

from tests.damages import KINDS, cut, flip, in_turn, put
from tests.faults.test_damage_matrix import NEW, OLD, RIGHT, path_of, right_texts, texts, whole
from tests.index import stones
from tests.nightly.forks import forked

TWICE = (
    "generations/00000002/MANIFEST.json",
    "generations/00000002/context.arrow",
    "documents: newest version",
    "documents: deletions",
    "chunks: newest version",
    "chunks: deletions",
)
FILTER = {"type": "gte", "key": "year", "value": 2000}


class Encoder:
    fingerprint = "e" * 64

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        return np.concatenate([stones.unit_vectors(query, 1) for query in queries])


def replace_by_random_bytes(path: Path) -> None:
    content = random.Random(path.name).randbytes(path.stat().st_size)
    path.unlink()
    path.write_bytes(content)


def copy_of(layout: CollectionLayout, kind: str) -> Path:
    path = path_of(layout, kind)
    base = layout.generation_folder(2) if kind.startswith("generations") else layout.lance_folder
    return layout.copies_folder(2) / path.relative_to(base)


def require_answers(searcher: Searcher, generation: int | None = None) -> None:
    """Search with and without a filter: all documents of the generation, with their texts."""
    for filters in (FILTER, None):
        result = searcher.search("stone", top_k=60, filters=filters)
        assert result.generation == (generation or result.generation)
        right = RIGHT[min(result.generation, 2)]
        assert {hit.doc_id for hit in result.hits} == set(right)
        for hit in result.hits:
            text = right[hit.doc_id]
            assert all(text[part.start_char : part.end_char] == part.text for part in hit.passages)


def require_all_named(layout: CollectionLayout, report: RepairReport) -> None:
    """Hold a repair to a whole collection, and to a name for each document that is lost or older."""
    served = whole(layout)
    lost = {doc_id for doc_id, text in RIGHT[2].items() if served.get(doc_id) != text}
    assert lost <= set(report.lost) or "cannot be told" in report.action


def saved(layout: CollectionLayout, *generations: int) -> RepairReport:
    """Repair a collection that must lose nothing, and serve one of these generations then."""
    report = repair_collection(layout)
    assert (report.generation in (generations or (report.generation,)), report.lost) == (True, ())
    assert whole(layout) == RIGHT[2]
    return report


HARMS = (cut, lambda path: put(path, "FIFO"), lambda path: path.write_bytes(b""))


@pytest.mark.parametrize(("kind", "damage"), in_turn(TWICE, HARMS))
def test_writer_mends_small_files_before_it_writes(
    layout: CollectionLayout, kind: str, damage: Callable[[Path], None]
) -> None:
    damage(path_of(layout, kind))
    delete_documents(layout, ["dx1"])
    assert whole(layout) == right_texts([doc_id for doc_id in NEW if doc_id != "dx1"], is_changed=True)


def test_removed_copies_are_found_and_made_again(layout: CollectionLayout) -> None:
    copies = layout.folder / COPIES
    before = {path: path.read_bytes() for path in copies.rglob("*") if path.is_file()}
    shutil.rmtree(copies)
    found = {(problem.generation, problem.file) for problem in verify_collection(layout)}
    assert {(1, f"{COPIES}/MANIFEST.json"), (2, f"{COPIES}/MANIFEST.json")} <= found
    saved(layout, 2)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("kind", TWICE)
def test_damaged_copy_is_found_and_mended(layout: CollectionLayout, kind: str) -> None:
    path = copy_of(layout, kind)
    replace_by_random_bytes(path)
    found = [problem.file for problem in verify_collection(layout)]
    assert found == [f"{COPIES}/{path.relative_to(layout.copies_folder(2))}"]
    saved(layout)
    assert open_generation(layout).warning is None


@pytest.mark.parametrize("kind", TWICE)
def test_both_copies_damaged_leave_a_whole_collection_and_the_lost_named(
    layout: CollectionLayout, kind: str
) -> None:
    running = Searcher(layout, Encoder())
    for path in (copy_of(layout, kind), path_of(layout, kind)):
        path.write_bytes(b"")
    assert running.search("stone", filters=FILTER).hits
    require_all_named(layout, repair_collection(layout))


@pytest.mark.parametrize("damage", ["gone", "the older one", *KINDS])
@pytest.mark.parametrize("is_current_lost", [False, True])
def test_lost_folder_of_the_newest_generation_costs_no_document(
    layout: CollectionLayout, damage: str, is_current_lost: bool
) -> None:
    folder = layout.generation_folder(2)
    shutil.rmtree(folder)
    if damage == "the older one":
        shutil.copytree(layout.generation_folder(1), folder)
    elif damage != "gone":
        put(folder, damage)
    if is_current_lost:
        layout.current_path.unlink()
    saved(layout, 3)
    assert layout.generation_numbers() == [3]
    assert delete_documents(layout, ["d4"]).generation == 4


@pytest.mark.parametrize("are_copies_lost", [False, True])
@pytest.mark.parametrize("is_current_lost", [False, True])
def test_rows_without_generations_are_no_new_collection(
    layout: CollectionLayout, is_current_lost: bool, are_copies_lost: bool
) -> None:
    shutil.rmtree(layout.generations_folder)
    if is_current_lost:
        layout.current_path.unlink()
    if are_copies_lost:
        shutil.rmtree(layout.copies_root)
    is_named = is_current_lost or are_copies_lost  # else the next writer mends it from the copies
    for verb in (open_generation, lambda own: stones.publish_documents(own, ["z"])) if is_named else ():
        with pytest.raises(CairnError, match="run `cairn repair stones"):
            verb(layout)
    assert verify_collection(layout) != []
    if are_copies_lost:
        with pytest.raises(CairnError, match="no generation that is whole"):
            repair_collection(layout)
        assert path_of(layout, "documents: last rows").is_file()
        return
    saved(layout, 3)


def test_first_generation_lost_beside_pending_work_is_no_new_collection(tmp_path: Path) -> None:
    layout = CollectionLayout(tmp_path / "root", "stones")
    stones.publish_documents(layout, OLD)
    shutil.rmtree(layout.generations_folder)
    layout.current_path.unlink()
    assert not layout.exists(), "a first ingest that was killed"
    layout.pending_path.write_text('{"base": 1, "key": "k"}')
    with pytest.raises(CairnError, match="has rows but no CURRENT; run `cairn repair stones"):
        stones.publish_documents(layout, ["z"])
    assert repair_collection(layout).lost == ()
    assert set(open_generation(layout).doc_ids.to_pylist()) == set(OLD)


@pytest.mark.parametrize(("num_others", "are_copies_lost"), [(2, False), (3, True), (5, False)])
def test_current_of_another_collection_costs_no_document(
    layout: CollectionLayout, tmp_path: Path, num_others: int, are_copies_lost: bool
) -> None:
    other = CollectionLayout(tmp_path / "other", "stones")
    for number in range(num_others):
        stones.publish_documents(other, [f"other-{number}"])
    layout.current_path.write_bytes(other.current_path.read_bytes())
    if are_copies_lost:
        shutil.rmtree(layout.copies_root)
    for verb in (open_generation, lambda own: stones.publish_documents(own, ["z"])):
        with pytest.raises(CairnError, match="run `cairn repair stones"):
            verb(layout)
    assert "CURRENT names it again" in saved(layout, 2).action


def test_lost_folder_with_damaged_rows_names_what_they_held(layout: CollectionLayout) -> None:
    path_of(layout, "chunks: last rows").write_bytes(b"")
    shutil.rmtree(layout.generation_folder(2))
    require_all_named(layout, repair_collection(layout))


def test_lost_folder_and_copies_say_that_the_loss_cannot_be_told(layout: CollectionLayout) -> None:
    shutil.rmtree(layout.generation_folder(2))
    shutil.rmtree(layout.copies_folder(2))
    report = repair_collection(layout)
    assert "generation 2 had changed cannot be told" in report.action
    assert texts(open_generation(layout)) == RIGHT[1]


@pytest.mark.parametrize("are_copies_lost", [False, True])
@pytest.mark.parametrize("name", ["deleted.bits", "tokens.arrow"])
def test_file_that_both_generations_share_is_mended_or_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, are_copies_lost: bool
) -> None:
    """Deleted bits by their copies; token vectors, and bits whose copies are lost, from the rows."""
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    layout = CollectionLayout(tmp_path / "root", "stones")
    stones.publish_documents(layout, OLD, with_tokens=True)
    stones.delete(layout, [OLD[3], OLD[7]])
    stones.publish_documents(layout, ["new"], with_tokens=True)
    whole = open_generation(layout).doc_ids
    path = layout.generation_folder(3) / name
    assert path.stat().st_nlink > 1
    cut(path)
    for copy in layout.copies_root.glob(f"*/{name}") if are_copies_lost else ():
        cut(copy)
    with pytest.raises(CairnError, match=name):
        open_latest_intact_generation(layout)
    assert repair_collection(layout).lost == ()
    found = open_generation(layout)
    assert found.doc_ids.equals(whole)
    assert found.token_vectors is not None
    assert verify_collection(layout) == []


@pytest.mark.parametrize("harm", ["cut", "flipped", "removed", "renamed"])
def test_newest_rows_damaged_while_they_are_served_leave_the_generation_before_answering(
    layout: CollectionLayout, harm: str
) -> None:
    running = Searcher(layout, Encoder())
    require_answers(running, 2)
    path = path_of(layout, "documents: last rows")
    if harm == "cut":
        os.truncate(path, 100)
    elif harm == "flipped":
        flip(path, path.stat().st_size // 3)
    else:
        path.rename(path.with_suffix(".gone" if harm == "renamed" else ".tmp"))
        path.with_suffix(".tmp").unlink(missing_ok=True)
    require_answers(running, 1)
    assert running.is_outdated
    require_all_named(layout, repair_collection(layout))
    assert running.search("stone").generation == 3
    assert running.warnings == ()


def test_rows_that_turn_out_unreadable_are_left_for_the_generation_before_within_the_search(
    layout: CollectionLayout,
) -> None:
    path = path_of(layout, "documents: last rows")
    path.write_bytes(bytes(path.stat().st_size))  # of the right size: only reading or hashing it tells
    fresh = Searcher(layout, Encoder())
    require_answers(fresh, 1)
    assert fresh.is_outdated


def test_rows_of_both_generations_damaged_are_a_refusal_until_the_repair(layout: CollectionLayout) -> None:
    running = Searcher(layout, Encoder())
    path_of(layout, "documents: first rows").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(CairnError, match=r"must have .* bytes, got 0; run `cairn repair stones"):
            running.search("stone")
    assert not running.is_answering
    repaired = repair_collection(layout)
    assert running.search("stone", filters=FILTER).generation == repaired.generation
    assert (running.is_answering, running.warnings) == (True, ())


def test_mapped_file_that_is_renamed_away_answers_on_for_its_holder_alone(layout: CollectionLayout) -> None:
    running = Searcher(layout, Encoder())
    path = layout.generation_folder(2) / "chunks.faiss"
    path.rename(path.with_suffix(".gone"))
    require_answers(running, 2)
    fresh = Searcher(layout, Encoder())
    require_answers(fresh, 1)
    assert "chunks.faiss of generation 2 is missing" in fresh.warnings[0]


def test_version_that_no_generation_reads_stops_no_writer(layout: CollectionLayout) -> None:
    newest = path_of(layout, "documents: newest version")
    newest.with_name(f"{int(newest.stem) - 1}.manifest").write_bytes(b"half")
    require_answers(Searcher(layout, Encoder()), 2)
    assert delete_documents(layout, ["d4"]).generation == 3
    assert verify_collection(layout) == []


def test_failing_clean_up_after_publication_is_said_beside_the_losses(layout: CollectionLayout) -> None:
    path = path_of(layout, "documents: first rows")
    path.unlink()
    path.symlink_to(path.name)
    report = repair_collection(layout)
    assert (report.generation, bool(report.lost)) == (3, True)
    require_all_named(layout, report)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["first rows", "last rows"])
@pytest.mark.parametrize(
    "point", ["strays-removed", "documents-deleted", "manifest-written", "generation-renamed"]
)
def test_killed_repair_gives_up_nothing_that_the_next_does_not_name(
    layout: CollectionLayout, kind: str, point: str
) -> None:
    path = path_of(layout, f"documents: {kind}")
    content = path.read_bytes()
    path.write_bytes(b"")
    assert forked(repair_collection, layout, kill=point).was_killed
    shutil.copytree(layout.root, layout.root.with_name("restored"))
    report = repair_collection(layout)
    assert report.lost
    require_all_named(layout, report)
    # The damaged file came back, from a backup, before the next repair: nothing was lost.
    restored = CollectionLayout(layout.root.with_name("restored"), layout.name)
    (restored.folder / path.relative_to(layout.folder)).write_bytes(content)
    assert repair_collection(restored).lost == ()
    assert whole(restored) == RIGHT[2]


def test_older_current_put_back_after_a_repair_costs_no_document(layout: CollectionLayout) -> None:
    older = layout.current_path.read_bytes()
    path_of(layout, "generations/00000002/chunks.faiss").unlink()
    assert repair_collection(layout).generation == 3
    layout.current_path.write_bytes(older)
    delete_documents(layout, ["dx1"])
    assert whole(layout) == right_texts([doc_id for doc_id in NEW if doc_id != "dx1"], is_changed=True)


def test_older_current_of_a_generation_that_is_gone_keeps_the_damaged_newest(
    layout: CollectionLayout,
) -> None:
    older = layout.current_path.read_bytes()
    for doc_id in NEW[:3]:
        delete_documents(layout, [doc_id])
    served = texts(open_generation(layout))
    layout.current_path.write_bytes(older)
    newest = layout.generation_folder(layout.generation_numbers()[-1])
    replace_by_random_bytes(next(newest.glob("*chunks.faiss")))
    assert repair_collection(layout, keeps_all=True).lost == ()
    assert whole(layout) == served


@pytest.mark.slow
def test_killed_return_to_the_generation_before_is_told_by_the_next(layout: CollectionLayout) -> None:
    layout.current_path.write_bytes(b"damaged")
    for kind in ("documents: newest version", "chunks: newest version"):
        copy_of(layout, kind).unlink()
        path_of(layout, kind).unlink()
    assert forked(repair_collection, layout, kill="strays-removed").was_killed
    assert "cannot be told" in repair_collection(layout).action
    assert texts(open_generation(layout)) == RIGHT[1]


@pytest.mark.parametrize("is_gone", [False, True])
def test_damaged_older_generation_is_dropped_by_repair(layout: CollectionLayout, is_gone: bool) -> None:
    if is_gone:
        shutil.rmtree(layout.generation_folder(1))
        shutil.rmtree(layout.copies_folder(1))
    else:
        cut(layout.generation_folder(1) / "chunks.faiss")
    assert [problem.generation for problem in verify_collection(layout)] == [1]
    assert saved(layout, 2).action.endswith("generation 1, which was damaged, is removed")
    assert layout.generation_numbers() == [2]


def test_without_any_whole_context_repair_and_writers_refuse_and_change_nothing(
    layout: CollectionLayout,
) -> None:
    for path in layout.folder.rglob("context.arrow"):
        replace_by_random_bytes(path)
    before = sorted(layout.generations_folder.rglob("*"))
    for verb, words in (
        (repair_collection, "no generation that is whole"),
        (lambda own: delete_documents(own, ["d1"]), r"context\.arrow"),
    ):
        with pytest.raises(CairnError, match=words):
            verb(layout)
    assert sorted(layout.generations_folder.rglob("*")) == before


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
    saved(layout, 2)
    require_answers(running, 2)
    assert running.warnings == ()


@pytest.mark.parametrize("kind", KINDS)
def test_stray_entry_among_the_generations_stops_no_writer(layout: CollectionLayout, kind: str) -> None:
    stray = layout.generations_folder / ".x.tmp"
    put(stray, kind)
    saved(layout, 2)
    assert not os.path.lexists(stray)


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
    report = saved(layout, *(2, 3)[: 1 + (damage != "random bytes")])
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
    with pytest.raises(StorageError, match="opening the lock of collection 'stones' failed") as caught:
        delete_documents(layout, ["d4"])
    assert caught.value.exit_code == 1
    saved(layout, 2)
    assert delete_documents(layout, ["d4"]).generation == 3


@pytest.mark.parametrize(("name", "kind"), in_turn(["documents.faiss", "chunks.arrow"], KINDS[1:]))
def test_derived_file_of_another_kind_is_made_again(layout: CollectionLayout, name: str, kind: str) -> None:
    path = min(layout.generation_folder(2).glob(f"*{name}"))
    put(path, kind)
    require_answers(Searcher(layout, Encoder()), 1)
    saved(layout)


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
    saved(layout)


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
