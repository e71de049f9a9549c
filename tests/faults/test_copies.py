"""Second copies: with one of the two, readers serve the newest generation and repair loses no document."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import delete_documents, repair_collection, verify_collection
from cairn.pipeline.index.names import COPIES
from cairn.pipeline.search import served
from cairn.pipeline.search.searcher import Searcher

from tests.faults.test_damage_matrix import NEW, RIGHT, older_copy, path_of, right_texts, texts
from tests.index import stones

TWICE = (
    "generations/00000002/MANIFEST.json",
    "generations/00000002/lance_files.json",
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
    return layout.generation_folder(2) / COPIES / path.relative_to(base)


def require_answers(searcher: Searcher, generation: int) -> None:
    """Search with and without a filter: all documents of the generation, with their texts."""
    for filters in (FILTER, None):
        result = searcher.search("stone", top_k=60, filters=filters)
        assert result.generation == generation
        assert {hit.doc_id for hit in result.hits} == set(RIGHT[generation])
        for hit in result.hits:
            text = RIGHT[generation][hit.doc_id]
            assert all(text[part.start_char : part.end_char] == part.text for part in hit.passages)


@pytest.mark.parametrize("kind", TWICE)
def test_damaged_small_file_costs_no_answer_and_no_document(layout: CollectionLayout, kind: str) -> None:
    running = Searcher(layout, Encoder())
    require_answers(running, 2)
    replace_by_random_bytes(path_of(layout, kind))
    require_answers(running, 2)
    require_answers(fresh := Searcher(layout, Encoder()), 2)
    assert not fresh.is_outdated
    assert verify_collection(layout) != []
    report = repair_collection(layout)
    assert (report.generation, report.lost) == (2, ())
    assert verify_collection(layout) == []
    require_answers(running, 2)
    assert running.warnings == ()


def test_removed_copies_are_found_and_made_again(layout: CollectionLayout) -> None:
    before = {
        path: path.read_bytes() for path in layout.generations_folder.glob("*/copies/**/*") if path.is_file()
    }
    for number in (1, 2):
        shutil.rmtree(layout.generation_folder(number) / COPIES)
    found = {(problem.generation, problem.file) for problem in verify_collection(layout)}
    assert {(1, f"{COPIES}/MANIFEST.json"), (2, f"{COPIES}/MANIFEST.json")} <= found
    report = repair_collection(layout)
    assert (report.generation, report.lost) == (2, ())
    assert "of generation 1, " in report.action
    assert verify_collection(layout) == []
    assert {path: path.read_bytes() for path in before} == before


def test_what_was_mended_of_the_older_generation_is_said(layout: CollectionLayout) -> None:
    (layout.generation_folder(1) / "MANIFEST.json").write_bytes(b"")
    action = repair_collection(layout).action
    assert action == "generation 2 is whole; of generation 1, 1 file(s) were mended"


def test_reader_of_a_second_copy_says_so(layout: CollectionLayout) -> None:
    path_of(layout, "documents: newest version").write_bytes(b"")
    warning = open_generation(layout).warning
    assert warning is not None
    assert "got 0: its second copy is read; run `cairn repair stones" in warning


@pytest.mark.parametrize("kind", TWICE)
def test_damaged_copy_is_found_and_mended(layout: CollectionLayout, kind: str) -> None:
    path = copy_of(layout, kind)
    replace_by_random_bytes(path)
    assert [problem.file for problem in verify_collection(layout)] == [
        f"{COPIES}/{path.relative_to(layout.generation_folder(2) / COPIES)}"
    ]
    assert repair_collection(layout).lost == ()
    assert verify_collection(layout) == []
    assert open_generation(layout).warning is None


@pytest.mark.parametrize("kind", TWICE)
def test_both_copies_damaged_leave_a_whole_collection_and_the_lost_named(
    layout: CollectionLayout, kind: str
) -> None:
    running = Searcher(layout, Encoder())
    for path in (copy_of(layout, kind), path_of(layout, kind)):
        path.write_bytes(b"")
    assert running.search("stone", filters=FILTER).hits
    report = repair_collection(layout)
    assert verify_collection(layout) == []
    kept = texts(open_generation(layout))
    assert {doc_id for doc_id in NEW if kept.get(doc_id) != RIGHT[2][doc_id]} <= set(report.lost)


def test_writer_mends_before_it_writes(layout: CollectionLayout) -> None:
    for kind in TWICE:
        path_of(layout, kind).write_bytes(b"")
    delete_documents(layout, ["dx1"])
    assert verify_collection(layout) == []
    right = right_texts([doc_id for doc_id in NEW if doc_id != "dx1"], is_changed=True)
    assert texts(open_generation(layout)) == right


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
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 1
        path.write_bytes(content)
    else:
        path.rename(path.with_suffix(".gone" if harm == "renamed" else ".tmp"))
        path.with_suffix(".tmp").unlink(missing_ok=True)
    require_answers(running, 1)
    assert running.is_outdated
    assert repair_collection(layout).generation == 1
    require_answers(running, 1)
    assert running.warnings == ()


def test_rows_that_turn_out_unreadable_are_left_for_the_generation_before_within_the_search(
    layout: CollectionLayout,
) -> None:
    path = path_of(layout, "documents: last rows")
    size = path.stat().st_size
    path.write_bytes(bytes(size))  # of the right size: only reading or hashing it tells
    fresh = Searcher(layout, Encoder())
    require_answers(fresh, 1)
    assert fresh.is_outdated


def test_rows_of_both_generations_damaged_are_a_refusal_until_the_repair(
    layout: CollectionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Searcher(layout, Encoder())
    path_of(layout, "documents: first rows").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(Exception, match=r"must have .* bytes, got 0; run `cairn repair stones"):
            running.search("stone")
    assert not running.is_answering
    repaired = repair_collection(layout)
    assert running.search("stone", filters=FILTER).generation == repaired.generation
    assert (running.is_answering, running.warnings) == (True, ())


def test_mapped_file_that_is_renamed_away_answers_on_with_a_warning(
    layout: CollectionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Searcher(layout, Encoder())
    path = layout.generation_folder(2) / "chunks.faiss"
    path.rename(path.with_suffix(".gone"))
    require_answers(running, 2)
    assert "chunks.faiss of generation 2 is missing" in running.warnings[0]
    monkeypatch.setattr(served, "RETRY_SECONDS", 0.0)
    path.with_suffix(".gone").rename(path)
    running._retry_at = 0.0
    require_answers(running, 2)
    assert running.warnings == ()


def test_filter_is_answered_while_a_version_that_no_generation_reads_is_broken(
    layout: CollectionLayout,
) -> None:
    newest = path_of(layout, "documents: newest version")
    newest.with_name(f"{int(newest.stem) - 1}.manifest").write_bytes(b"half")
    fresh = Searcher(layout, Encoder())
    require_answers(fresh, 2)
    assert fresh.warnings == ()


def test_older_copy_of_each_small_file_is_no_whole_one(layout: CollectionLayout) -> None:
    kind = "generations/00000002/lance_files.json"
    older = older_copy(layout, kind)
    assert older is not None
    shutil.copyfile(older, path_of(layout, kind))
    require_answers(Searcher(layout, Encoder()), 2)
