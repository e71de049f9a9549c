from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run


def arguments(pairs_file: Path, base: Path, *more: str) -> list[str]:
    sizes = [
        "--steps",
        "2",
        "--rotation-steps",
        "1",
        "--batch-queries",
        "6",
        "--min-pairs",
        "4",
        "--hold-out",
        "0.1",
    ]
    return [
        "train-mixer",
        str(pairs_file),
        "--output",
        str(pairs_file.parent / "mixer"),
        "--base",
        str(base),
        *sizes,
        *more,
    ]


def test_train_mixer_command_leaves_a_model_to_ingest_with(
    pairs_file: Path,
    tiny_model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(pairs_file.parent)
    cache = ["--cache", str(pairs_file.parent / "vectors")]
    assert (
        run(
            cairn,
            arguments(pairs_file, tiny_model_folder, "--quiet", "--json", "--rotation-dims", "8,16", *cache),
            "cairn",
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert (report["pairs"], report["sources"], set(report["cut_scores"])) == (60, 2, {"8", "16"})
    corpus = pairs_file.parent / "corpus.parquet"

    pq.write_table(
        pa.table({"id": ["a", "b"], "title": ["way", "mark"], "text": ["the old stone", "a river"]}), corpus
    )
    ingest = [
        "ingest",
        str(corpus),
        "--collection",
        "c",
        "--model",
        str(pairs_file.parent / "mixer"),
        "--quiet",
        "--json",
    ]
    assert run(cairn, ingest, "cairn") == 0
    assert json.loads(capsys.readouterr().out)["indexed"] == 2


def test_train_mixer_command_prints_scores_for_people(
    pairs_file: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(cairn, arguments(pairs_file, tiny_model_folder, "--quiet", "--max-pairs", "20"), "cairn") == 0
    out = capsys.readouterr().out
    assert "of the first 10 dimensions" in out
    assert "skipped: pair beyond max_pairs of its source" in out
    assert "time to train" in out


def test_train_mixer_command_says_when_there_is_nothing_to_choose_a_step_by(
    pairs_file: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(cairn, arguments(pairs_file, tiny_model_folder, "--quiet", "--hold-out", "0"), "cairn") == 0
    assert "nothing was held out, so the last step was kept" in capsys.readouterr().err


def test_train_mixer_command_says_when_no_step_was_better_than_the_base(
    pairs_file: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(cairn, arguments(pairs_file, tiny_model_folder, "--quiet", "--peak-lr", "1e-12"), "cairn") == 0
    assert "no step scored above the base model" in capsys.readouterr().err


def test_train_mixer_command_leaves_a_model_that_keeps_short_texts_whole(
    pairs_file: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert (
        run(cairn, arguments(pairs_file, tiny_model_folder, "--quiet", "--whole-text-tokens", "900"), "cairn")
        == 2
    )
    assert "whole_text_tokens must lie between 0 and" in capsys.readouterr().err
    assert (
        run(cairn, arguments(pairs_file, tiny_model_folder, "--quiet", "--whole-text-tokens", "80"), "cairn")
        == 0
    )
    assert (
        json.loads((pairs_file.parent / "mixer" / "cairn_config.json").read_text())["encoder"][
            "whole_text_tokens"
        ]
        == 80
    )


def test_train_mixer_command_mistakes_end_in_a_sentence(
    pairs_file: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(cairn, arguments(pairs_file, tiny_model_folder, "--min-pairs", "900"), "cairn") == 2
    assert "at least min_pairs 900 pairs" in capsys.readouterr().err
    assert run(cairn, arguments(pairs_file, tiny_model_folder, "--rotation-dims", "64"), "cairn") == 2
    assert "rotation_dims must be different numbers below the base model's 32" in capsys.readouterr().err
    assert run(cairn, arguments(pairs_file.parent / "absent", tiny_model_folder), "cairn") == 2
    assert "does not exist" in capsys.readouterr().err
    (pairs_file.parent / "mixer").mkdir()
    (pairs_file.parent / "mixer" / "file").touch()
    assert run(cairn, arguments(pairs_file, tiny_model_folder), "cairn") == 2
    assert "must be new or empty" in capsys.readouterr().err
