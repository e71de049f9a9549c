from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from cairn.pipeline import durable
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout, read_manifest
from cairn.pipeline.index.publish import COMMIT_POINTS, GenerationFacts, publish_generation
from cairn.pipeline.index.recovery import prepare_writer
from cairn.pipeline.index.rows import LanceTables

from tests.index import stones


def test_publish_announces_the_commit_points_in_order(
    layout: CollectionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    stones.publish_documents(layout, stones.document_ids(20))
    seen: list[str] = []
    monkeypatch.setattr(durable, "_observers", [seen.append])
    stones.publish_change(layout, "n")
    assert tuple(seen) == COMMIT_POINTS
    assert len(COMMIT_POINTS) >= 12


def test_publish_flushes_all_that_it_writes(
    layout: CollectionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: Counter[int] = Counter()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.update([os.fstat(descriptor).st_ino]))
    stones.publish_documents(layout, stones.document_ids(20), with_tokens=True)
    folder = layout.generation_folder(1)
    rows = map(layout.lance_folder.joinpath, read_manifest(layout, 1).lance_files)
    written = [folder, *folder.rglob("*"), *rows]
    counts = {path.name: flushed[path.stat().st_ino] for path in written if path.is_file()}
    assert set(counts.values()) == {1}
    folders = {path for path in written if path.is_dir()} | {path.parent for path in written}
    assert all(flushed[path.stat().st_ino] for path in folders)


def test_publish_leaves_no_file_that_no_generation_needs(published: CollectionLayout) -> None:
    for prefix in ("a", "b", "c"):
        stones.publish_change(published, prefix)
    needed = {name for number in (3, 4) for name in read_manifest(published, number).lance_files}
    stored = {
        str(path.relative_to(published.lance_folder))
        for path in published.lance_folder.rglob("*")
        if path.is_file()
    }
    assert published.generation_numbers() == [3, 4]
    assert stored == needed


def test_publish_of_the_same_rows_gives_the_same_files(tmp_path: Path) -> None:
    first, second = (CollectionLayout(tmp_path / side, "stones") for side in ("a", "b"))
    hashes = [stones.publish_documents(layout, stones.document_ids(20)).files for layout in (first, second)]
    derived = ("documents.faiss", "chunks.faiss", "documents.arrow", "chunks.arrow", "passages.arrow")
    assert [hashes[0][name] for name in derived] == [hashes[1][name] for name in derived]
    manifest, ids = open_generation(first).manifest, stones.document_ids(20)
    words = sum(len(stones.text_of(doc_id).split()) for doc_id in ids)
    assert (manifest.documents, manifest.tokens) == (20, words)
    assert manifest.chunks == sum(map(stones.num_chunks_of, ids))


def test_publish_of_tables_that_do_not_fit_leaves_the_old_generation(published: CollectionLayout) -> None:
    with published.writer_lock():
        manifest = prepare_writer(published)
        assert manifest is not None
        tables = LanceTables.open(published, manifest.lance_versions)
        rows = stones.document_rows(["zz"])
        versions = tables.commit(
            documents=pa.RecordBatchReader.from_batches(rows.schema, [rows]),
            expected_documents=1,
        )
        with pytest.raises(IntegrityError, match="table `chunks` must hold"):
            publish_generation(
                published, tables, versions, GenerationFacts.of(published, manifest, "run"), IndexConfig()
            )
    assert published.current_generation_number() == 1
    assert [path.name for path in published.generations_folder.iterdir()] == ["00000001"]


def test_prepare_writer_removes_what_was_never_whole(published: CollectionLayout) -> None:
    shutil.copytree(published.generation_folder(1), published.generation_folder(2))
    (published.generations_folder / ".00000003.tmp").mkdir()
    manifest = prepare_writer(published)
    assert manifest is not None
    assert manifest.generation == 1
    assert [path.name for path in published.generations_folder.iterdir()] == ["00000001"]


def test_prepare_writer_never_guesses_among_several_generations(published: CollectionLayout) -> None:
    stones.publish_change(published, "n")
    published.current_path.unlink()
    with pytest.raises(IntegrityError, match="no CURRENT"):
        prepare_writer(published)
