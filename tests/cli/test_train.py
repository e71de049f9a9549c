from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from cli.main import cairn, run

PAIRS = [
    {"query": f"the {word} a{number}", "document": f"old {word} on the path a{number}", "title": "way", "source": word}
    for word in ("stone", "river", "cat")
    for number in range(8)
]


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return path


def arguments(pairs_file: Path, base: Path, *more: str) -> list[str]:
    sizes = ["--steps", "2", "--batch-pairs", "6", "--context-documents", "3", "--matryoshka-dims", "8,32"]
    return ["train", str(pairs_file), "--output", str(pairs_file.parent / "run"), "--base", str(base), *sizes, *more]


def test_train_command_trains_and_prints_what_it_did(pairs_file: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]):
    assert run(cairn, arguments(pairs_file, tiny_model_folder, "--quiet", "--json"), "cairn") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["pairs"], report["steps"], report["resumed_at"]) == (24, 2, 0)
    assert json.loads((pairs_file.parent / "run" / "run.json").read_text())["settings"]["matryoshka_dims"] == [8, 32]
    assert run(cairn, arguments(pairs_file, tiny_model_folder, "--quiet"), "cairn") == 0
    assert "resumed at" in capsys.readouterr().out


def test_train_command_has_an_option_for_every_setting():
    from cli.train import train
    from pipeline.train.settings import TrainConfig

    assert {field.name for field in fields(TrainConfig)} <= {str(parameter.name) for parameter in train.params}


def test_train_command_mistakes_end_in_a_sentence(pairs_file: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]):
    assert run(cairn, arguments(pairs_file, tiny_model_folder, "--batch-pairs", "900"), "cairn") == 2
    assert "at least the 900 pairs of one batch" in capsys.readouterr().err
    assert run(cairn, arguments(pairs_file, tiny_model_folder, "--matryoshka-dims", "8,x"), "cairn") == 2
    assert "whole numbers with commas" in capsys.readouterr().err
    assert run(cairn, arguments(pairs_file.parent / "absent", tiny_model_folder), "cairn") == 2
    assert "does not exist" in capsys.readouterr().err
