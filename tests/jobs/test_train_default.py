"""The training of the default encoder, small: from Parquet pairs to a collection that is searched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.jobs.train_default import CONFIG, main, settings_of
from cairn.pipeline.collection import open_collection
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.ingest_settings import resolve_ingest_config

WORDS = ("stone", "path", "mark", "way", "river", "mountain", "walk", "old", "cat", "mat", "sat")
SMALL = {
    "steps": 6,
    "batch_pairs": 16,
    "sequence_documents": 4,
    "max_document_tokens": 48,
    "context_documents": 20,
    "max_context_tokens": 16,
    "matryoshka_dims": [8, 16, 32],
    "heldout_pairs": 6,
    "evaluate_every": 3,
    "checkpoint_every": 3,
    "micro_batch_tokens": 400,
}


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
    folder = tmp_path / "judged"
    folder.mkdir()
    rows = [{"id": "d", "text": pair(0)["document"]}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "corpus.parquet")
    pq.write_table(pa.Table.from_pylist([{"id": "q", "text": pair(2)["query"]}]), folder / "queries.parquet")
    return folder


def test_config_is_a_training_of_the_size_it_says():
    _, config = settings_of(CONFIG, None, ())
    assert (config.context_from, config.context_documents) == ("source", 64)
    assert config.reads_context


def test_prepared_pairs_hold_no_judged_text(pairs: Path, judged: Path, tmp_path: Path, capsys: Any):
    arguments = ["--pairs", str(pairs), "--judged", str(judged), "--work", str(tmp_path / "work")]
    assert main([*arguments, "--prepare-only"]) == 0
    rows = pq.read_table(tmp_path / "work" / "pairs.parquet").to_pylist()
    assert 100 < len(rows) < 120
    assert pair(0)["document"] not in {row["document"] for row in rows}
    assert pair(2)["query"] not in {row["query"] for row in rows}
    assert f"prepared={len(rows)} bytes=" in capsys.readouterr().err


def test_work_without_pairs_and_a_change_that_is_none_are_refused(tmp_path: Path, capsys: Any):
    assert main(["--work", str(tmp_path / "none")]) == 2
    assert "must hold pairs.parquet, got none; give --pairs" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"--set must be NAME=VALUE .*, got 'steps'"):
        settings_of(CONFIG, None, ["steps"])
    with pytest.raises(ConfigError, match="has no option 'stepps'; did you mean 'steps'"):
        settings_of(CONFIG, None, ["stepps=3"])
    assert settings_of(CONFIG, "tiny", ["steps=3"])[1].steps == 3


@pytest.mark.slow
def test_training_stopped_and_resumed_is_delivered_ingested_and_searched(
    pairs: Path, judged: Path, tmp_path: Path, tiny_model_folder: Path, capsys: Any
):
    changes = [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]
    arguments = ["--pairs", str(pairs), "--judged", str(judged), "--work", str(tmp_path / "work")]
    arguments += ["--deliver", str(tmp_path / "out"), "--base", str(tiny_model_folder), *changes]
    assert main([*arguments, "--minutes", "0.000001"]) == 75
    assert "got to 1 in the time it was given; run the same command again" in capsys.readouterr().err
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["resumed_at"]) == (6, 1)
    model = tmp_path / "out" / "model"

    rows = [{"id": str(number), "text": pair(number)["document"]} for number in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "corpus.parquet")
    config = resolve_ingest_config({"encoder": {"model": str(model), "precision": "fp32"}}, None)
    assert (config.context.context_documents, config.context.max_document_tokens) == (20, 16)
    assert config.encoder.use_context
    build_index([str(tmp_path / "corpus.parquet")], tmp_path / "root", "c", config)
    hits = open_collection("c", root=tmp_path / "root").search("old stone path 7").hits
    assert len(hits) == 10
    assert any(passage.highlights for hit in hits for passage in hit.passages)
