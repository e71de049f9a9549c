from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run


def arguments(pairs_file: Path, base: Path, *more: str) -> list[str]:
    sizes = ["--steps", "2", "--batch-pairs", "6", "--context-documents", "3", "--matryoshka-dims", "8,32"]
    folders = ["--output", str(pairs_file.parent / "run"), "--base", str(base)]
    return ["train", str(pairs_file), *folders, *sizes, *more]


def test_train_command_trains_and_prints_what_it_did(
    pairs_file: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(cairn, arguments(pairs_file, tiny_model_folder, "--quiet", "--json"), "cairn") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["pairs"], report["steps"], report["resumed_at"]) == (60, 2, 0)
    settings = json.loads((pairs_file.parent / "run" / "run.json").read_text())["settings"]
    assert settings["matryoshka_dims"] == [8, 32]
    assert run(cairn, arguments(pairs_file, tiny_model_folder, "--quiet"), "cairn") == 0
    printed = capsys.readouterr()
    assert "resumed at" in printed.out
    assert ("no step scored above the base" in printed.err) == (report["best_step"] == 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--batch-pairs 900", "at least the 900 pairs of one batch"),
        ("--matryoshka-dims 8,x", "whole numbers with commas"),
        ("--negatives own", "pairs must have negatives"),
        ("--dev-every 5", "dev_every must go with dev sets, got none; name them with --dev"),
        ("absent", "does not exist"),
    ],
)
def test_train_command_mistakes_end_in_a_sentence_and_leave_no_folder(
    pairs_file: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], options: str, sentence: str
):
    assert run(cairn, arguments(pairs_file, tiny_model_folder, *options.split()), "cairn") == 2
    assert sentence in capsys.readouterr().err
    assert not (pairs_file.parent / "run").exists()


def dev_set(folder: Path, name: str, unknown: int = 0) -> Path:
    folder = folder / name
    folder.mkdir()
    texts = ["the cat sat on the mat", "old stone on the path a0", "a river"]
    pq.write_table(pa.table({"id": ["1", "2", "3"], "text": texts}), folder / "corpus.parquet")
    pq.write_table(pa.table({"id": ["q"], "text": ["where sat the cat"]}), folder / "queries.parquet")
    known = {"query_id": ["q"], "doc_id": ["1"], "score": [1]}
    qrels = {
        column: values + ([1] if column == "score" else ["nobody"]) * unknown
        for column, values in known.items()
    }
    pq.write_table(pa.table(qrels), folder / "qrels.parquet")
    return folder


def test_train_command_scores_dev_sets_keeps_them_out_of_the_data_and_counts_what_it_cannot_use(
    pairs_file: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    dev = [
        flag
        for name in ("one", "two")
        for flag in ("--dev", str(dev_set(pairs_file.parent, name, unknown=name == "two")))
    ]
    words = arguments(pairs_file, tiny_model_folder, "--quiet", "--json", "--dev-every", "1", *dev)
    assert run(cairn, words, "cairn") == 0
    written = capsys.readouterr()
    report = json.loads(written.out)
    assert written.err.startswith("warning: left out of two: 1 judgements of unknown queries\n")
    assert ("no step scored above the base" in written.err) == (report["best_step"] == 0)
    assert (report["judged_by"], report["skipped"]) == ("dev sets", {"document of an evaluation set": 1})
    records = [
        json.loads(line) for line in (pairs_file.parent / "run" / "log.jsonl").read_text().splitlines()
    ]
    scored = [record for record in records if "dev_score" in record]
    assert [record["step"] for record in scored] == [0, 1, 2]
    assert set(scored[0]) == {"step", "dev_score", "dev/one/nDCG@10", "dev/two/nDCG@10", "seconds"}
    assert report["best_score"] == max(record["dev_score"] for record in scored)


def test_train_command_makes_pairs_of_documents(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    sections = [
        " ".join(f"the {word} number {n} sat on the old stone path by the river." for n in range(6))
        for word in ("cat", "mat", "way")
    ]
    text = "\n\n".join(f"# part {number}\n\n{section}" for number, section in enumerate(sections))
    pq.write_table(
        pa.table({"id": [1, 2], "title": ["one", "two"], "text": [text, text.replace("old", "a")]}),
        tmp_path / "manuals.parquet",
    )
    folders = ["--output", str(tmp_path / "run"), "--base", str(tiny_model_folder)]
    flags = [*folders, "--steps", "1", "--batch-pairs", "3", "--quiet", "--json"]
    assert run(cairn, ["train", "--documents", str(tmp_path / "manuals.parquet"), *flags], "cairn") == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == 6
    assert run(cairn, ["train", *flags], "cairn") == 2
    assert "must have pairs or documents, got neither" in capsys.readouterr().err


def test_train_command_with_nothing_held_out_says_so_and_shows_no_score(
    pairs_file: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    flags = arguments(pairs_file, tiny_model_folder, "--heldout-pairs", "0", "--quiet")
    assert run(cairn, flags, "cairn") == 0
    printed = capsys.readouterr()
    assert "no pairs were held out" in printed.err
    assert "best" not in printed.out
    assert not (pairs_file.parent / "run" / "best").exists()
