"""`cairn search`, as a terminal shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def test_search_within_a_budget_shows_passages_whole(call: Any, ingest: Any) -> None:
    words = [f"river{number}" for number in range(150)]
    ingest(id=["long"], text=[" ".join(words)])
    asked = ("search", "river1 river149", "--collection", "c", "--no-late")
    whole, cut = (
        call(*asked, *more)[1] for more in (("--max-characters", "5000"), ("--chunk-tokens", "1024"))
    )
    assert [word for word in words if word in whole.split()] == words
    assert "…" not in whole
    assert "…" in cut


def test_search_by_filter_or_by_groups_shows_what_is_asked(call: Any, ingested: None) -> None:
    asked = ("search", "the way", "--collection", "c", "--json")

    def found(*more: str) -> list[str]:
        return [hit["doc_id"] for hit in json.loads(call(*asked, *more)[1])["hits"]]

    for expression in ("year>=2002", '{"year": [2002, 2003]}'):
        assert sorted(found("--filter", expression)) == ["b", "c"]
    whole = found()
    assert found("--group-by", "source_file", "--group-size", "2") == whole[:2]
    assert sorted(found("--mmr", "0.2")) == sorted(whole)
    code, _, said = call(*asked, "--group-by", "colour")
    assert code == 2
    assert "group_by must be one of doc_id" in said


def test_no_control_character_of_a_document_reaches_the_terminal(
    call: Any, tmp_path: Path, ingest_options: list[str]
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    text = "\x1b]52;c;ZWNobw==\x07 \x9b8m\x02 \x7f about volcanoes"
    (source / "a\x1b]0;name\x07.txt").write_text(text)
    (source / "b\x1b]0;name\x07.txt").write_bytes(b"\xff")
    said = "".join(call("ingest", str(source), *ingest_options)[1:])
    [doc_id] = [path.name for path in source.iterdir() if path.name.startswith("a")]
    asked = ("search", "volcanoes", "--collection", "c")
    shown = call(*asked)[1]
    as_json = call(*asked, "--json")[1]
    lineage = call("lineage", "c", doc_id)[1]
    assert "about volcanoes" in shown
    assert r"a\u001b]0;name\u0007.txt" in lineage
    assert json.loads(as_json)["hits"][0]["passages"][0]["text"] == text
    assert all(char.isprintable() or char == "\n" for char in said + shown + as_json + lineage)


def test_search_shows_lists_headings_and_code_in_lines_of_their_own(call: Any, ingest: Any) -> None:
    text = "# Old stone\n\n- the river\n- the path\n\n```\nif stone:\n\tpath()\n```\n"
    ingest(id=["a"], text=[text])
    shown = call("search", "stone", "--collection", "c", "--max-characters", "500", "--no-late")[1]
    lines = [f"     {line}" for line in text.replace("\t", "    ").splitlines() if line]
    assert "\n".join(lines) in shown
