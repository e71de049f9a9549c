"""`cairn delete` by id or by filter, and what it says without deleting."""

from __future__ import annotations

import json
from typing import Any

import pytest


@pytest.fixture
def ingested(call: Any, corpus: str, ingest_options: list[str]) -> Any:
    """The command line after an ingest of documents a, b and c as collection c."""
    assert call("ingest", corpus, *ingest_options, "--quiet")[0] == 0
    return call


def documents_left(call: Any) -> int:
    return json.loads(call("status", "c", "--json")[1])["documents"]


def test_delete_by_filter_deletes_what_matches_and_nothing_else(ingested: Any) -> None:
    assert ingested("delete", "c", "--filter", '{"doc_id": ["a", "b"]}', "--filter", "doc_id!=b")[0] == 0
    assert documents_left(ingested) == 2
    assert ingested("delete", "c", "a", "b")[2].count("not in the collection: a\n") == 1


@pytest.mark.parametrize("asked", [("a", "b"), ("--filter", "doc_id<=b")])
def test_delete_dry_run_lists_the_ids_and_deletes_nothing(ingested: Any, asked: tuple[str, ...]) -> None:
    code, out, _ = ingested("delete", "c", *asked, "--dry-run")
    assert (code, out.splitlines()) == (0, ["a", "b", "c: 2 would be deleted"])
    assert documents_left(ingested) == 3


def test_delete_dry_run_of_unknown_ids_ends_as_a_deletion_would(ingested: Any) -> None:
    code, out, err = ingested("delete", "c", "zz", "--dry-run")
    assert (code, out, err) == (2, "c: 0 would be deleted\n", "not in the collection: zz\n")


def test_delete_by_filter_that_nothing_matches_is_no_failure(ingested: Any) -> None:
    code, out, _ = ingested("delete", "c", "--filter", "doc_id=zz")
    assert (code, out) == (0, "c: 0 deleted, generation 1\n")


@pytest.mark.parametrize("asked", [(), ("a", "--filter", "doc_id=a"), ("--filter", "no_such_column=1")])
def test_delete_without_clear_documents_is_refused(ingested: Any, asked: tuple[str, ...]) -> None:
    assert ingested("delete", "c", *asked)[0] == 2
    assert documents_left(ingested) == 3
