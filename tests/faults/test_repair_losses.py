"""No repair loses a document without naming it: not with a folder gone, not killed, not failing half-way."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cairn.pipeline.durable import observe_commit_points
from cairn.pipeline.index.generation import open_latest_intact_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import delete_documents, repair_collection, verify_collection
from cairn.pipeline.index.verify import losses_path

from tests.faults.test_damage_matrix import NEW, RIGHT, path_of, template, texts
from tests.index import stones

__all__ = ["template"]

KILLED = 137
POINTS = ("folder.set-aside", "lance-rolled-back", "documents-deleted", "generation-renamed")
LATE_POINTS = ("current-replaced", "old-generations-pruned")


def remove(folder: Path, _: Path) -> None:
    shutil.rmtree(folder)


def rename(folder: Path, _: Path) -> None:
    folder.rename(folder.with_name(f"{folder.name}x"))


def empty(folder: Path, _: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def replace_by_older(folder: Path, older: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(older, folder)


def damage_rows(layout: CollectionLayout) -> None:
    """Cut the first rows, which both generations read."""
    path_of(layout, "documents: first rows").write_bytes(b"")


def damage_newest_rows(layout: CollectionLayout) -> None:
    """Cut the rows that the newest generation alone reads."""
    path_of(layout, "documents: last rows").write_bytes(b"")


def require_all_named(layout: CollectionLayout, lost: tuple[str, ...]) -> None:
    served = texts(open_latest_intact_generation(layout))
    assert {doc_id for doc_id, text in RIGHT[2].items() if served.get(doc_id) != text} <= set(lost)


@pytest.mark.parametrize("damage", [remove, rename, empty, replace_by_older])
def test_lost_folder_of_the_newest_generation_costs_no_document(
    layout: CollectionLayout, damage: Callable[[Path, Path], None]
) -> None:
    damage(layout.generation_folder(2), layout.generation_folder(1))
    report = repair_collection(layout)
    assert (report.generation, report.lost) == (3, ())
    assert "derived again" in report.action
    assert texts(open_latest_intact_generation(layout)) == RIGHT[2]
    assert verify_collection(layout) == []
    assert delete_documents(layout, ["d4"]).generation == 4


def test_rows_of_another_context_are_not_served_with_the_older_one(layout: CollectionLayout) -> None:
    stones.publish_documents(layout, NEW, replaced=NEW, version=2, context=b"drawn again")
    shutil.rmtree(layout.generation_folder(3))
    report = repair_collection(layout)
    assert report.generation == 2
    assert set(report.lost) == set(NEW)


def test_lost_folder_with_damaged_rows_names_what_changed(layout: CollectionLayout) -> None:
    shutil.rmtree(layout.generation_folder(2))
    path_of(layout, "chunks: last rows").write_bytes(b"")
    report = repair_collection(layout)
    assert report.generation == 1
    require_all_named(layout, report.lost)
    assert report.lost


def test_lost_folder_and_tags_say_that_the_loss_cannot_be_told(layout: CollectionLayout) -> None:
    shutil.rmtree(layout.generation_folder(2))
    path_of(layout, "documents: served tag").unlink()
    assert "generation 2 had changed cannot be told" in repair_collection(layout).action


def test_lost_folder_and_current_name_what_changed(layout: CollectionLayout) -> None:
    shutil.rmtree(layout.generation_folder(2))
    layout.current_path.unlink()
    require_all_named(layout, repair_collection(layout).lost)


def test_failing_clean_up_after_publication_is_said_beside_the_losses(layout: CollectionLayout) -> None:
    path = path_of(layout, "documents: first rows")
    path.unlink()
    path.symlink_to(path.name)
    report = repair_collection(layout)
    assert report.generation == 3
    assert report.lost
    require_all_named(layout, report.lost)


def _repair_until(root: Path, name: str, point: str) -> None:
    observe_commit_points(lambda reached: os._exit(KILLED) if reached == point else None)
    repair_collection(CollectionLayout(root, name))


@pytest.mark.parametrize(
    ("damage", "point"),
    [(damage_rows, point) for point in (*POINTS[1:], *LATE_POINTS)]
    + [(damage_newest_rows, point) for point in POINTS[:2]],
)
def test_killed_repair_leaves_the_names_to_the_next(
    layout: CollectionLayout, damage: Callable[[CollectionLayout], None], point: str
) -> None:
    damage(layout)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_repair_until, args=(layout.root, layout.name, point))
    process.start()
    process.join(120)
    assert process.exitcode == KILLED
    assert "losses" in {problem.part for problem in verify_collection(layout)}
    report = repair_collection(layout)
    assert report.lost
    require_all_named(layout, report.lost)
    assert verify_collection(layout) == []
    assert not losses_path(layout).exists()
    assert repair_collection(layout).lost == ()


def test_record_of_a_repair_that_gave_up_nothing_names_nothing(layout: CollectionLayout) -> None:
    """The damaged file came back, from a backup, before the next repair."""
    path = path_of(layout, "documents: first rows")
    content = path.read_bytes()
    path.write_bytes(b"")
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_repair_until, args=(layout.root, layout.name, "lance-rolled-back"))
    process.start()
    process.join(120)
    path.write_bytes(content)
    assert losses_path(layout).exists()
    assert repair_collection(layout).lost == ()
    assert texts(open_latest_intact_generation(layout)) == RIGHT[2]
    assert verify_collection(layout) == []
