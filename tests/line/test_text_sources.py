"""Folders of text files through the whole line: unchanged files are not read, and a sync deletes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.corpus.file_identity import SETTLED_SECONDS
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.plan_index import plan_index
from cairn.pipeline.types import IngestReport


@pytest.mark.parametrize("kind", ["files", "lines"])
def test_sources_without_types_are_skipped_synced_and_found(
    tmp_path: Path, root: Path, config: IngestConfig, kind: str
) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()

    def write(texts: dict[str, str]) -> None:
        for name, text in texts.items():
            path = folder / (f"{name}.md" if kind == "files" else f"{name}.jsonl")
            path.write_text(text if kind == "files" else f'{{"id": "{name}.md", "text": "{text}"}}\n')

    def ingest() -> IngestReport:
        return build_index([str(folder)], root, "c", replace(config, sync=True))

    write({"cat": "the cat sat", "stone": "old stone path", "river": "river way"})
    time.sleep(SETTLED_SECONDS + 0.1)  # younger files are read again
    assert ingest().indexed == 3
    report = ingest()
    assert (report.unchanged, report.unread_files) == (3, 3)
    write({"cat": "the cat sat on mat"})
    next(iter(folder.glob("river.*"))).unlink()
    report = ingest()
    assert (report.indexed, report.unchanged, report.deleted, report.unread_files) == (1, 1, 1, 1)
    found = open_collection("c", root=root)
    assert found.documents.ids() == ["stone.md", "cat.md"]


def test_front_matter_that_changes_later_stops_no_ingest(
    tmp_path: Path, root: Path, config: IngestConfig
) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "cat.md").write_text("---\nyear: 2020\n---\nthe cat sat")
    (folder / "stone.md").write_text("old stone path")
    build_index([str(folder)], root, "c", config)
    (folder / "stone.md").write_text("---\nyear: 2021\nmood: calm\n---\nold stone path")
    (folder / "cat.md").write_text("---\nyear: late\n---\nthe cat sat")
    planned = plan_index([str(folder)], root, "c", config)["warnings"]
    warnings = build_index([str(folder)], root, "c", config).warnings
    assert planned == list(warnings)
    assert ["'mood'" in warning for warning in warnings[:2]] == [True, False]
    assert ["'year'" in warning for warning in warnings[:2]] == [False, True]
    rows = open_collection("c", root=root).documents.to_arrow(["doc_id", "text", "year"]).to_pylist()
    assert sorted((row["doc_id"], row["text"], row["year"]) for row in rows) == [
        ("cat.md", "the cat sat", None),
        ("stone.md", "old stone path", 2021),
    ]
