import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.types import Passage


def test_ingest_then_search_and_status_answer_in_json(
    call: Any, corpus: str, ingest_options: list[str]
) -> None:
    code, out, _ = call("ingest", corpus, *ingest_options, "--json", "--quiet")
    report = json.loads(out)
    assert code == 0
    expected = {"rows": 3, "indexed": 3, "unchanged": 0, "quarantined": 0, "deleted": 0, "encoded": 3}
    assert report.items() >= {**expected, "generation": 1}.items()
    code, out, _ = call(
        "search", "the river runs past the old stone mill", "--collection", "c", "--json", "--no-hybrid"
    )
    answer = json.loads(out)
    assert (code, answer["generation"], answer["hits"][0]["doc_id"]) == (0, 1, "b")
    passage = answer["hits"][0]["passages"][0]
    assert set(passage) == {each.name for each in fields(Passage)}
    assert answer["hits"][0]["metadata"] == {"year": 2002}
    code, out, _ = call("status", "c", "--json")
    status = json.loads(out)
    assert (code, status["documents"], status["generation"]) == (0, 3, 1)


def test_ingest_with_every_encoder_option_is_searchable(
    call: Any, corpus: str, ingest_options: list[str], tmp_path: Path
) -> None:
    words = "--dims 16 --layers 1 --landmarks sentence --pooling mean_at_k --temperature 0.9"
    options = [*words.split(), "--query-temperature", "0.8"]
    options += ["--query-prefix", "walk: ", "--document-prefix", "mat: "]
    assert call("ingest", corpus, *ingest_options, *options, "--quiet")[0] == 0
    code, out, _ = call(
        "search", "the river runs past the old stone mill", "--collection", "c", "--json", "--no-hybrid"
    )
    assert (code, len(json.loads(out)["hits"])) == (0, 3)
    manifest = json.loads(
        (tmp_path / "cairn-data" / "c" / "generations" / "00000001" / "MANIFEST.json").read_text()
    )
    chosen = ("dims", "layers", "landmarks", "pooling", "query_prefix", "document_prefix")
    assert manifest["vector_dim"] == 16
    expected = (16, 1, "sentence", "mean_at_k", "walk: ", "mat: ")
    assert tuple(manifest["settings"]["encoder"][name] for name in chosen) == expected
    code, out, _ = call("ingest", corpus, *ingest_options, *options, "--json", "--quiet")
    assert (code, json.loads(out)["unchanged"]) == (0, 3)
    shown = " ".join(call("status", "c")[1].split())
    for part in (
        *('landmarks "sentence"', "dims 16", "layers 1", "bytes a token", "temperature 0.9"),
        *("query temperature 0.8", 'query prefix "walk: "', 'document prefix "mat: "'),
    ):
        assert part in shown
    assert "precision" not in shown


def test_status_for_people_says_what_the_base_model_was_not_trained_for(
    call: Any, ingested: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = call("status", "c")
    assert "trained neither" not in out
    monkeypatch.setattr(
        "cairn.pipeline.collection.MODEL_NAMES",
        {json.loads(call("status", "c", "--json")[1])["encoder"]["model"]},
    )
    _, out, _ = call("status", "c")
    assert "trained neither for landmarks nor for context" in out
    code, out, _ = call("list")
    assert code == 0
    assert "c " in out


def test_ingest_with_quarantined_rows_exits_3_as_its_dry_run_does_which_writes_nothing(
    call: Any, tmp_path: Path, ingest_options: list[str]
) -> None:
    pq.write_table(pa.table({"id": ["a", "b"], "text": ["stone path", ""]}), tmp_path / "bad.parquet")
    asked = ["ingest", "bad.parquet", *ingest_options, "--quiet"]
    code, out, _ = call(*asked, "--dry-run", "--json")
    plan = json.loads(out)
    assert (code, plan["rows"], plan["new"], plan["estimated_tokens"] > 0) == (3, 2, 1, True)
    assert "empty_text: 1" in call(*asked, "--dry-run")[1]
    assert not (tmp_path / "cairn-data").exists()
    code, out, _ = call(*asked)
    assert (code, "empty_text" in out) == (3, True)
    (path,) = (line.split()[2] for line in out.splitlines() if line.startswith("quarantine file "))
    assert pq.read_table(path).column("doc_id").to_pylist() == ["b"]
    run = json.loads(call(*asked, "--json")[1])
    told = ("quarantine_reasons", "warnings")
    assert [plan[name] for name in told] == [run[name] for name in told]


def test_window_with_chunk_attention_warns(call: Any, corpus: str, ingest_options: list[str]) -> None:
    words = "window_tokens has no effect with attention chunk"
    options = (*ingest_options, "--window-tokens", "256", "--quiet")
    planned = json.loads(call("ingest", corpus, *options, "--dry-run", "--json")[1])["warnings"]
    code, out, err = call("ingest", corpus, *options, "--json")
    assert (code, err.count("\n"), err.startswith(f"warning: {words}")) == (0, 1, True)
    assert (json.loads(out)["warnings"], planned[0].startswith(words)) == (planned, True)


@pytest.mark.usefixtures("short_library")
def test_sample_of_chosen_kinds_holds_no_others(call: Any) -> None:
    code, out, _ = call("sample", "made", "--kind", "topic", "--kind", "function", "--json")
    assert (code, set(json.loads(out)["kinds"])) == (0, {"topic", "function"})
    assert call("sample", "made", "--kind", "chapter")[0] == 2
