"""Where a document came from, through runs that change it, are killed, or encode it again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.index.layout import CollectionLayout, read_manifest
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.recontextualise import recontextualise

from tests.small_ingests import write_texts

TEXTS = [f"the old cat walks the path number {number}" for number in range(6)]


def lineage(root: Path, doc_id: str) -> Any:
    found = open_collection("c", root=root).lineage(doc_id)
    assert found is not None
    return found


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus").mkdir()
    write_texts(tmp_path / "corpus" / "a.parquet", [None, *TEXTS[:2]], "doc-")
    write_texts(tmp_path / "corpus" / "b.parquet", TEXTS[2:], "doc-", first=3)
    return tmp_path / "corpus"


def test_lineage_names_file_row_run_model_and_generation(
    root: Path, corpus: Path, config: IngestConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    build_index([str(corpus)], root, "c", config, until="encode")
    report = build_index([str(corpus)], root, "c", config)
    assert (report.encoded, report.indexed) == (0, 6), "the run that publishes is named"
    layout = CollectionLayout(root, "c")
    found, manifest = lineage(root, "doc-2"), read_manifest(layout, 1)

    assert (found.source_file, found.source_row) == (f"{corpus}/a.parquet", 2)
    assert (found.run.run_id, found.run.job, found.run.generation) == (manifest.run_id, "build_index", 1)
    assert found.published_by == manifest.run_id
    made_with = config.encoder.model, manifest.fingerprints["encoder"]
    assert (found.model, found.encoder_fingerprint) == made_with
    assert lineage(root, "doc-4").source_row == 1
    assert open_collection("c", root=root).lineage("doc-99") is None
    # The record of a run names the folder, and not each of its files.
    record = json.loads((layout.runs_folder / f"{manifest.run_id}.json").read_text())
    assert (report.files, manifest.sources, record["sources"]) == (2, (str(corpus),), [str(corpus)])

    assert run(cairn, ["lineage", "c", "doc-4", "--root", str(root)], "cairn") == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["source", "file", f"{corpus}/b.parquet"] in shown
    assert ["source", "row", "1"] in shown
    assert run(cairn, ["lineage", "c", "doc-4", "--root", str(root), "--json"], "cairn") == 0
    assert json.loads(capsys.readouterr().out) == lineage(root, "doc-4").to_dict()
    assert run(cairn, ["lineage", "c", "doc-99", "--root", str(root)], "cairn") == 2


def test_lineage_after_a_change_is_of_the_run_that_read_it(
    root: Path, corpus: Path, config: IngestConfig
) -> None:
    build_index([str(corpus)], root, "c", config)
    before = lineage(root, "doc-4").run
    write_texts(corpus / "b.parquet", [*TEXTS[2:4], "the mat marks the way"], "doc-", first=3)
    build_index([str(corpus)], root, "c", config)
    changed, unchanged = lineage(root, "doc-5"), lineage(root, "doc-4")

    assert (changed.source_row, changed.run.generation) == (2, 2)
    assert changed.run.run_id != before.run_id
    assert unchanged.run == before
    assert unchanged.published_by == changed.run.run_id

    recontextualise(root, "c", config)
    again = lineage(root, "doc-5")
    assert (again.generation, again.run) == (3, changed.run)


def test_lineage_without_the_files_of_runs_knows_the_source_file_alone(
    root: Path, corpus: Path, config: IngestConfig
) -> None:
    build_index([str(corpus)], root, "c", config)
    layout = CollectionLayout(root, "c")
    (path,) = layout.origins_folder.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    cut = lineage(root, "doc-2")
    shutil.rmtree(layout.origins_folder)
    gone = lineage(root, "doc-2")

    assert cut == gone
    assert (gone.source_file, gone.source_row, gone.run) == (f"{corpus}/a.parquet", None, None)
