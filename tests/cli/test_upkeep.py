"""`cairn verify`, `repair`, `delete` and `retype`: what they do, say, and advise."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.index.names import COPIES


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


def test_repair_that_loses_every_document_says_so_and_how_to_encode_them_again(
    call: Any, ingested: None, corpus: str, ingest_options: list[str], tmp_path: Path
) -> None:
    for path in (tmp_path / "cairn-data" / "c" / "lance" / "documents.lance" / "data").iterdir():
        path.unlink()
    code, out, _ = call("repair", "c")
    first, *_, last = out.splitlines()
    assert (code, first) == (0, "EVERY document of collection 'c' is lost")
    assert last.startswith("3 document(s) were given up; run `cairn ingest SOURCE...")
    advised = shlex.split(last.partition("run `")[2].partition("`")[0].replace("SOURCE...", corpus))
    assert call(*advised[1:], *ingest_options[2:], "--quiet")[0] == 0
    assert documents_left(call) == 3


@pytest.mark.parametrize("name", ["context.arrow", "clusters.arrow"])
def test_file_that_no_generation_has_whole_leads_to_a_repair_that_says_what_is_left(
    call: Any, corpus: str, ingest_options: list[str], tmp_path: Path, name: str
) -> None:
    ingest = ("ingest", corpus, *ingest_options, "--use-context", "--quiet")
    assert call(*ingest)[0] == 0
    generation = tmp_path / "cairn-data" / "c" / "generations" / "00000001"
    whole = (generation / name).read_bytes()
    (generation / name).write_bytes(whole[:-1])
    assert "run `cairn repair c`" in call("verify", "c")[2]
    (tmp_path / "cairn-data" / "c" / COPIES / "00000001" / name).write_bytes(whole[:-1])
    search = ("search", "stone", "--collection", "c")
    for words in (ingest, search, ("verify", "c"), ("plan", "c", "--apply", "--force")):
        code, _, err = call(*words)
        assert (code, "run `cairn repair" in err) == (1, True), words
    code, _, err = call("repair", "c")
    assert (code, "ingest the sources again" in err, "run `cairn repair" in err) == (1, True, False)


def test_repair_of_what_cannot_be_mended_does_not_recommend_itself(
    call: Any, ingested: None, tmp_path: Path
) -> None:
    for below in ("generations", COPIES):
        (tmp_path / "cairn-data" / "c" / below / "00000001" / "MANIFEST.json").unlink()
    code, _, err = call("repair", "c")
    assert (code, "ingest the sources again" in err, "run `cairn repair" in err) == (1, True, False)
