from __future__ import annotations

import numpy as np
import pytest
from cairn.pipeline.index.generation import Generation, Kept, open_generation
from cairn.pipeline.index.layout import CollectionLayout

from tests.exact_search import nearest
from tests.index import stones


@pytest.fixture(scope="module")
def generation(tmp_path_factory: pytest.TempPathFactory) -> Generation:
    """Twenty documents that no test changes."""
    layout = CollectionLayout(tmp_path_factory.mktemp("root"), "stones")
    stones.publish_documents(layout, stones.document_ids(20))
    return open_generation(layout)


def test_generation_vectors_are_those_of_their_positions(generation: Generation) -> None:
    rows = stones.document_rows(stones.document_ids(20))
    vectors = rows.column("vector").flatten().to_numpy().reshape(20, -1)
    _, found = generation.documents.search(vectors, 1)
    assert found[:, 0].tolist() == list(range(20))
    assert np.array_equal(generation.documents.search(vectors, 5)[1], nearest(vectors, vectors, 5))
    for name in ("cluster_ids", "chunk_documents", "chunk_starts", "chunk_ends"):
        view = getattr(generation, name)  # of the mapped file
        assert (view.flags.owndata, view.flags.writeable) == (False, False)


def test_fetch_documents_keeps_the_order_asked_and_repeats(generation: Generation) -> None:
    ids = stones.document_ids(20)
    for asked in ([5, 2, 5, 19], [19, 3, 5, 0], [3], [2, 5], []):  # some of them were read before
        for columns in (["doc_id", "text"], ["text"], ["text", "doc_id"]):
            fetched = generation.fetch_documents(asked, columns)
            assert fetched.column_names == columns
            expected = [{"doc_id": ids[row], "text": stones.text_of(ids[row])} for row in asked]
            assert fetched.to_pylist() == [{name: row[name] for name in columns} for row in expected]


def test_kept_values_leave_in_the_order_in_which_they_were_asked_for() -> None:
    kept = Kept[str, int](100)
    for number, key in enumerate("abcd"):
        kept.add(key, number, 25)
    assert kept.get("a") == 0
    kept.add("e", 4, 50)  # in the place of b and c
    kept.add("d", 5, 25)
    assert [kept.get(key) for key in "abcde"] == [0, None, None, 5, 4]
    kept.add("f", 6, 101)
    assert [kept.get(key) for key in "abcdef"] == [0, None, None, 5, 4, None]


def test_fetched_rows_of_short_columns_are_kept_within_bounds(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.pipeline.index.generation.MAX_ROWS_BYTES", 6_000)
    opened = open_generation(generation.layout)
    for position in range(20):
        opened.fetch_documents([position], ["year"])
    kept = [opened._rows.get((position, "year")) is not None for position in range(20)]
    assert 1 <= sum(kept) <= 10
    assert kept[-1]


def test_generation_of_no_documents_opens_and_finds_nothing(published: CollectionLayout) -> None:
    from cairn.pipeline.index.maintenance import delete_documents

    delete_documents(published, stones.document_ids(20))
    generation = open_generation(published)
    assert generation.num_documents == 0
    assert generation.documents.search(np.ones((1, stones.VECTOR_DIM), np.float32), 3)[1].tolist() == [
        [-1, -1, -1]
    ]
    assert generation.chunk_offsets.tolist() == [0]
