from __future__ import annotations

from pathlib import Path

import pytest
from cairn.jobs.engine_settings import EngineConfig
from cairn.jobs.job_file import ingest_of, read_job
from cairn.pipeline.errors import ConfigError


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


INGEST = 'job = "build_index"\ncollection = "c"\n[ingest]\nsources = ["a/", "b/"]\n'


def test_job_of_an_ingest_holds_what_the_file_says(tmp_path: Path):
    text = f"""root = "/srv"
{INGEST}sync = true
engine = "ray"
workers = "2:4"
temperature-by-length = [[128, 0.95]]
cluster_iterations = 3
"""
    job = ingest_of(read_job(write(tmp_path, text)))
    assert (job.sources, job.collection, job.root) == (("a/", "b/"), "c", "/srv")
    assert job.engine == EngineConfig(name="ray", min_workers=2, max_workers=4)
    chosen = {name: value for name, value in job.chosen.items() if value}
    assert chosen == {
        "sync": True,
        "cluster": {"num_iterations": 3},
        "encoder": {"temperature_by_length": ([128, 0.95],)},
    }


def test_job_on_a_cluster_encodes_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    on_ray = ingest_of(read_job(write(tmp_path, INGEST)))
    local = ingest_of(read_job(write(tmp_path, f'{INGEST}engine = "local"\n')))
    assert (on_ray.engine, local.engine) == (EngineConfig(name="ray", address="head:6379"), EngineConfig())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("job = ", "must be valid TOML"),
        ('job = "bake"', "job must be one of cluster_corpus, encode_corpus, .*, got 'bake'"),
        ('job = "build_index"\n[ingest]\nsources = ["a"]', "collection must be given"),
        (f"colour = 1\n{INGEST}", "has no setting 'colour' before the first table"),
        (f"{INGEST}colour = 1", r"\[ingest\] has no setting 'colour'"),
        (f"{INGEST}sources = 1", "must be valid TOML"),
        (f'{INGEST}"__class__" = "x"', r"\[ingest\] has no setting '__class__'"),
        ('job = "build_index"\n[ingest]\nsources = "a"', "sources must be a list, each text, got 'a'"),
        (f"{INGEST}engine = 'dask'", "name must be one of local, ray, got 'dask'"),
        (f"{INGEST}workers = 'two'", "workers must be a number, or two as in 2:8, got 'two'"),
        (f"{INGEST}worker-gpus = true", r"\[ingest\] worker_gpus must be .* 0 to 1,024, got True"),
        (f"deep = {'[' * 100_000}\n", "nested less deeply"),
    ],
    ids=range(12),
)
def test_file_that_is_no_job_is_refused_with_a_sentence(tmp_path: Path, text: str, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        ingest_of(read_job(write(tmp_path, text)))
