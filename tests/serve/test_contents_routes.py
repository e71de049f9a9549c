"""Columns, facets, counts and lists over HTTP and from the client are those of Python."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.client.clients import CairnClient
from cairn.pipeline.client.errors import InvalidRequestError
from cairn.pipeline.collection import open_collection

FILTERS = {"type": "gte", "key": "year", "value": 2003}


def plain(records: Iterable[Any]) -> Any:
    """Return records as JSON has them: dates as text."""
    return json.loads(json.dumps([asdict(each) for each in records], default=lambda date: date.isoformat()))


def test_client_is_told_what_python_is(stones_address: str, stones_root: Path) -> None:
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
