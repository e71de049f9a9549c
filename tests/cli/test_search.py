"""`cairn search`, as a terminal shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def test_search_within_a_budget_shows_passages_whole(
    call: Any, tmp_path: Path, ingest_options: list[str]
) -> None:
    words = [f"river{number}" for number in range(150)]
    pq.write_table(pa.table({"id": ["long"], "text": [" ".join(words)]}), tmp_path / "long.parquet")
    call("ingest", str(tmp_path / "long.parquet"), *ingest_options, "--quiet")
    asked = ("search", "river1 river149", "--collection", "c", "--no-late")
    whole, cut = (
        call(*asked, *more)[1] for more in (("--max-characters", "5000"), ("--chunk-tokens", "1024"))
    )
    assert [word for word in words if word in whole.split()] == words
    assert "…" not in whole
    assert "…" in cut


def test_search_filter_keeps_only_matching_documents(
    call: Any, corpus: str, ingest_options: list[str]
) -> None:
    call("ingest", corpus, *ingest_options, "--quiet")
    for expression in ("year>=2002", '{"year": [2002, 2003]}'):
        _, out, _ = call("search", "the way", "--collection", "c", "--filter", expression, "--json")
        assert {hit["doc_id"] for hit in json.loads(out)["hits"]} == {"b", "c"}


def test_search_by_groups_shows_the_best_of_each(call: Any, corpus: str, ingest_options: list[str]) -> None:
    call("ingest", corpus, *ingest_options, "--num-clusters", "1", "--quiet")
    asked = ("search", "the way", "--collection", "c", "--json")
    whole, grouped, spread = (
        [hit["doc_id"] for hit in json.loads(call(*asked, *more)[1])["hits"]]
        for more in ((), ("--group-by", "cluster_id", "--group-size", "2"), ("--mmr", "0.2"))
    )
    assert grouped == whole[:2]
    assert sorted(spread) == sorted(whole)
    code, _, said = call(*asked, "--group-by", "colour")
    assert code == 2
    assert "group_by must be one of doc_id" in said
