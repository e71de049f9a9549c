"""The training of the default encoder, small: from Parquet pairs to a collection that is searched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.default_encoder import main, settings_of
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.ingest_settings import resolve_ingest_config
from cairn.pipeline.model.folders.checkpoint import read_checkpoint

from tests.lab.evaluate.conftest import write_set

CONFIG = Path(__file__).parents[3] / "jobs" / "configs" / "train_default.toml"
WORDS = ("stone", "path", "mark", "way", "river", "mountain", "walk", "old", "cat", "mat", "sat")
SMALL = """
train-landmarks.steps=2
train-landmarks.batch-windows=4
train-landmarks.window-tokens=64
train-landmarks.landmark-intervals=[8, 16]
train-landmarks.title-tokens=8
train-landmarks.heldout-windows=4
train.steps=6
train.batch-pairs=16
train.max-document-tokens=48
train.landmark-intervals=[8, 16]
train.title-tokens=8
train.context-documents=20
train.max-context-tokens=16
train.matryoshka-dims=[8, 16, 32]
train.heldout-pairs=6
train.evaluate-every=3
train.checkpoint-every=3
train.micro-batch-tokens=400
"""


def pair(number: int) -> dict[str, str]:
    about, page = WORDS[number % 11], number // 4
    filler = " ".join(WORDS[(number * step + page) % 11] for step in range(2, 9))
    return {
        "query": f"the {about} of {page}",
        "document": f"a {about} {filler} {number} the {about} on {filler}",
        "title": f"{WORDS[page % 11]} {page}",
        "source": f"s{number % 2}",
    }


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = sorted((pair(number) for number in range(120)), key=lambda row: row["source"])
    (tmp_path / "pairs").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs" / "all.parquet")
    return tmp_path / "pairs"


@pytest.fixture
def judged(tmp_path: Path) -> Path:
    document, query = {"id": "d", "text": pair(0)["document"]}, {"id": "q", "text": pair(2)["query"]}
    return write_set(tmp_path / "judged", [document], [query])


def test_second_stage_reads_rows_as_the_first_has_taught_them():
    landmarks, pairs = settings_of(CONFIG, ())
    assert (pairs.context_from, pairs.context_documents, pairs.freeze_embeddings) == ("source", 64, True)
    assert pairs.landmark_intervals == landmarks.landmark_intervals
    assert pairs.title_tokens == landmarks.title_tokens


def test_prepared_pairs_and_texts_that_come_later_hold_no_judged_text(
    pairs: Path, judged: Path, tmp_path: Path, capsys: Any
):
    work, texts = tmp_path / "work", tmp_path / "texts.jsonl"
    arguments = ["--pairs", str(pairs), "--judged", str(judged), "--work", str(work), "--prepare-only"]
    assert main(CONFIG, arguments) == 0
    rows = pq.read_table(work / "pairs.parquet").to_pylist()
    assert 100 < len(rows) < 120
    assert pair(0)["document"] not in {row["document"] for row in rows}
    assert pair(2)["query"] not in {row["query"] for row in rows}
    assert f"prepared={len(rows)} bytes=" in capsys.readouterr().err
    rows = [{"title": "kept", "text": "an old river"}, {"title": "judged", "text": pair(0)["document"]}]
    texts.write_text("\n".join(map(json.dumps, rows)))
    assert main(CONFIG, [*arguments, "--texts", str(texts)]) == 0
    assert pq.read_table(work / "texts.parquet").to_pylist() == rows[:1]


def test_work_without_pairs_and_a_change_that_is_none_are_refused(tmp_path: Path):
    job = [sys.executable, "-m", "cairn.jobs.train_default", "--work", str(tmp_path / "none")]
    found = subprocess.run(job, capture_output=True, text=True, check=False)
    assert (found.returncode, "must hold pairs.parquet, got none; give --pairs" in found.stderr) == (2, True)
    for change in ("train.steps", "steps=3", "stage.steps=3"):
        with pytest.raises(ConfigError, match=r"--set must be STAGE\.NAME=VALUE with a stage of train-land"):
            settings_of(CONFIG, [change])
    with pytest.raises(ConfigError, match="has no option 'stepps'; did you mean 'steps'"):
        settings_of(CONFIG, ["train.stepps=3"])
    with pytest.raises(ConfigError, match=r"--set must change no sources, got .*; give --pairs"):
        settings_of(CONFIG, ["train.sources=['x']"])
    assert [each.steps for each in settings_of(CONFIG, ["train.steps=3"])] == [1500, 3]


@pytest.mark.slow
def test_stages_stopped_and_resumed_are_delivered_ingested_and_searched(
    pairs: Path, judged: Path, tmp_path: Path, tiny_model_folder: Path, capsys: Any
):
    changes = [part for change in SMALL.split("\n")[1:-1] for part in ("--set", change)]
    arguments = ["--pairs", str(pairs), "--judged", str(judged), "--work", str(tmp_path / "work")]
    arguments += ["--deliver", str(tmp_path / "out"), "--base", str(tiny_model_folder), *changes]
    for step in (1, 1):  # each stage makes a step, however late it is
        assert main(CONFIG, [*arguments, "--minutes", "0.000001"]) == 75
        assert f"got to {step} in the time it was given" in capsys.readouterr().err
    assert main(CONFIG, arguments) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["landmarks"]["steps"], report["landmarks"]["resumed_at"]) == (2, 2)
    assert (report["steps"], report["resumed_at"]) == (6, 1)
    shown = f"documents {report['batch_cosine']:.3f}, of random batches {report['random_cosine']:.3f}"
    assert f"mean cosine of a batch's {shown}" in err
    taught, model = read_checkpoint(tmp_path / "out" / "landmarks" / "best"), tmp_path / "out" / "model"
    assert json.loads((tmp_path / "work" / "run" / "run.json").read_text())["base"] == taught.fingerprint

    rows = [{"id": str(number), "text": pair(number)["document"]} for number in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "corpus.parquet")
    config = resolve_ingest_config({"encoder": {"model": str(model), "precision": "fp32"}}, None)
    assert (config.context.context_documents, config.context.max_document_tokens) == (20, 16)
    assert config.encoder.use_context
    build_index([str(tmp_path / "corpus.parquet")], tmp_path / "root", "c", config)
    hits = open_collection("c", root=tmp_path / "root").search("old stone path 7").hits
    assert len(hits) == 10
    assert any(passage.highlights for hit in hits for passage in hit.passages)
