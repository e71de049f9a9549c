"""The verbs that train: what they leave and print, what they refuse, and dev sets."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.lab.evaluate.conftest import write_set

SMALL = {
    "train": "pairs.jsonl --base {model} --batch-pairs 6 --context-documents 3 --matryoshka-dims 8,32",
    "pretrain": "texts.jsonl --base {model} --batch-rows 2 --max-tokens 32 --landmark-intervals 4,8",
    "distill": "{model} {model} --texts texts.jsonl --batch-texts 4 --max-tokens 20",
    "train-landmarks": "{model} --texts texts.jsonl --batch-windows 2 --window-tokens 48 --title-tokens 4 "
    "--landmark-intervals 8,16",
}


@pytest.fixture
def start(call: Any, pairs_file: Path, tiny_model_folder: Path) -> Any:
    """Return what runs a verb for two steps in the folder ``run``."""
    texts = [{"text": f"the old stone {number} on the path of the river " * 4} for number in range(30)]
    pairs_file.with_name("texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))

    def run(verb: str, *more: str) -> tuple[int, str, str]:
        words = f"{SMALL[verb]} --steps 2 --precision fp32 --output run --quiet"
        return call(verb, *shlex.split(words.format(model=tiny_model_folder)), *more)

    return run


@pytest.mark.parametrize("verb", SMALL)
def test_verb_leaves_a_model_reports_and_does_not_train_it_again(start: Any, verb: str, tmp_path: Path):
    code, out, _ = start(verb, "--json")
    report = json.loads(out)
    assert (code, report["steps"], report["resumed_at"]) == (0, 2, 0)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    code, out, err = start(verb)
    assert (code, "resumed at" in out) == (0, True)
    if verb == "train":
        assert settings["matryoshka_dims"] == [8, 32]
        assert ("no step scored above the base" in err) == (report["best_step"] == 0)


@pytest.mark.parametrize(
    ("verb", "options", "sentence"),
    [
        ("train", "--batch-pairs 900", "at least the 900 pairs of one batch"),
        ("train", "--matryoshka-dims 8,x", "whole numbers with commas"),
        ("train", "--negatives own", "pairs must have negatives"),
        ("train", "--dev-every 5", "dev_every must go with dev sets, got none; name them with --dev"),
        ("train", "absent", "does not exist"),
        ("train", "--documents absent", "does not exist"),
        ("pretrain", "--language-smoothing 0.7", "must go with texts of several languages"),
        ("pretrain", "absent", "does not exist"),
    ],
)
def test_mistakes_end_in_a_sentence_and_leave_no_folder(
    start: Any, tmp_path: Path, verb: str, options: str, sentence: str
):
    code, _, err = start(verb, *options.split())
    assert (code, sentence in err) == (2, True), err
    assert not (tmp_path / "run").exists()


def dev_set(folder: Path, unknown: int = 0) -> Path:
    texts = ("the cat sat on the mat", "old stone on the path a0", "a river")
    documents = [{"id": str(number), "text": text} for number, text in enumerate(texts, 1)]
    qrels = [{"query_id": "q", "doc_id": "1", "score": 1}]
    qrels += [{"query_id": "nobody", "doc_id": "nobody", "score": 1}] * unknown
    return write_set(folder, documents, [{"id": "q", "text": "where sat the cat"}], qrels)


def test_dev_sets_are_scored_kept_out_of_the_data_and_what_they_cannot_use_is_counted(
    start: Any, tmp_path: Path
):
    dev = ["--dev", str(dev_set(tmp_path / "one")), "--dev", str(dev_set(tmp_path / "two", unknown=1))]
    code, out, err = start("train", "--json", "--dev-every", "1", *dev)
    report = json.loads(out)
    assert code == 0
    assert err.startswith("warning: left out of two: 1 judgements of unknown queries\n")
    assert ("no step scored above the base" in err) == (report["best_step"] == 0)
    assert (report["judged_by"], report["skipped"]) == ("dev sets", {"document of an evaluation set": 1})
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    scored = [record for record in records if "dev_score" in record]
    assert [record["step"] for record in scored] == [0, 1, 2]
    assert set(scored[0]) == {"step", "dev_score", "dev/one/nDCG@10", "dev/two/nDCG@10", "seconds"}
    assert report["best_score"] == max(record["dev_score"] for record in scored)


def test_nothing_held_out_is_said_and_shows_no_score(start: Any, tmp_path: Path):
    code, out, err = start("train", "--heldout-pairs", "0")
    assert (code, "no pairs were held out" in err, "best" in out) == (0, True, False)
    assert not (tmp_path / "run" / "best").exists()
