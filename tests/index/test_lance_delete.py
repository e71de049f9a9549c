from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
from cairn.pipeline.index import tiers
from cairn.pipeline.index.lance_delete import MAX_PLACED_DOCUMENTS, FindDocuments, PlacedDocument
from cairn.pipeline.index.lance_index import LanceTables, Versions
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import find_served
from cairn.pipeline.index.publish import prepare_writer
from cairn.pipeline.index.segments.change import rows_changed
from cairn.pipeline.index.tables import CHUNKS, DOCUMENTS, TABLES


@pytest.fixture
def segments(layout: CollectionLayout, stones: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Publish several segments and fragments, some rows of them deleted; return the ids that are left."""
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    monkeypatch.setattr(tiers, "MAX_DELETED_SHARE", 0.9)
    monkeypatch.setattr(tiers, "FACTOR", 100)
    stones.publish_documents(layout, stones.document_ids(20))
    for prefix in ("n", "m"):
        stones.publish_change(layout, prefix)
    stones.delete(layout, ["dx1", "dxx2", "nx1"])
    return stones.served_ids(layout)


def delete(layout: CollectionLayout, ids: Sequence[Sequence[str]], find: FindDocuments | None) -> LanceTables:
    tables = LanceTables.open(layout)
    tables.commit(generation=99, deleted_ids=ids, find_documents=find)
    return tables


def find_in(layout: CollectionLayout) -> FindDocuments:
    served = prepare_writer(layout)
    assert served is not None
    return partial(find_served, layout, served)


def stored(tables: LanceTables, versions: Versions) -> dict[str, list[tuple[str, ...]]]:
    columns = {DOCUMENTS: ["doc_id"], CHUNKS: ["doc_id", "ordinal"]}
    return {
        name: [
            tuple(row.values())
            for batch in tables.scan(name, columns[name], versions)
            for row in batch.to_pylist()
        ]
        for name in TABLES
    }


@pytest.mark.parametrize("seed", range(6))
def test_delete_by_places_leaves_what_a_delete_by_ids_leaves(
    layout: CollectionLayout, segments: list[str], seed: int
) -> None:
    rng = random.Random(seed)
    ids = rng.sample(segments, rng.randint(1, len(segments) - 1))
    lists = [ids[: len(ids) // 2], ids[len(ids) // 2 :]]
    before = LanceTables.open(layout).versions()
    by_places = delete(layout, lists, find_in(layout))
    found = stored(by_places, by_places.versions())
    by_places.roll_back(before)
    by_ids = delete(layout, lists, None)
    assert by_places.deleted is not None
    assert by_ids.deleted is None
    assert found == stored(by_ids, by_ids.versions())


def test_delete_of_every_document_by_places_leaves_none(
    layout: CollectionLayout, segments: list[str]
) -> None:
    tables = delete(layout, [segments], find_in(layout))
    assert tables.deleted is not None
    assert tables.num_rows() == {DOCUMENTS: 0, CHUNKS: 0}


def test_delete_by_places_knows_the_rows_that_lance_says_are_gone(
    layout: CollectionLayout, segments: list[str]
) -> None:
    before = LanceTables.open(layout).versions()
    tables = delete(layout, [[segments[3], segments[-1]], [segments[12]]], find_in(layout))
    change = rows_changed(layout, before, tables.versions())
    assert change is not None
    assert tables.deleted is not None
    assert tables.deleted.rows.tolist() == change.deleted.tolist() == [3, 12, len(segments) - 1]


@pytest.mark.parametrize("table", TABLES)
def test_delete_of_a_document_that_is_elsewhere_goes_by_ids(
    layout: CollectionLayout, segments: list[str], table: str
) -> None:
    def find(doc_ids: Sequence[str]) -> list[PlacedDocument]:
        def moved(document: PlacedDocument) -> PlacedDocument:
            rows = document.rows[table]
            return replace(document, rows={**document.rows, table: slice(rows.start + 1, rows.stop + 1)})

        return [moved(document) for document in find_in(layout)(doc_ids)]

    tables = delete(layout, [[segments[4]]], find)
    assert tables.deleted is None
    left = stored(tables, tables.versions())
    assert [doc_id for (doc_id,) in left[DOCUMENTS]] == [each for each in segments if each != segments[4]]
    assert list(dict.fromkeys(row[0] for row in left[CHUNKS])) == [row[0] for row in left[DOCUMENTS]]


def test_delete_of_a_document_without_a_place_goes_by_ids(
    layout: CollectionLayout, segments: list[str]
) -> None:
    tables = delete(layout, [[segments[0], segments[1]]], lambda ids: find_in(layout)(ids[:1]))
    assert tables.deleted is None
    assert tables.num_rows()[DOCUMENTS] == len(segments) - 2


def test_delete_of_many_documents_goes_by_ids(layout: CollectionLayout, stones: ModuleType) -> None:
    ids = stones.document_ids(MAX_PLACED_DOCUMENTS + 3)
    stones.publish_documents(layout, ids)
    tables = delete(layout, [ids[:2], ids[2:-1]], find_in(layout))
    assert tables.deleted is None
    left = stored(tables, tables.versions())
    assert left[DOCUMENTS] == [(ids[-1],)]
    assert {row[0] for row in left[CHUNKS]} == {ids[-1]}


def test_documents_of_a_damaged_position_file_are_not_found(
    layout: CollectionLayout, segments: list[str]
) -> None:
    find = find_in(layout)
    assert [each.doc_id for each in find(segments[:2])] == segments[:2]
    path = next(layout.generations_folder.glob("*4/documents.arrow"))
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    assert find(segments[:2]) == []
