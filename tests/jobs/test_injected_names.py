"""Job files with names and options that try to be something else, and jobs that fail unforeseen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cairn.jobs.job import ingest_job, main
from cairn.pipeline.line.build_index import build_index


def write(folder: Path, collection: str = "c", more: str = "") -> Path:
    path = folder / "job.toml"
    path.write_text(f'collection = "{collection}"\nroot = "data"\n[ingest]\nsources = ["a/"]\n{more}')
    return path


@pytest.mark.parametrize("name", ["../up", "x; touch y", "--root=/", "$(touch y)", "a\\nb", "", "/etc"])
def test_job_with_an_injected_collection_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    path = write(tmp_path, name)
    assert main("build_index", ingest_job(build_index), ["--config", str(path)]) == 2
    assert "name must match" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_job_that_fails_unforeseen_ends_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: Any, progress: Any) -> Mapping[str, Any]:
        raise KeyError("canary")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main("build_index", fail, ["--config", str(write(tmp_path))]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: `cairn.jobs.build_index` ended in an unforeseen KeyError; ")
    assert "canary" not in said
