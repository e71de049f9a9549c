"""Jobs as processes run them, `python -m cairn.jobs.NAME --config FILE`, alone and one after another."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn
from cairn.cli.main import run as run_verb
from cairn.jobs.job import JOBS, read_job
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.index.layout import CollectionLayout

from tests.small_ingests import text_of, write_rows
from tests.stored_collections import require_same, stored

CONFIGS = Path(__file__).resolve().parents[2] / "jobs" / "configs"
DOCUMENTS = 30
INGEST = 'collection = "c"\n[ingest]\nsources = ["a/", "b/"]\n'
RECIPES = {
    "train_default": "train_encoder",
    "train_stage_two": "train_encoder",
    "pretrain_m3bert_1": "pretrain_encoder",
    "pretrain_m3bert_2": "pretrain_encoder",
    "train_m3bert_3": "train_encoder",
}
"""Files beside one of each job, and whose they are."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    rows = [
        {"id": f"d{number:03d}", "text": text_of(number, 12 + number), "year": 2000}
        for number in range(DOCUMENTS)
    ]
    write_rows(tmp_path / "corpus.parquet", rows)
    return tmp_path


@pytest.fixture
def write_job(folder: Path, tiny_model_folder: Path) -> Callable[..., str]:
    def write(job: str, collection: str = "c", sources: str = '["corpus.parquet"]') -> str:
        path = folder / f"{job}-{collection}.toml"
        path.write_text(
            f"""job = "{job}"
collection = "{collection}"
root = "root"
[ingest]
sources = {sources}
num-clusters = 3
context-documents = 8
model = "{tiny_model_folder}"
landmark-interval = 16
"""
        )
        return str(path)

    return write


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any], str]]:
    def call(job: str, config: str) -> tuple[int, dict[str, Any], str]:
        code = run_verb(cairn, (*JOBS[job], "--config", config, "--json"), "cairn")
        captured = capsys.readouterr()
        return code, json.loads(captured.out or "{}"), captured.err

    return call


def test_jobs_one_after_another_build_what_build_index_builds_and_leave_it_without_changes(
    folder: Path, write_job: Any, run: Any
):
    code, report, _ = run("cluster_corpus", write_job("cluster_corpus"))
    layout = CollectionLayout(folder / "root", "c")
    assert (code, report["indexed"], report["encoded"], report["generation"]) == (0, DOCUMENTS, 0, 0)
    assert layout.pending_context_path.exists()
    assert not layout.exists()
    code, report, _ = run("encode_corpus", write_job("encode_corpus"))
    assert (code, report["indexed"], report["encoded"], report["generation"]) == (0, DOCUMENTS, DOCUMENTS, 0)
    code, report, _ = run("write_index", write_job("write_index"))
    assert (code, report["indexed"], report["encoded"], report["generation"]) == (0, DOCUMENTS, 0, 1)
    assert not layout.pending_folder.exists()
    code, report, _ = run("build_index", write_job("build_index", "whole"))
    assert (code, report["encoded"], report["generation"]) == (0, DOCUMENTS, 1)
    require_same(stored(folder / "root", "c"), stored(folder / "root", "whole"))
    run("build_index", write_job("build_index"))
    for job in ("cluster_corpus", "encode_corpus", "write_index"):
        code, report, _ = run(job, write_job(job))
        assert (code, report["unchanged"], report["generation"]) == (0, DOCUMENTS, 1)


def test_write_index_before_everything_is_encoded_is_refused(folder: Path, write_job: Any, run: Any):
    run("cluster_corpus", write_job("cluster_corpus"))
    code, _, error = run("write_index", write_job("write_index"))
    told = (
        f"every document must be encoded before write_index, got {DOCUMENTS} that are not; run encode_corpus"
    )
    assert (code, told in error) == (2, True), error
    assert not CollectionLayout(folder / "root", "c").exists()
    # By itself, encode_corpus clusters first.
    assert run("encode_corpus", write_job("encode_corpus", "other"))[1]["encoded"] == DOCUMENTS
    assert run("write_index", write_job("write_index", "other"))[1]["generation"] == 1


def test_job_runs_as_a_module_with_paths_from_the_folder_that_is_given(
    folder: Path, write_job: Any, tmp_path_factory: pytest.TempPathFactory
):
    command = [sys.executable, "-m", "cairn.jobs.build_index", "--config", write_job("build_index")]
    result = subprocess.run(
        [*command, "--folder", str(folder)],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout)["encoded"] == DOCUMENTS
    assert "stage=encode done=" in result.stderr
    assert CollectionLayout(folder / "root", "c").exists()


