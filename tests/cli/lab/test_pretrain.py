from __future__ import annotations

import json
from pathlib import Path

import pytest
from cairn.cli.main import cairn, run


@pytest.fixture
def words(tmp_path: Path, tiny_model_folder: Path) -> list[str]:
    texts = [{"text": f"the old stone {number} on the path of the river " * 4} for number in range(30)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    sizes = ["--steps", "2", "--batch-rows", "2", "--max-tokens", "32", "--precision", "fp32"]
    return [
        "pretrain", str(tmp_path / "texts.jsonl"), "--output", str(tmp_path / "run"),
        "--base", str(tiny_model_folder), *sizes, "--quiet",
    ]  # fmt: skip


def test_pretrain_command_leaves_a_model_and_reports(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    landmarks = ["--landmark-intervals", "4,8"]
    assert run(cairn, [*words, *landmarks, "--json"], "cairn") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["texts"]) == (2, 30)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert run(cairn, [*words, *landmarks], "cairn") == 0
    assert "resumed at" in capsys.readouterr().out


def test_pretrain_command_ends_bad_input_with_one_sentence(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(cairn, [*words, "--language-smoothing", "0.7"], "cairn") == 2
    error = capsys.readouterr().err
    assert "language_smoothing must go with texts of several languages" in error
    assert len(error.strip().splitlines()) == 1
    words[1] = str(tmp_path / "none.jsonl")
    assert run(cairn, words, "cairn") == 2
    assert "does not exist" in capsys.readouterr().err
