from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from cairn.pipeline.errors import IntegrityError, SchemaError
from cairn.pipeline.index import rows, tiers
from cairn.pipeline.index import rows as stored_rows
from cairn.pipeline.index.layout import CollectionLayout, read_manifest
from cairn.pipeline.index.maintenance import find_served
from cairn.pipeline.index.names import CHUNKS, DOCUMENTS, TABLES
from cairn.pipeline.index.recovery import prepare_writer
from cairn.pipeline.index.rows import MAX_PLACED_DOCUMENTS, FindDocuments, LanceTables, Rows, Versions

from tests.damages import flip
from tests.index import stones


@pytest.fixture
def tables(layout: CollectionLayout) -> LanceTables:
    return LanceTables.open_or_create(layout, stones.METADATA, stones.VECTOR_DIM)


def commit(
    tables: LanceTables,
    doc_ids: list[str],
    *,
    expected: int | None = None,
    version: int = 0,
) -> Versions:
    documents, chunks = stones.document_rows(doc_ids, version), stones.chunk_rows(doc_ids, version)
    return tables.commit(
        documents=pa.RecordBatchReader.from_batches(documents.schema, documents_in_two(documents)),
        chunks=pa.RecordBatchReader.from_batches(chunks.schema, [chunks]),
        expected_documents=len(doc_ids) if expected is None else expected,
        expected_chunks=chunks.num_rows,
    )


def documents_in_two(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    half = batch.num_rows // 2
    return [batch.slice(0, half), batch.slice(half)]


def scan_ids(tables: LanceTables, table: str, versions: Versions) -> list[str]:
    return [
        doc_id
        for batch in tables.scan(table, ["doc_id"], versions)
        for doc_id in batch.column("doc_id").to_pylist()
    ]


def test_commit_with_a_wrong_count_is_refused(tables: LanceTables) -> None:
    with pytest.raises(IntegrityError, match="must grow by 5 rows, got 4"):
        commit(tables, stones.document_ids(4), expected=5)


@pytest.mark.parametrize("value", [np.nan, np.inf, None])
def test_commit_of_vectors_that_are_no_numbers_or_without_a_column_is_refused(
    tables: LanceTables, value: float | None
) -> None:
    rows = stones.document_rows(["a", "b"])
    if value is None:
        rows, said = rows.drop_columns(["year"]), "must have the columns"
    else:
        vectors, said = rows.column("vector").flatten().to_numpy().copy(), "finite numbers"
        vectors[3], index = value, rows.schema.get_field_index("vector")
        broken = pa.FixedSizeListArray.from_arrays(pa.array(vectors), stones.VECTOR_DIM)
        rows = rows.set_column(index, rows.schema.field(index), broken)
    with pytest.raises(IntegrityError, match=said):
        tables.commit(documents=pa.RecordBatchReader.from_batches(rows.schema, [rows]), expected_documents=2)


@pytest.mark.parametrize(
    ("stored", "replaced"),
    [(2, [0]), (2, [1]), (8, [0, 3, 4]), (8, [5, 6, 7]), (9, [0, 1, 2, 3, 4, 5, 6, 7])],
)
def test_replacing_many_documents_keeps_both_tables_in_one_order(
    tables: LanceTables, stored: int, replaced: list[int]
) -> None:
    ids = stones.document_ids(stored)
    commit(tables, ids)
    again = [ids[index] for index in replaced]
    documents, chunks = stones.document_rows(again, 1), stones.chunk_rows(again, 1)
    versions = tables.commit(
        deleted_ids=again,
        documents=pa.RecordBatchReader.from_batches(documents.schema, [documents]),
        chunks=pa.RecordBatchReader.from_batches(chunks.schema, [chunks]),
        expected_documents=len(again),
        expected_chunks=chunks.num_rows,
    )
    expected = [doc_id for doc_id in ids if doc_id not in again] + again
    assert scan_ids(tables, DOCUMENTS, versions) == expected
    assert list(dict.fromkeys(scan_ids(tables, CHUNKS, versions))) == expected


def test_tables_made_again_are_empty_and_may_have_another_schema(
    tables: LanceTables, layout: CollectionLayout
) -> None:
    commit(tables, stones.document_ids(5))
    again = LanceTables.open_or_create(layout, (), 8)
    versions = again.versions()
    assert [again.count_rows(name, versions) for name in TABLES] == [0, 0]
    opened = LanceTables.open(layout, versions)
    assert (opened.vector_dim, opened.metadata_fields) == (8, ())


@pytest.mark.parametrize(
    ("metadata", "vector_dim", "column"),
    [
        ((), 16, "year"),
        ((pa.field("year", pa.string()),), 16, "year"),
        ((pa.field("year", pa.int64()),), 8, "vector"),
    ],
)
def test_open_or_create_with_another_schema_names_the_column(
    published: CollectionLayout, metadata: tuple[pa.Field, ...], vector_dim: int, column: str
) -> None:
    pinned = read_manifest(published, 1).lance_versions
    with pytest.raises(SchemaError, match=f"column '{column}'"):
        LanceTables.open_or_create(published, metadata, vector_dim, versions=pinned)
    assert LanceTables.open(published, pinned).versions() == pinned
    with pytest.raises(IntegrityError, match="run `cairn repair stones --root "):
        LanceTables.open(published, {DOCUMENTS: 99, CHUNKS: 99})


@pytest.mark.parametrize("kept_bytes", [rows.KEPT_BYTES, 0])
def test_rows_just_added_are_scanned_as_they_are_stored(
    layout: CollectionLayout, tables: LanceTables, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    monkeypatch.setattr(rows, "KEPT_BYTES", kept_bytes)
    commit(tables, stones.document_ids(9))
    versions = commit(tables, stones.document_ids(5, "later"))
    stored = LanceTables.open(layout, versions)
    for name, schema in tables.schemas.items():
        first = tables.count_rows(name, versions) - tables.num_added[name]
        both = [
            pa.Table.from_batches(each.scan(name, schema.names, versions, 2, first=first))
            for each in (tables, stored)
        ]
        assert both[0].equals(both[1])
        assert both[0].num_rows == tables.num_added[name]


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
    ids = rng.sample(segments, rng.randint(1, len(segments) - 1) if seed else len(segments))
    by_places = delete(layout, ids, find_in(layout))
    found = stored(by_places, by_places.versions())
    by_ids = delete(layout, ids, None)
    assert (by_places.by_ids, by_ids.by_ids) == (0, len(ids))
    assert found == stored(by_ids, by_ids.versions())


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
    tables = delete(layout, segments[:2], lambda ids: find_in(layout)(ids[:1]))  # one without a place
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
    flip(next(layout.generations_folder.glob("*4/documents.arrow")), -40)
    assert find(segments[:2]) == {}
