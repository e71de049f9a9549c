from __future__ import annotations

from pathlib import Path

import pytest
from cairn.jobs.engine_settings import EngineConfig
from cairn.jobs.job_file import IngestJob, TrainJob, read_job
from cairn.pipeline.errors import ConfigError


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


INGEST = 'job = "build_index"\nsources = ["a/", "b/"]\ncollection = "c"\n'


def test_job_of_an_ingest_holds_what_the_file_says(tmp_path: Path):
    text = f"""{INGEST}root = "/srv"
sync = true
[engine]
name = "ray"
max_workers = 4
[encoder]
temperature_by_length = [[128, 0.95]]
[resources]
cpus = 2
"""
    job = read_job(write(tmp_path, text))
    assert isinstance(job, IngestJob)
    assert (job.job, job.sources, job.collection, job.root, job.sync, job.cpus) == (
        "build_index",
        ("a/", "b/"),
        "c",
        "/srv",
        True,
        2,
    )
    assert job.engine == EngineConfig(name="ray", max_workers=4)
    assert job.stages["encoder"] == {"temperature_by_length": ([128, 0.95],)}


def test_job_on_a_cluster_encodes_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    path = write(tmp_path, INGEST)
    on_ray, local = read_job(path), read_job(write(tmp_path, f'{INGEST}[engine]\nname = "local"\n'))
    assert isinstance(on_ray, IngestJob)
    assert isinstance(local, IngestJob)
    assert (on_ray.engine, local.engine) == (EngineConfig(name="ray", address="head:6379"), EngineConfig())


def test_job_of_a_training_holds_what_the_file_says(tmp_path: Path):
    job = read_job(
        write(
            tmp_path,
            'job = "train_encoder"\noutput = "runs/mine"\nsources = ["pairs/"]\n[train]\nsteps = 3\n',
        )
    )
    assert isinstance(job, TrainJob)
    assert (job.output, job.sources, job.settings, job.subject) == (
        "runs/mine",
        ("pairs/",),
        {"steps": 3},
        "mine",
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("job = ", "a job must be a TOML file"),
        ('job = "bake"', ("job must be one of cluster_corpus, encode_corpus, write_index, build_index, "
"train_encoder, pretrain_encoder, compress_model, distill_encoder, got 'bake'")),
        ('job = "build_index"\nsources = ["a"]', "collection must be given"),
        (f"{INGEST}colour = 1", "must not have 'colour'; there are sources, collection, root, sync"),
        (f"{INGEST}sync = 1", "sync must be true or false, got 1"),
        ('job = "build_index"\nsources = "a"\ncollection = "c"', "sources must be a list of texts, got 'a'"),
        (('job = "build_index"\nsources = [1]\ncollection = '
'"c"'), r"sources must be a list of texts, got \[1\]"),
        (f"{INGEST}encoder = 1", "encoder must be a table, got 1"),
        (f"{INGEST}[encoder]\nsize = 1", r"\[encoder\] must not have 'size'; there are model, pooling"),
        (f"{INGEST}[engine]\nname = 'dask'", "name must be one of local, ray, got 'dask'"),
        ((f"{INGEST}[engine]\nmin_workers = "
"'two'"), r"job.toml: \[engine\] min_workers must be a whole number from 1 to 10,000, got 'two'"),
        (f"{INGEST}[engine]\nmax_workers = 2.5", "max_workers must be .* from 1 to 10,000, got 2.5"),
        (f"{INGEST}[engine]\naddress = 1", r"\[engine\] address must be text, got 1"),
        (f"{INGEST}[engine]\nworker_gpus = true", r"\[engine\] worker_gpus must be .* 0 to 1,024, got True"),
        (f"{INGEST}[resources]\ncpus = 'two'", r"\[resources\] cpus must be a number, got 'two'"),
        ('job = "train_encoder"\nsources = ["a"]', "output must be given"),
        ('job = "train_encoder"\noutput = "a"\ntrain = 1', "train must be a table, got 1"),
    ],
)  # fmt: skip
def test_file_that_is_no_job_is_refused_with_a_sentence(tmp_path: Path, text: str, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        read_job(write(tmp_path, text))


def test_file_that_is_not_there_is_refused_with_a_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match="a job must be a TOML file"):
        read_job(tmp_path / "absent.toml")
