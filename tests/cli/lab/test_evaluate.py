from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run

TEXTS = {
    "mat": "the cat sat on the mat. the old cat walks on the path. the mat marks the way.",
    "river": "the river walks past the mountain. stones mark the river. the path follows the river.",
    "stone": "old stones mark a way. a stone sat on the mountain.",
}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tiny_model_folder: Path) -> Any:
    def invoke(*arguments: str) -> tuple[int, str, str]:
        options = [
            "--model",
            str(tiny_model_folder),
            "--landmark-interval",
            "8",
            "--context-documents",
            "2",
            "--quiet",
        ]
        code = run(cairn, ["evaluate", *arguments, *options], "cairn")
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


def write_set(folder: Path) -> str:
    folder.mkdir()
    pq.write_table(pa.table({"id": list(TEXTS), "text": list(TEXTS.values())}), folder / "corpus.parquet")
    pq.write_table(
        pa.table({"id": ["p", "q"], "text": ["where sat the cat", "what marks the way"]}),
        folder / "queries.parquet",
    )
    qrels = {
        "query_id": ["p", "q", "x"],
        "doc_id": ["mat", "stone", "mat"],
        "score": [1, 1, 1],
        "start": [0, 0, 0],
        "end": [23, 22, 3],
    }
    pq.write_table(pa.table(qrels), folder / "qrels.parquet")
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write_set(tmp_path / "walks")


def test_evaluate_prints_the_table_the_differences_and_the_advice(call: Any, folder: str) -> None:
    code, out, _ = call(folder)

    assert code == 0
    assert "walks: 3 documents, 2 queries" in out
    assert "left out: 1 judgements of unknown queries" in out
    assert "nDCG@10" in out
    assert "evidence@2000" in out
    assert "(best possible)" in out
    assert "difference from " in out
    assert "use: " in out
    assert "ingest SOURCE --collection NAME --model" in out


def test_evaluate_says_first_how_long_it_takes(
    capsys: pytest.CaptureFixture[str], folder: str, tiny_model_folder: Path
) -> None:
    options = ("--model", str(tiny_model_folder), "--landmark-interval", "8", "--context-documents", "2")
    assert run(cairn, ["evaluate", folder, "--systems", "cairn/*", *options], "cairn") == 0

    first = capsys.readouterr().err.partition("\n")[0]
    assert re.fullmatch(r"about \d+\.\d s of encoding: 4 rows, 1 encoding of \d+ tokens; .*", first)


def test_evaluate_in_json_holds_every_system_and_the_advice(call: Any, folder: str) -> None:
    code, out, _ = call(folder, "--json")
    read = json.loads(out)

    assert code == 0
    assert set(read["systems"]) == {
        "bm25",
        "document-94",
        "cairn/document",
        "cairn/chunk",
        "cairn/fused",
        "cairn/fused+bm25",
    }
    assert read["sets"]["walks"] == {
        "documents": 3,
        "queries": 2,
        "skipped": {"judgements of unknown queries": 1},
        "ceiling": {"evidence@1000": 1.0, "evidence@2000": 1.0, "evidence@4000": 1.0},
    }
    assert read["reference"] in ("bm25", "document-94")
    assert read["advice"][0]["ingest_flags"].endswith("--landmark-interval 8")


def test_ablate_scores_every_encoder_and_context(call: Any, folder: str) -> None:
    code, out, _ = call(folder, "--ablate", "--json", "--systems", "mean/*", "--systems", "*/corpus/chunk")
    systems = json.loads(out)["systems"]

    assert code == 0
    assert len(systems) == 3 * 4 + 4
    assert "landmarks/corpus/chunk" in systems


def test_average_stands_under_several_sets(call: Any, folder: str, tmp_path: Path) -> None:
    code, out, _ = call(
        folder, write_set(tmp_path / "hills"), "--systems", "bm25", "--systems", "cairn/chunk"
    )

    assert code == 0
    assert "average of 2 sets" in out


def test_runs_written_compare_as_they_were_measured(call: Any, folder: str, tmp_path: Path) -> None:
    _, out, _ = call(folder, "--json", "--runs", str(tmp_path / "runs"), "--against", "bm25")
    measured = json.loads(out)["comparisons"]["cairn/chunk"]["nDCG@10"]["walks"]
    runs = [str(tmp_path / "runs" / "walks" / name) for name in ("cairn-chunk.trec", "bm25.trec")]
    code, out, _ = call(folder, "--compare", *runs, "--json")

    assert code == 0
    assert json.loads(out)["nDCG@10"] == measured


