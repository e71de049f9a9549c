from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ir_measures
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.lab.evaluate import systems
from cairn.pipeline.lab.evaluate.systems import LATE_RANKINGS, OUR_RANKINGS

from tests.lab.evaluate.conftest import QRELS, write_set

UNKNOWN = {"query_id": "x", "doc_id": "cat", "score": 1}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tiny_model_folder: Path) -> Any:
    def invoke(*arguments: str) -> tuple[int, str, str]:
        options = ["--model", str(tiny_model_folder), "--landmark-interval", "8", "--context-documents", "2"]
        code = run(cairn, ["evaluate", *options, *arguments, "--quiet"], "cairn")
        return code, *capsys.readouterr()

    return invoke


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write_set(tmp_path / "walks", qrels=[*QRELS, UNKNOWN]))


def test_evaluate_prints_tables_differences_averages_and_advice(
    call: Any, folder: str, tmp_path: Path
) -> None:
    code, out, error = call(folder, str(write_set(tmp_path / "hills")), "--window-tokens", "256")

    assert code == 0
    for words in (
        *("walks: 4 documents, 3 queries", "left out: 1 judgements of unknown queries", "nDCG@10", "use: "),
        *("evidence@2000", "difference from ", "ingest SOURCE --collection NAME --model"),
        "average of 2 sets",
    ):
        assert words in out
    assert "warning: window_tokens has no effect with attention chunk" in error


def test_evaluate_in_json_holds_every_system_and_the_advice(call: Any, folder: str) -> None:
    code, out, _ = call(folder, "--json")
    read = json.loads(out)

    assert code == 0
    ours = {f"cairn/{way}" for way in (*OUR_RANKINGS, *LATE_RANKINGS)}
    assert set(read["systems"]) == {"bm25"} | ours
    assert read["sets"]["walks"] == {
        "documents": 4,
        "queries": 3,
        "skipped": {"judgements of unknown queries": 1},
    }
    assert read["reference"] == "bm25"
    assert read["advice"][0]["ingest_flags"].endswith("--landmark-interval 8")


def test_ablate_scores_every_encoder_and_context(call: Any, folder: str) -> None:
    code, out, _ = call(folder, "--ablate", "--json", "--systems", "mean/*", "--systems", "*/corpus/chunk")
    systems = json.loads(out)["systems"]

    assert code == 0
    assert len(systems) == 3 * 4 + 3
    assert "landmarks/corpus/chunk" in systems


def test_runs_written_compare_as_they_were_measured_and_kept_sets_give_them_again(
    call: Any, folder: str, tmp_path: Path
) -> None:
    places = ("--runs", str(tmp_path / "runs"), "--cache", str(tmp_path / "cache"))
    arguments = (folder, "--systems", "bm25", "--systems", "cairn/chunk", "--json", "--against", "bm25")
    first, again = (json.loads(call(*arguments, *places)[1]) for _ in range(2))
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert (
        first["systems"]["cairn/chunk"]["walks"]["cost"]["encode_seconds"]
        == (again["systems"]["cairn/chunk"]["walks"]["cost"]["encode_seconds"])
    )
    assert first["comparisons"] == again["comparisons"]
    measured = first["comparisons"]["cairn/chunk"]["nDCG@10"]["walks"]
    runs = [str(tmp_path / "runs" / "walks" / name) for name in ("cairn-chunk.trec", "bm25.trec")]
    lines = Path(runs[1]).read_text().splitlines()
    qrels = [ir_measures.Qrel(row["query_id"], row["doc_id"], row["score"]) for row in QRELS]
    read = [
        ir_measures.calc_aggregate([ir_measures.nDCG @ 10], qrels, ir_measures.read_trec_run(run))
        for run in runs
    ]

    assert next(iter(read[0].values())) - next(iter(read[1].values())) == pytest.approx(
        measured["difference"]
    )
    assert [line.split()[:2] for line in lines[:1]] == [["q1", "Q0"]]
    assert all(len(line.split()) == 6 and line.endswith(" bm25") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "must be a folder"),
        (["walks", "--against", "chunks-1"], "--against must name one of bm25"),
        (["walks", "--systems", "none*"], "no row of the table matches 'none*'"),
        (["walks", "../walks/../walks"], "must have names of their own"),
        (["walks", "--pooling", "multi_cls"], "pooling multi_cls must go with attention full"),
        (
            ["walks", "--ablate", "--systems", "bm25", "--landmark-interval", "95"],
            "got 95; choose at most 94",
        ),
    ],
)
def test_mistakes_end_in_one_sentence_and_code_2(
    refused: Any, folder: str, arguments: list[str], sentence: str
) -> None:
    assert sentence in refused(*[each.replace("../walks/../walks", folder) for each in arguments])


def test_known_items_need_no_queries(call: Any, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    texts = [
        f"the {word} and the old cat walk on along the river. {'stones mark the way. ' * 12}"
        for word in "abc"
    ]
    pq.write_table(pa.table({"id": list("abc"), "text": texts}), tmp_path / "plain" / "rows.parquet")
    code, out, _ = call(str(tmp_path / "plain"), "--known-items", "2", "--systems", "bm25")

    assert code == 0
    assert "plain (known items): 3 documents, 2 queries" in out


def test_baselines_may_have_a_model_of_their_own(
    call: Any, folder: str, tiny_roberta_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systems, "BASELINE_TOKENS", (32,))
    options = (folder, "--json", "--systems", "chunks-32", "--systems", "cairn/document")
    alone, beside = (
        json.loads(call(*options, *more)[1])["systems"]
        for more in ((), ("--baseline-model", str(tiny_roberta_folder)))
    )

    assert alone["chunks-32"]["walks"]["cost"]["tokens"] == beside["chunks-32"]["walks"]["cost"]["tokens"]
    assert alone["cairn/document"]["walks"]["measures"] == beside["cairn/document"]["walks"]["measures"]
    assert run(cairn, ["evaluate", folder, "--baseline-model", "nowhere", "--quiet"], "cairn") == 2


def test_missing_package_is_said_before_anything_is_encoded(
    refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    text = "a cairn of old stones marks the way. " + "the path follows the river. " * 10
    pq.write_table(pa.table({"id": ["a"], "text": [text]}), tmp_path / "texts" / "texts.parquet")
    monkeypatch.setitem(sys.modules, "ir_measures", None)
    options = ("--known-items", "1", "--cache", str(tmp_path / "kept"), "--systems", "cairn/*")
    told = refused(str(tmp_path / "texts"), *options)
    assert told.startswith("error: evaluating must have the package ir_measures")
    assert not (tmp_path / "kept").exists()
