"""`cairn delete` by id or by filter, and what it says without deleting; `cairn retype`."""

from __future__ import annotations

import json
from typing import Any


def documents_left(call: Any) -> int:
    return json.loads(call("status", "c", "--json")[1])["documents"]


def test_delete_by_filter_deletes_what_matches_and_nothing_else(call: Any, ingested: None) -> None:
    assert call("delete", "c", "--filter", '{"doc_id": ["a", "b"]}', "--filter", "doc_id!=b")[0] == 0
    assert documents_left(call) == 2
    assert call("delete", "c", "a", "b")[2].count("not in the collection: a\n") == 1


def test_delete_that_is_dry_or_refused_or_matches_nothing_deletes_nothing(call: Any, ingested: None) -> None:
    for asked in (("a", "b"), ("--filter", "doc_id<=b")):
        code, out, _ = call("delete", "c", *asked, "--dry-run")
        assert (code, out.splitlines()) == (0, ["a", "b", "c: 2 would be deleted"])
    code, out, err = call("delete", "c", "zz", "--dry-run")
    assert (code, out, err) == (2, "c: 0 would be deleted\n", "not in the collection: zz\n")
    code, out, _ = call("delete", "c", "--filter", "doc_id=zz")
    assert (code, out) == (0, "c: 0 deleted, generation 1\n")
    for asked in ((), ("a", "--filter", "doc_id=a"), ("--filter", "no_such_column=1")):
        assert call("delete", "c", *asked)[0] == 2
    assert documents_left(call) == 3


def test_retype_gives_a_column_another_type_or_says_how_to_ask(call: Any, ingested: None) -> None:
    assert call("retype", "c", "year=string")[:2] == (0, "c: generation 2 holds year=string\n")
    assert call("search", "snow", "--collection", "c", "--filter", 'year="2003"', "--json")[0] == 0
    for asked, told in (("year", "COLUMN=TYPE"), ("year=date32[day]", "got '2001' in 'a'")):
        code, _, err = call("retype", "c", asked)
        assert (code != 0, told in err) == (True, True), err
