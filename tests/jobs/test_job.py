"""Jobs as processes run them, `python -m cairn.jobs.NAME --config FILE`, alone and one after another."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.jobs.cluster_corpus import cluster_corpus
from cairn.jobs.compress_model import compress_model
from cairn.jobs.distill_encoder import distill_encoder
from cairn.jobs.encode_corpus import encode_corpus
from cairn.jobs.job import ingest_job, main
from cairn.jobs.job_file import VERBS, ingest_of, read_job
from cairn.jobs.pretrain_encoder import pretrain_encoder
from cairn.jobs.train_encoder import train_encoder
from cairn.jobs.write_index import write_index
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.lab.train.pretrain.settings import PretrainConfig
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.line.build_index import build_index

CONFIGS = Path(__file__).resolve().parents[2] / "jobs" / "configs"
WORDS = ["stone", "path", "hill", "river", "mark", "way", "old", "mountain", "walk", "mat", "cat"]
DOCUMENTS = 30
RUN = {
    "build_index": ingest_job(build_index),
    "cluster_corpus": ingest_job(cluster_corpus),
    "encode_corpus": ingest_job(encode_corpus),
    "write_index": ingest_job(write_index),
    "train_encoder": train_encoder,
    "pretrain_encoder": pretrain_encoder,
    "compress_model": compress_model,
    "distill_encoder": distill_encoder,
}
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
        {
            "id": f"d{number:03d}",
            "text": " ".join(np.random.default_rng(number).choice(WORDS, size=12 + number)),
            "year": 2000,
        }
        for number in range(DOCUMENTS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "corpus.parquet")
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
    def call(job: Any, *arguments: str) -> tuple[int, dict[str, Any], str]:
        code = main(job, RUN[job], ["--config", *arguments])
        captured = capsys.readouterr()
        return code, json.loads(captured.out or "{}"), captured.err

    return call


def test_jobs_one_after_another_build_what_build_index_builds(
    folder: Path, write_job: Any, run: Any, stored: Callable[..., Any], require_same: Callable[..., None]
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


def test_encode_corpus_by_itself_clusters_first(folder: Path, write_job: Any, run: Any):
    assert run("encode_corpus", write_job("encode_corpus"))[1]["encoded"] == DOCUMENTS
    assert run("write_index", write_job("write_index"))[1]["generation"] == 1


def test_write_index_before_everything_is_encoded_is_refused(folder: Path, write_job: Any, run: Any):
    run("cluster_corpus", write_job("cluster_corpus"))
    code, _, error = run("write_index", write_job("write_index"))
    assert code == 2
    assert (
        f"every document must be encoded before write_index, got {DOCUMENTS} that are not; run "
        "encode_corpus first" in error
    )
    assert not CollectionLayout(folder / "root", "c").exists()


def test_jobs_of_a_collection_without_changes_leave_it(write_job: Any, run: Any):
    run("build_index", write_job("build_index"))
    for job in ("cluster_corpus", "encode_corpus", "write_index"):
        code, report, _ = run(job, write_job(job))
        assert (code, report["unchanged"], report["generation"]) == (0, DOCUMENTS, 1)


def test_job_with_quarantined_rows_ends_with_3(folder: Path, write_job: Any, run: Any):
    pq.write_table(
        pa.table({"id": ["a", "b"], "text": ["an old path", " "], "year": [1, 2]}), folder / "corpus.parquet"
    )
    assert run("build_index", write_job("build_index"))[0] == 3


def test_job_that_fails_is_one_sentence(write_job: Any, run: Any):
    code, report, error = run("build_index", write_job("build_index", sources='["absent.parquet"]'))
    assert (code, report, error.count("\n")) == (2, {}, 1)
    assert error.startswith("error: ")


def test_setting_of_another_type_is_one_sentence(folder: Path, write_job: Any, run: Any):
    config = write_job("build_index")
    Path(config).write_text(Path(config).read_text().replace("num-clusters = 3", "num-clusters = 'many'"))
    sentence = (
        "error: num_clusters must be a whole number from 1 to 65,536, got 'many' (default: from its size)\n"
    )
    assert run("build_index", config) == (2, {}, sentence)


def test_relative_paths_start_from_the_folder_that_is_given(
    folder: Path,
    write_job: Any,
    run: Any,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
):
    config = write_job("build_index")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert run("build_index", config, "--folder", str(folder))[0] == 0
    assert CollectionLayout(folder / "root", "c").exists()


def test_job_runs_as_a_module(folder: Path, write_job: Any):
    command = [sys.executable, "-m", "cairn.jobs.build_index", "--config", write_job("build_index")]
    result = subprocess.run(
        command, cwd=folder, env={**os.environ}, capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout)["encoded"] == DOCUMENTS
    assert "stage=encode done=" in result.stderr


def test_train_encoder_trains_and_says_so(folder: Path, run: Any, tiny_model_folder: Path):
    pairs = [
        {
            "query": f"the {WORDS[n % 11]} {n}",
            "document": f"an old {WORDS[n % 11]} {n} on the way",
            "source": "s",
        }
        for n in range(60)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = folder / "train.toml"
    config.write_text(
        f'[train]\nsources = ["pairs.jsonl"]\noutput = "run"\nbase = "{tiny_model_folder}"\n'
        "steps = 2\nbatch_pairs = 12\nheldout_pairs = 6\nmax_document_tokens = 40\nprecision = "
        "'fp32'\n"
    )
    code, report, error = run("train_encoder", str(config))
    assert (code, error.partition("error")[1]) == (0, "")
    assert report["steps"] == 2
    assert (folder / "run" / "model" / "config.json").exists()


def test_pretrain_encoder_pretrains_and_says_so(folder: Path, run: Any, tiny_model_folder: Path):
    config = folder / "pretrain.toml"
    config.write_text(
        f'[pretrain]\nsources = ["corpus.parquet"]\noutput = "run"\n'
        f'base = "{tiny_model_folder}"\n'
        "steps = 2\nbatch_rows = 2\nmax_tokens = 40\nlandmark_intervals = [8, 16]\nprecision = "
        "'fp32'\n"
    )
    code, report, error = run("pretrain_encoder", str(config))
    assert (code, error.partition("error")[1]) == (0, "")
    assert (report["steps"], report["texts"]) == (2, DOCUMENTS)
    assert (folder / "run" / "model" / "config.json").exists()


def test_train_encoder_setting_of_another_type_is_refused_before_torch_is_loaded(folder: Path):
    """In a process of its own: here beartype refuses it first."""
    (folder / "train.toml").write_text('[train]\nsources = ["pairs.jsonl"]\noutput = "run"\nsteps = "two"\n')
    program = (
        "import sys; from cairn.jobs.job import main; from cairn.jobs.train_encoder import train_encoder; "
        "print(main('train_encoder', train_encoder, ['--config', 'train.toml']), 'torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (result.stdout, result.stderr) == (
        "2 False\n",
        "error: train.toml: [train] steps must be a whole number of at least 1, got 'two'\n",
    )


def test_compress_model_and_distill_encoder_make_models(folder: Path, run: Any, tiny_model_folder: Path):
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
    (folder / "distill.toml").write_text(
        f'[distill]\nteacher = "{tiny_model_folder}"\nstudent = "small"\n'
        'texts = ["texts.parquet"]\noutput = "run"\nsteps = 2\nbatch_texts = 4\n'
        "heldout_texts = 2\nmax_tokens = 20\nprecision = 'fp32'\n"
    )
    code, report, error = run("distill_encoder", str(folder / "distill.toml"))
    assert (code, error.partition("error")[1]) == (0, "")
    assert report["follows"] == "both"
    assert (folder / "run" / "model" / "config.json").exists()


@pytest.mark.parametrize(
    ("job", "text", "sentence"),
    [
        ("train_encoder", '[train]\noutput = "run"', "[train] steps must be given"),
        ("train_encoder", '[train]\nsources = ["a"]\nsteps = 2', "[train] output must be given"),
        ("train_encoder", "[train]\nstepps = 2", "[train] has no setting 'stepps'; did you mean 'steps'?"),
        (
            "compress_model",
            '[compress]\ntexts = ["a"]\noutput = "b"\nlayers = 0',
            "[compress] layers must be",
        ),
        ("distill_encoder", '[distill]\nteacher = "a"', "[distill] student must be given"),
    ],
)
def test_settings_that_are_wrong_are_refused(folder: Path, run: Any, job: str, text: str, sentence: str):
    (folder / "job.toml").write_text(text)
    code, _, error = run(job, str(folder / "job.toml"))
    assert (code, error.count("\n")) == (2, 1)
    assert f"job.toml: {sentence}" in error


def test_every_job_has_a_config_that_says_what_to_expect():
    paths = {path.stem: path for path in CONFIGS.glob("*.toml")}
    assert sorted(paths) == sorted([*VERBS, *RECIPES])
    own = {"sources", "documents", "judged", "output", "base", "from_config"}
    for name, path in paths.items():
        job = read_job(path)
        assert job.name == RECIPES.get(name, name)
        kind = {"train": TrainConfig, "pretrain": PretrainConfig}.get(VERBS[job.name])
        if kind is not None:
            job.config(kind, dict.fromkeys(own, object), ())
        if VERBS[job.name] == "ingest":
            ingest_of(job)
        assert re.search(r"^# Expected: .*\d", path.read_text(), re.MULTILINE), path.name
        assert re.search(r"^# Result: ", path.read_text(), re.MULTILINE), path.name


def test_ingest_reads_the_file_of_its_job(folder: Path, write_job: Any, monkeypatch: pytest.MonkeyPatch):
    from cairn.cli.main import cairn
    from cairn.cli.main import run as run_verb

    monkeypatch.setenv("CAIRN_CONFIG", write_job("build_index"))
    assert run_verb(cairn, ["ingest", "--quiet"], "cairn") == 0
    assert CollectionLayout(folder / "root", "c").exists()


@pytest.mark.parametrize("name", ["../up", "x; touch y", "--root=/", "$(touch y)", "a\\nb", "", "/etc"])
def test_job_with_an_injected_collection_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    path = tmp_path / "job.toml"
    path.write_text(f'collection = "{name}"\nroot = "data"\n[ingest]\nsources = ["a/"]\n')
    assert main("build_index", ingest_job(build_index), ["--config", str(path)]) == 2
    assert "name must match" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_job_that_fails_unforeseen_ends_in_a_sentence(
    tmp_path: Path, write_job: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: Any, progress: Any) -> Mapping[str, Any]:
        raise KeyError("canary")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main("build_index", fail, ["--config", write_job("build_index")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: `cairn.jobs.build_index` ended in an unforeseen KeyError; ")
    assert "canary" not in said
