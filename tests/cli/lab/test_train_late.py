from __future__ import annotations

import json
from pathlib import Path

import pytest
from cairn.cli.main import cairn, run


def test_train_late_command_leaves_a_projection_and_reports(
    pairs_file: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    output = pairs_file.parent / "late"
    words = ["train-late", str(pairs_file), "--output", str(output), "--base", str(tiny_model_folder)]
    sizes = ["--steps", "3", "--dims", "8", "--batch-queries", "6", "--max-batches", "6", "--hold-out", "0.2"]

    assert run(cairn, [*words, *sizes, "--peak-lr", "1e-12", "--quiet", "--json"], "cairn") == 0
    printed = capsys.readouterr()
    assert printed.err == "no step scored above the start, which was kept; give more pairs\n"
    report = json.loads(printed.out)
    assert report["folder"] == str(output)
    assert 0.0 <= report["best_score"] <= 1.0
    assert (output / "cairn_late.safetensors").is_file()

    assert run(cairn, [*words, *sizes, "--quiet"], "cairn") == 2
    assert "must be new or empty" in capsys.readouterr().err
