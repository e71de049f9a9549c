from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from cairn.pipeline import durable
from cairn.pipeline.config import IndexConfig
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.lance_files import read_lance_files
from cairn.pipeline.index.lance_index import CHUNKS, DOCUMENTS, LanceTables
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.publish import COMMIT_POINTS, GenerationFacts, prepare_writer, publish_generation


def test_publish_announces_the_commit_points_in_order(
    layout: CollectionLayout, stones: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stones.publish_documents(layout, stones.document_ids(20))
    seen: list[str] = []
    monkeypatch.setattr(durable, "_observers", [seen.append])
    stones.publish_change(layout, "n")
    assert tuple(seen) == COMMIT_POINTS
    assert len(COMMIT_POINTS) >= 12


def test_publish_flushes_all_that_it_writes(
    layout: CollectionLayout, stones: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: Counter[int] = Counter()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.update([os.fstat(descriptor).st_ino]))
    stones.publish_documents(layout, stones.document_ids(20), with_tokens=True)
    folder = layout.generation_folder(1)
    written = [folder, *folder.rglob("*"), *map(layout.lance_folder.joinpath, read_lance_files(folder))]
    counts = {path.name: flushed[path.stat().st_ino] for path in written if path.is_file()}
    assert set(counts.values()) == {1}
    folders = {path for path in written if path.is_dir()} | {path.parent for path in written}
    assert all(flushed[path.stat().st_ino] for path in folders)


def test_publish_keeps_two_generations_and_their_tags(
    published: CollectionLayout, stones: ModuleType
) -> None:
    for prefix in ("a", "b", "c"):
        stones.publish_change(published, prefix)
    assert published.generation_numbers() == [3, 4]
    tables = LanceTables.open(published)
    for table, version in tables.versions().items():
        assert sorted(tables.tags(table, version)) == ["generation-3", "generation-4"]


def test_publish_leaves_no_file_that_no_generation_needs(
    published: CollectionLayout, stones: ModuleType
) -> None:
    for prefix in ("a", "b", "c"):
        stones.publish_change(published, prefix)
    needed = {name for number in (3, 4) for name in read_lance_files(published.generation_folder(number))}
    stored = {
        str(path.relative_to(published.lance_folder))
        for path in published.lance_folder.rglob("*")
        if path.is_file()
    }
    assert {name for name in stored - needed if "/_refs/" not in name and "/_transactions/" not in name} == {
        f"{table}.lance/_versions/latest_version_hint.json" for table in (DOCUMENTS, CHUNKS)
    }


def test_publish_of_the_same_rows_gives_the_same_files(tmp_path: Path, stones: ModuleType) -> None:
    first, second = (CollectionLayout(tmp_path / side, "stones") for side in ("a", "b"))
    hashes = [stones.publish_documents(layout, stones.document_ids(20)).files for layout in (first, second)]
    derived = ("documents.faiss", "chunks.faiss", "documents.arrow", "chunks.arrow", "passages.arrow")
    assert [hashes[0][name] for name in derived] == [hashes[1][name] for name in derived]


def test_publish_counts_documents_chunks_and_tokens(published: CollectionLayout, stones: ModuleType) -> None:
    manifest = open_generation(published).manifest
    ids = stones.document_ids(20)
    assert manifest.documents == 20
    assert manifest.chunks == sum(stones.num_chunks_of(doc_id) for doc_id in ids)
    assert manifest.tokens == sum(len(stones.text_of(doc_id).split()) for doc_id in ids)


def test_publish_of_tables_that_do_not_fit_leaves_the_old_generation(
    published: CollectionLayout, stones: ModuleType
) -> None:
    with published.writer_lock():
        manifest = prepare_writer(published)
        assert manifest is not None
        tables = LanceTables.open(published)
        rows = stones.document_rows(["zz"])
        import pyarrow as pa

        versions = tables.commit(
            generation=2,
            documents=pa.RecordBatchReader.from_batches(rows.schema, [rows]),
            expected_documents=1,
        )
        with pytest.raises(IntegrityError, match="table `chunks` must hold"):
            publish_generation(
                published, tables, versions, GenerationFacts.of(published, manifest, "run"), IndexConfig()
            )
    assert published.current_generation_number() == 1
    assert [path.name for path in published.generations_folder.iterdir()] == ["00000001"]


def test_prepare_writer_of_a_new_collection_returns_none(layout: CollectionLayout) -> None:
    assert prepare_writer(layout) is None


def test_prepare_writer_removes_what_was_never_served(published: CollectionLayout) -> None:
    shutil.copytree(published.generation_folder(1), published.generation_folder(2))
    published.published_path(2).unlink()
    published.temporary_generation_folder(3).mkdir()
    manifest = prepare_writer(published)
    assert manifest is not None
    assert manifest.generation == 1
    assert [path.name for path in published.generations_folder.iterdir()] == ["00000001"]


def test_prepare_writer_completes_a_first_publication(published: CollectionLayout) -> None:
    published.current_path.unlink()
    manifest = prepare_writer(published)
    assert manifest is not None
    assert published.current_generation_number() == 1


def test_prepare_writer_never_guesses_among_several_generations(
    published: CollectionLayout, stones: ModuleType
) -> None:
    stones.publish_change(published, "n")
    published.current_path.unlink()
    with pytest.raises(IntegrityError, match="no CURRENT"):
        prepare_writer(published)
