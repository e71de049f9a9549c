from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
from cairn.pipeline.index import rows as stored_rows
from cairn.pipeline.index import tiers
from cairn.pipeline.index.layout import CollectionLayout, read_manifest
from cairn.pipeline.index.maintenance import find_served
from cairn.pipeline.index.names import CHUNKS, DOCUMENTS, TABLES
from cairn.pipeline.index.recovery import prepare_writer
from cairn.pipeline.index.rows import (
    MAX_PLACED_DOCUMENTS,
    FindDocuments,
    LanceTables,
    Rows,
    Versions,
)

from tests.index import stones


@pytest.fixture
def segments(layout: CollectionLayout, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Publish several segments and fragments, some rows of them deleted; return the ids that are left."""
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    monkeypatch.setattr(tiers, "MAX_DELETED_SHARE", 0.9)
    monkeypatch.setattr(tiers, "FACTOR", 100)
    stones.publish_documents(layout, stones.document_ids(20))
    for prefix in ("n", "m"):
        stones.publish_change(layout, prefix)
    stones.delete(layout, ["dx1", "dxx2", "nx1"])
    return stones.served_ids(layout)


class Tables(LanceTables):
    """Tables that count the documents they delete by ids."""

    by_ids = 0

    def _delete_by_ids(self, ids: Sequence[str]) -> None:
        self.by_ids += len(ids)
        super()._delete_by_ids(ids)


def delete(layout: CollectionLayout, ids: Sequence[str], find: FindDocuments | None) -> Tables:
    prepare_writer(layout)  # undoes what a test before deleted
    tables = Tables.open(layout, pinned(layout))
    tables.commit(deleted_ids=ids, find_documents=find)
    return tables


def pinned(layout: CollectionLayout) -> Versions:
    number = layout.current_generation_number()
    assert number is not None
    return dict(read_manifest(layout, number).lance_versions)


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
    by_places = delete(layout, ids, find_in(layout))
    found = stored(by_places, by_places.versions())
    by_ids = delete(layout, ids, None)
    assert (by_places.by_ids, by_ids.by_ids) == (0, len(ids))
    assert found == stored(by_ids, by_ids.versions())


def test_delete_of_every_document_by_places_leaves_none(
    layout: CollectionLayout, segments: list[str]
) -> None:
    tables = delete(layout, segments, find_in(layout))
    assert not tables.by_ids
    assert [tables.count_rows(name, tables.versions()) for name in TABLES] == [0, 0]


@pytest.mark.parametrize("table", TABLES)
def test_delete_of_a_document_that_is_elsewhere_goes_by_ids(
    layout: CollectionLayout, segments: list[str], table: str
) -> None:
    def find(doc_ids: Sequence[str]) -> dict[str, Rows]:
        def moved(rows: slice) -> slice:
            return slice(rows.start + 1, rows.stop + 1)

        found = find_in(layout)(doc_ids).items()
        return {doc_id: {**rows, table: moved(rows[table])} for doc_id, rows in found}

    tables = delete(layout, [segments[4]], find)
    assert tables.by_ids
    left = stored(tables, tables.versions())
    assert [doc_id for (doc_id,) in left[DOCUMENTS]] == [each for each in segments if each != segments[4]]
    assert list(dict.fromkeys(row[0] for row in left[CHUNKS])) == [row[0] for row in left[DOCUMENTS]]


def test_delete_of_a_document_without_a_place_goes_by_ids(
    layout: CollectionLayout, segments: list[str]
) -> None:
    tables = delete(layout, segments[:2], lambda ids: find_in(layout)(ids[:1]))
    assert tables.by_ids
    assert tables.count_rows(DOCUMENTS, tables.versions()) == len(segments) - 2


def test_delete_of_many_documents_goes_by_ids_and_of_the_last_few_by_places(
    layout: CollectionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rows, "MAX_IDS_A_DELETE", MAX_PLACED_DOCUMENTS + 1)
    ids = stones.document_ids(MAX_PLACED_DOCUMENTS + 3)
    stones.publish_documents(layout, ids)
    tables = delete(layout, ids[:-1], find_in(layout))
    assert tables.by_ids == MAX_PLACED_DOCUMENTS + 1
    left = stored(tables, tables.versions())
    assert left[DOCUMENTS] == [(ids[-1],)]
    assert {row[0] for row in left[CHUNKS]} == {ids[-1]}


def test_documents_of_a_damaged_position_file_are_not_found(
    layout: CollectionLayout, segments: list[str]
) -> None:
    find = find_in(layout)
    assert list(find(segments[:2])) == segments[:2]
    path = next(layout.generations_folder.glob("*4/documents.arrow"))
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    assert find(segments[:2]) == {}