def test_every_job_has_a_module_that_becomes_its_verb(monkeypatch: pytest.MonkeyPatch):
    began: list[tuple[str, ...]] = []

    def begin(program: str, words: tuple[str, ...]) -> None:
        began.append(words[2:])
        raise SystemExit

    monkeypatch.setattr(os, "execv", begin)
    for name in JOBS:
        monkeypatch.setattr(sys, "argv", [name, "--config", "job.toml"])
        # another test may have imported it
        monkeypatch.delitem(sys.modules, f"cairn.jobs.{name}", raising=False)
        with pytest.raises(SystemExit):
            runpy.run_module(f"cairn.jobs.{name}", run_name="__main__")
        assert began.pop() == ("cairn.cli.main", *JOBS[name], "--config", "job.toml", "--json")


def test_setting_of_another_type_is_refused_before_torch_is_loaded(folder: Path):
    """In a process of its own: here beartype refuses it first."""
    (folder / "train.toml").write_text('[train]\nsources = ["pairs.jsonl"]\noutput = "run"\nsteps = "two"\n')
    program = (
        "import sys; from cairn.cli.main import cairn, run; "
        "print(run(cairn, ['train', '--config', 'train.toml'], 'cairn'), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == (
        "2 False\n",
        "error: train.toml: [train] steps must be a whole number of at least 1, got 'two'\n",
    )


def test_compress_model_makes_a_model(folder: Path, run: Any, tiny_model_folder: Path):
    words = ["the", "old", "cat", "sat", "on", "a", "mat", "by", "river", "stone", "and", "path"]
    texts = [" ".join(words[start:] + words[:start]) for start in range(len(words))]
    pq.write_table(pa.table({"text": texts}), folder / "texts.parquet")
    (folder / "compress.toml").write_text(
        f'[compress]\nmodel = "{tiny_model_folder}"\ntexts = ["texts.parquet"]\n'
        'output = "small"\nlayers = 1\n'
    )
    code, report, error = run("compress_model", str(folder / "compress.toml"))
    assert (code, error.partition("error")[1]) == (0, "")
    assert [step["layers"] for step in report["steps"]] == [2, 1]


@pytest.mark.parametrize(
    ("job", "text", "sentence"),
    [
        ("train_encoder", '[train]\nsources = ["a"]\nsteps = 2', "Missing option '--output'"),
        ("train_encoder", '[train]\noutput = "run"', "Missing option '--steps'"),
        ("train_encoder", "[train]\nstepps = 2", "[train] has no setting 'stepps'; did you mean 'steps'?"),
        (
            "compress_model",
            '[compress]\ntexts = ["a"]\noutput = "b"\nlayers = 0',
            "[compress] layers must be",
        ),
        ("distill_encoder", '[distill]\nteacher = "a"', "Missing argument 'STUDENT'"),
        ("build_index", "job = ", "must be valid TOML"),
        ("build_index", '[ingest]\nsources = ["a"]', "Missing option '--collection'"),
        ("build_index", f"colour = 1\n{INGEST}", "has no setting 'colour' before the first table"),
        ("build_index", f"{INGEST}colour = 1", "[ingest] has no setting 'colour'"),
        ("build_index", f"{INGEST}sources = 1", "must be valid TOML"),
        ("build_index", f'{INGEST}"__class__" = "x"', "[ingest] has no setting '--class--'"),
        ("build_index", '[ingest]\nsources = "a"', "sources must be a list, each text, got 'a'"),
        ("build_index", f"deep = {'[' * 100_000}\n", "nested less deeply"),
        *(
            ("build_index", f"{INGEST.replace(chr(34) + 'c' + chr(34), repr(name))}", "name must match")
            for name in ["../up", "x; touch y", "--root=/", "$(touch y)", "a\\nb", "", "/etc"]
        ),
    ],
    ids=range(20),
)
def test_settings_that_are_wrong_are_refused_before_anything_is_made(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch, job: str, text: str, sentence: str
):
    (tmp_path / "job.toml").write_text(text)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    code, _, error = run(job, str(tmp_path / "job.toml"))
    assert (code, sentence in error) == (2, True), error
    assert list(here.iterdir()) == []


def test_file_whose_job_is_none_is_refused(tmp_path: Path):
    (tmp_path / "job.toml").write_text('job = "bake"')
    with pytest.raises(ConfigError, match=r"job must be one of cluster_corpus, .*, got 'bake'"):
        read_job(tmp_path / "job.toml")


def test_every_job_has_a_config_that_its_verb_takes():
    paths = {path.stem: path for path in CONFIGS.glob("*.toml")}
    assert sorted(paths) == sorted([*JOBS, *RECIPES])
    for name, path in paths.items():
        assert read_job(path).name == RECIPES.get(name, name)
        verb, *words = (*JOBS[read_job(path).name], "--config", str(path))
        command = cairn.get_command(click.Context(cairn), verb)
        assert command is not None
        context = command.make_context(verb, words, parent=click.Context(cairn))
        assert context.params["output" if verb != "ingest" else "collection"]
