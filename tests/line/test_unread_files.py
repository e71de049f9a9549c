"""Ingests that leave unchanged files unread, and what makes them read everything again."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.corpus import file_identity, ledger
from cairn.pipeline.errors import TryAgainError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import compact_collection, delete_documents
from cairn.pipeline.index.recovery import repair_collection
from cairn.pipeline.line import build_index as line
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.plan_index import plan_index
from cairn.pipeline.line.recontextualise import recontextualise
from cairn.pipeline.types import IngestReport

from tests.small_ingests import stopped_at, write_texts
from tests.stored_collections import stored

NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def trust_fresh_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_identity, "SETTLED_SECONDS", 0.0)


def write(folder: Path, name: str, texts: Sequence[str]) -> None:
    folder.mkdir(exist_ok=True)
    write_texts(folder / f"{name}.parquet", texts, name, year=[2000] * len(texts))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name in NAMES:
        write(tmp_path / "corpus", name, ["the stone path", "the old river", "a mountain walk"])
    return tmp_path / "corpus"


@pytest.fixture
def ingest(root: Path, corpus: Path, config: IngestConfig) -> Callable[..., IngestReport]:
    """Return a function that ingests the corpus; settings of the ingest may be given."""

    def run(**settings: Any) -> IngestReport:
        return build_index([str(corpus)], root, "c", replace(config, **settings))

    return run


@pytest.fixture
def layout(root: Path, ingest: Callable[..., IngestReport]) -> CollectionLayout:
    """The collection, ingested once."""
    assert ingest().unread_files == 0
    return CollectionLayout(root, "c")


def test_rerun_reads_the_one_file_that_changed_as_a_plan_says_which_records_nothing(
    layout: CollectionLayout, corpus: Path, config: IngestConfig, ingest: Callable[..., IngestReport]
) -> None:
    assert ingest().unread_files == 3
    write(corpus, "b", ["the stone path", "the old cat"])
    before = layout.sources_path.read_bytes()
    plan = plan_index([str(corpus)], layout.root, "c", replace(config, sync=True))
    assert layout.sources_path.read_bytes() == before
    report = ingest(sync=True)
    counted = ("rows", "indexed", "unchanged", "quarantined", "deleted", "files", "unread_files")
    assert {name: getattr(report, name) for name in counted} == {name: plan[name] for name in counted}
    assert (report.rows, report.indexed, report.unchanged, report.deleted) == (8, 1, 7, 1)
    assert (report.files, report.unread_files) == (3, 2)
    assert stored(layout.root)["b1"]["text"] == "the old cat"
    assert ingest().unread_files == 3


def returned_to_the_first(layout: CollectionLayout, corpus: Path, config: IngestConfig) -> None:
    """Publish a change, lose what says so, and repair."""
    write(corpus, "b", ["the old cat", "the old river", "a mountain walk"])
    build_index([str(corpus)], layout.root, "c", config)
    for folder in (layout.generation_folder(2), layout.copies_folder(2)):
        (folder / "MANIFEST.json").write_bytes(b"{}")
    assert repair_collection(layout).generation == 3, "the rows of generation 1, published again"


def moved(layout: CollectionLayout, corpus: Path, _: IngestConfig) -> None:
    """Put other files of the same content into the place of those that were read."""
    shutil.copytree(corpus, corpus.with_name("other"))
    shutil.rmtree(corpus)
    corpus.with_name("other").rename(corpus)


BETWEEN: dict[str, tuple[Callable[..., Any], tuple[int, int]]] = {
    "nothing": (lambda *_: None, (3, 0)),
    "compacted": (lambda layout, *_: compact_collection(layout), (3, 0)),
    "new context": (lambda layout, _, config: recontextualise(layout.root, "c", config), (3, 0)),
    "lost record": (lambda layout, *_: layout.sources_path.unlink(), (0, 0)),
    "deleted document": (lambda layout, *_: delete_documents(layout, ["a1"]), (0, 1)),
    "repair": (returned_to_the_first, (0, 1)),
    "other files": (moved, (0, 0)),
}
"""What happens between two ingests, and the files that the second leaves unread with what it indexes."""


@pytest.mark.parametrize(("happens", "expected"), BETWEEN.values(), ids=BETWEEN)
def test_unchanged_files_are_read_again_once_where_their_documents_may_not_be_there(
    layout: CollectionLayout,
    corpus: Path,
    config: IngestConfig,
    ingest: Callable[..., IngestReport],
    happens: Callable[..., Any],
    expected: tuple[int, int],
) -> None:
    happens(layout, corpus, config)
    report = ingest()
    assert (report.unread_files, report.indexed, report.rows) == (*expected, 9)
    assert ingest().unread_files == 3
    assert ingest(reread=True).unread_files == 0


def test_jobs_in_parts_record_files_when_the_last_one_publishes(
    layout: CollectionLayout, corpus: Path, config: IngestConfig
) -> None:
    write(corpus, "b", ["the old cat"])
    for step in ({"until": "encode"}, {"is_encoded": True}):
        report = build_index([str(corpus)], layout.root, "c", config, **step)
        assert (report.unread_files, report.indexed) == (2, 1)
    assert build_index([str(corpus)], layout.root, "c", config).unread_files == 3


@pytest.mark.parametrize(
    ("point", "unread_files"),
    [("shard-written", 2), ("chunks-added", 2), ("current-replaced", 0), ("old-generations-pruned", 0)],
)
def test_killed_run_leaves_only_files_unread_that_an_earlier_one_finished(
    layout: CollectionLayout, corpus: Path, ingest: Callable[..., IngestReport], point: str, unread_files: int
) -> None:
    write(corpus, "b", ["the old cat"])
    with stopped_at(point):
        ingest(sync=True, max_deleted=1.0)
    assert ingest(sync=True, max_deleted=1.0).unread_files == unread_files
    assert sorted(stored(layout.root)) == ["a0", "a1", "a2", "b0", "c0", "c1", "c2"]
    assert ingest().unread_files == 3


def test_ingest_succeeds_where_its_files_cannot_be_recorded(
    layout: CollectionLayout,
    corpus: Path,
    ingest: Callable[..., IngestReport],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warned = list[str]()
    monkeypatch.setattr(line.log, "warning", lambda message, *_: warned.append(message))
    monkeypatch.setattr(ledger, "BUSY_SECONDS", 0.1)
    write(corpus, "b", ["the old cat"])
    with closing(sqlite3.connect(layout.sources_path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM files")
        assert ingest().indexed == 1
    assert warned == ["sources.not_recorded collection=%s error=%s"]
    assert (ingest().unread_files, ingest().unread_files) == (0, 3)


def test_damaged_record_is_removed_and_the_next_run_reads_all(
    layout: CollectionLayout, corpus: Path, ingest: Callable[..., IngestReport]
) -> None:
    write(corpus, "b", ["the old cat"])
    content = bytearray(layout.sources_path.read_bytes())
    with sqlite3.connect(layout.sources_path) as record:
        (page,) = record.execute("SELECT rootpage FROM sqlite_master WHERE name = 'documents'").fetchone()
        (size,) = record.execute("PRAGMA page_size").fetchone()
    content[(page - 1) * size : page * size] = b"\xff" * size
    layout.sources_path.write_bytes(content)
    with pytest.raises(TryAgainError, match=r"sources\.sqlite is damaged"):
        ingest()
    report = ingest()
    assert (report.unread_files, report.indexed) == (0, 1)
