"""What a collection holds: its description, columns, counts, lists and documents."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from cairn.pipeline.client.clients import CairnClient
from cairn.pipeline.client.errors import InvalidRequestError
from cairn.pipeline.collection import open_collection
from cairn.pipeline.serve.settings import ServeSettings

from tests.serve.conftest import problem, stone_rows


def test_collections_are_listed_and_described_and_those_that_were_not_named_not_served(
    served_root, serve, client
):
    named = serve(ServeSettings(root=served_root, collections=("pebbles",)))
    assert [c["name"] for c in named.get("/v1/collections").json()["collections"]] == ["pebbles"]
    assert named.get("/v1/collections/pebbles").status_code == 200
    assert named.get("/v1/collections/stones").status_code == 404
    listed = client.get("/v1/collections").json()["collections"]
    assert [(c["name"], c["status"], c["generation"], c["documents"]) for c in listed] == [
        ("pebbles", "ready", 1, 4),
        ("stones", "ready", 1, 20),
    ]
    found = client.get("/v1/collections/stones").json()
    expected = {"name": "stones", "generation": 1, "documents": 20, "vector_dim": 32}
    expected |= {"landmark_interval": 16, "uses_context": False, "is_outdated": False}
    assert {name: found[name] for name in expected} == expected
    assert {"name": "year", "type": "int64"} in found["filter_columns"]


@pytest.mark.parametrize("span", [None, (0, 5), (7, 11), (60, 1_000_000), (10_000, 5)])
def test_every_document_is_read_by_its_id_whole_or_a_stretch_of_its_text(client, span):
    start, count = span or (0, 1_000_000)
    asked = {} if span is None else {"start_char": start, "max_characters": count}
    for row in stone_rows():
        found = client.get(f"/v1/collections/stones/documents/{row['id']}", params=asked).json()
        expected = {
            "doc_id": row["id"],
            "title": row["title"],
            "text": row["text"][start : start + count],
            "num_characters": len(row["text"]),
            "metadata": {"tenant": row["tenant"], "year": row["year"]},
        }
        assert {name: found[name] for name in expected} == expected
        assert found["text"] == row["text"][found["start_char"] : found["end_char"]]
        assert found["end_char"] <= len(row["text"])


@pytest.mark.parametrize("doc_id", ["none", "stones", "stones/granite", "%00", "%ff", "x" * 1024])
def test_unknown_document_is_not_found(client, doc_id):
    response = client.get(f"/v1/collections/stones/documents/{doc_id}")
    assert problem(response) == (404, "unknown-document")


FILTERS = {"type": "gte", "key": "year", "value": 2003}


def plain(records):
    """Return records as JSON has them: dates as text."""
    return json.loads(json.dumps([asdict(each) for each in records], default=lambda date: date.isoformat()))


def test_client_is_told_what_python_is(stones_address, stones_root):
    local = open_collection("stones", root=stones_root)
    with CairnClient(stones_address, timeout_seconds=300.0) as client:
        stones = client.collection("stones")
        assert plain(stones.columns()) == plain(local.columns())
        assert stones.facets(["year"], filters=FILTERS, num_values=2) == local.facets(
            ["year"], filters=FILTERS, num_values=2
        )
        assert stones.count(FILTERS) == local.count(FILTERS)
        assert stones.count() == local.count() == len(local.documents)
        listed = list(stones.list_documents(FILTERS))
        assert plain(listed) == plain(local.list_documents(FILTERS))
        assert [each.doc_id for each in listed] == sorted(local.documents.ids(FILTERS))
        after = listed[1].doc_id
        assert list(stones.list_documents(FILTERS, after=after)) == listed[2:]
        with pytest.raises(InvalidRequestError, match="columns must be"):
            stones.facets(["nowhere"])
