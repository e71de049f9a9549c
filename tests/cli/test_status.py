"""What `cairn status` says of segments and routes, and `--verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.errors import DamageError
from cairn.pipeline.index import tiers


def test_status_measures_searches_of_the_nearest_clusters(
    call: Any, corpus: str, ingest_options: list[str]
) -> None:
    call("ingest", corpus, *ingest_options, "--quiet")
    asked = ("status", "c", "--route-clusters", "100", "--shards", "2")
    routing = json.loads(call(*asked, "--json")[1])["routing"]
    assert routing == {
        "route_clusters": 100,
        "shards": 2,
        "recall_at_10": 1.0,
        "queries": 3,
        "asked_share": 1.0,
    }
    assert "100 clusters: recall@10 1.000 of 3 sampled queries, 100% of 2 shards asked" in call(*asked)[1]


@pytest.mark.parametrize("option", [("--route-clusters", "8"), ("--shards", "4"), ("--verify",)])
def test_status_of_all_collections_refuses_what_is_measured_of_one(
    call: Any, option: tuple[str, ...]
) -> None:
    code, _, err = call("status", *option)
    assert (code, f"{option[0]} must come with the NAME of a collection" in err) == (2, True)


def test_status_counts_the_vectors_of_all_segments(
    call: Any, corpus: str, ingest_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    monkeypatch.setattr(tiers, "MAX_DELETED_SHARE", 0.8)
    call("ingest", corpus, *ingest_options, "--quiet")
    assert ["segments", "1"] in [line.split() for line in call("status", "c")[1].splitlines()]
    added = tmp_path / "added.parquet"
    row = {"id": ["d"], "title": ["Paths"], "text": ["a path by the river"], "year": [2004]}
    pq.write_table(pa.table(row), added)
    assert call("ingest", str(added), *ingest_options, "--quiet")[0] == 0
    _, out, _ = call("status", "c")
    assert "2; no merge is due  (cairn compact makes one of all)" in out
    assert "document index  4 vectors: 4 in flat" in out
    assert "deleted" not in out
    call("delete", "c", "a")
    assert "2, 25.0% of their documents deleted; no merge is due" in call("status", "c")[1]


@pytest.mark.parametrize("words", [("status", "c"), ("search", "river", "--collection", "c")])
def test_verify_finds_bits_that_opening_does_not_look_at(
    call: Any, corpus: str, ingest_options: list[str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    call("ingest", corpus, *ingest_options, "--quiet")
    assert call(*words, "--verify")[0] == 0
    (rows,) = (tmp_path / "cairn-data" / "c" / "lance" / "documents.lance" / "data").iterdir()
    content = rows.read_bytes()
    rows.write_bytes(content[:4] + bytes([content[4] ^ 1]) + content[5:])
    assert call(*words)[0] == 0
    code, _, err = call(*words, "--verify")
    assert (code, f"{rows.name} of generation 1 does not match its SHA-256" in err) == (1, True)
    with pytest.raises(DamageError, match=rows.name):
        len(open_collection("c", verify=True).documents)