def test_cache_gives_the_same_table_again(call: Any, folder: str, tmp_path: Path) -> None:
    arguments = (folder, "--systems", "cairn/chunk", "--cache", str(tmp_path / "cache"))
    first, second = call(*arguments), call(*arguments)

    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "must be a folder"),
        (["walks", "--against", "chunks-1"], "--against must name one of bm25"),
        (["walks", "--systems", "none*"], "no row of the table matches 'none*'"),
        (["walks", "../walks/../walks"], "must have names of their own"),
        (["walks", "--compare", "a", "b"], "must be a readable text file"),
        (["walks", "--pooling", "multi_cls"], "pooling multi_cls must go with attention full"),
    ],
)
def test_mistakes_end_in_one_sentence_and_code_2(
    call: Any, folder: str, arguments: list[str], sentence: str
) -> None:
    code, _, error = call(*[argument.replace("../walks/../walks", folder) for argument in arguments])

    assert code == 2
    assert error.startswith("error: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_known_items_need_no_queries(call: Any, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    texts = [f"{text.split('.')[0]} and the old cat walks on. {text * 5}" for text in TEXTS.values()]
    pq.write_table(pa.table({"id": list(TEXTS), "text": texts}), tmp_path / "plain" / "rows.parquet")
    code, out, _ = call(str(tmp_path / "plain"), "--known-items", "2", "--systems", "bm25")

    assert code == 0
    assert "plain (known items): 3 documents, 2 queries" in out


def test_baselines_may_have_a_model_of_their_own(
    call: Any, folder: str, tiny_roberta_folder: Path, tmp_path: Path
) -> None:
    options = (folder, "--json", "--systems", "document-94", "--systems", "cairn/document")
    alone, beside = (
        json.loads(call(*options, *more)[1])["systems"]
        for more in ((), ("--baseline-model", str(tiny_roberta_folder)))
    )

    assert alone["document-94"]["walks"]["cost"]["tokens"] == beside["document-94"]["walks"]["cost"]["tokens"]
    assert alone["cairn/document"]["walks"]["measures"] == beside["cairn/document"]["walks"]["measures"]
    assert run(cairn, ["evaluate", folder, "--baseline-model", "nowhere", "--quiet"], "cairn") == 2


def test_configuration_that_does_not_fit_the_model_is_an_error(folder: str, tiny_model_folder: Path) -> None:
    options = ["--landmark-interval", "95", "--model", str(tiny_model_folder), "--quiet", "--systems", "bm25"]

    assert run(cairn, ["evaluate", folder, "--ablate", *options], "cairn") == 2


def test_systems_that_do_not_fit_are_left_out_with_the_reason(call: Any, folder: str) -> None:
    options = (
        "--attention",
        "landmark",
        "--temperature-by-length",
        "90:0.9",
        "--systems",
        "landmark*/none/chunk",
    )
    code, out, error = call(folder, "--ablate", *options)

    assert code == 0
    assert "left out: cls/none/document, " in error
    assert "temperature_by_length must name lengths that rows reach" in error
    assert "landmark-attention/none/chunk" in out


def test_window_with_chunk_attention_warns_unless_the_whole_table_has_windows(call: Any, folder: str) -> None:
    for options, warns in (((), True), (("--ablate",), False)):
        _, _, err = call(
            folder, "--window-tokens", "256", "--systems", "cairn/*none/*chunk*/chunk", *options, "--json"
        )
        assert ("warning: window_tokens has no effect with attention chunk" in err) == warns


def test_missing_package_is_said_before_anything_is_encoded(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    text = "a cairn of old stones marks the way. " + "the path follows the river. " * 10
    pq.write_table(pa.table({"id": ["a"], "text": [text]}), tmp_path / "texts" / "texts.parquet")
    monkeypatch.setitem(sys.modules, "ir_measures", None)
    code, _, err = call(
        str(tmp_path / "texts"),
        "--known-items",
        "1",
        "--cache",
        str(tmp_path / "kept"),
        "--systems",
        "cairn/*",
    )
    assert (code, err.startswith("error: evaluating must have the package ir_measures")) == (2, True)
    assert not (tmp_path / "kept").exists()


def test_ablate_context_shows_each_context_with_its_interval(call: Any, folder: str) -> None:
    code, out, _ = call(folder, "--ablate-context", "--use-context")
    assert code == 0
    head, served, none, random, *_ = out.strip().splitlines()[1:]
    assert "difference" in head
    assert served.split()[:2] == ["as", "served"]
    assert "to" in none
    assert random.split()[0] == "random"
    code, _, error = call(folder, "--ablate-context")
    assert (code, "must go with a model that reads a context" in error) == (2, True)
