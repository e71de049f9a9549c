"""Folders of text files through the whole line: unchanged files are not read, and a sync deletes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.corpus import file_identity
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.plan_index import plan_index
from cairn.pipeline.types import IngestReport
from docx import Document

from tests.corpus.test_documents import page, pdf
from tests.small_ingests import stopped_at


@pytest.mark.parametrize("kind", ["files", "lines"])
def test_sources_without_types_are_skipped_synced_and_found(
    tmp_path: Path, root: Path, config: IngestConfig, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(file_identity, "SETTLED_SECONDS", 0.0)  # younger files are read again
    folder = tmp_path / "notes"
    folder.mkdir()

    def write(texts: dict[str, str]) -> None:
        for name, text in texts.items():
            path = folder / (f"{name}.md" if kind == "files" else f"{name}.jsonl")
            path.write_text(text if kind == "files" else f'{{"id": "{name}.md", "text": "{text}"}}\n')

    def ingest() -> IngestReport:
        return build_index([str(folder)], root, "c", replace(config, sync=True))

    write({"cat": "the cat sat", "stone": "old stone path", "river": "river way"})
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
    plan = plan_index([str(folder)], root, "c", config)
    assert plan["quarantine_reasons"] == {"unfit_value": 1}
    assert plan["quarantine_examples"]["unfit_value"].startswith(f"{folder}/cat.md: column 'year'")
    report = build_index([str(folder)], root, "c", config)
    assert report.quarantine_reasons == {"unfit_value": 1}
    rows = open_collection("c", root=root).documents.to_arrow(["doc_id", "year", "mood"]).to_pylist()
    assert sorted((row["doc_id"], row["year"], row["mood"]) for row in rows) == [
        ("cat.md", 2020, None),
        ("stone.md", 2021, "calm"),
    ]


def test_a_later_batch_adds_columns_and_a_killed_one_leaves_none(
    tmp_path: Path, root: Path, config: IngestConfig
) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text('{"id": "1", "text": "the cat sat", "error": null, "price": 1.5}\n')
    second.write_text('{"id": "2", "text": "old stone path", "error": "E1", "price": 2}\n')
    build_index([str(first)], root, "c", config)
    with stopped_at("documents-added"):
        build_index([str(second)], root, "c", config)
    before = open_collection("c", root=root)
    assert before.documents.to_arrow().column_names.count("error") == 0
    assert build_index([str(first)], root, "c", config).unchanged == 1
    assert build_index([str(second)], root, "c", config).indexed == 1
    found = open_collection("c", root=root)
    rows = found.documents.to_arrow(["doc_id", "error", "price"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [("1", None, 1.5), ("2", "E1", 2.0)]
    assert [hit.doc_id for hit in found.search("stone", filters={"error": "E1"}).hits] == ["2"]
    assert build_index([str(first)], root, "c", config).unchanged == 1


def test_documents_that_take_the_place_of_those_of_another_source_are_named(
    tmp_path: Path, root: Path, config: IngestConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, text in (("A", "the cat sat"), ("B", "old stone path")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "README.md").write_text(text)
    monkeypatch.chdir(tmp_path)
    usual = build_index(["A"], root, "c", config).warnings
    (tmp_path / "A" / "README.md").write_text("the cat sat on the mat")
    assert build_index([str(tmp_path / "A")], root, "c", config).warnings == usual
    planned = {*plan_index(["B"], root, "c", config)["warnings"]}
    [warning] = {*build_index(["B"], root, "c", config).warnings} - {*usual}
    assert warning in planned
    assert f"B/README.md that of {tmp_path}/A/README.md" in warning
    assert "--id-prefix" in warning
    both = replace(config, corpus=replace(config.corpus, id_prefix=True))
    build_index(["A"], root, "d", both)
    assert build_index(["B"], root, "d", both).warnings == usual
    assert open_collection("d", root=root).documents.ids() == ["A/README.md", "B/README.md"]


@pytest.mark.slow
def test_500_documents_of_five_kinds_are_one_ingest_and_each_answer_shows_its_page(
    tmp_path: Path, root: Path, config: IngestConfig
) -> None:
    folder = tmp_path / "press"
    folder.mkdir()
    filler = [f"{'river old stone path mat '[:-1]} {line}" for line in range(8)]
    asked: list[tuple[str, str, str]] = []  # a word, the document that has it, and where

    def words(kind: str, number: int, num_pages: int, place: Callable[[int], str]) -> list[list[str]]:
        name = f"{number}.{kind}"

        def word(at: int) -> str:
            return kind + f"{number:02}{at}".translate(str.maketrans("0123456789", "abcdefghij")) + "k"

        asked.extend((word(at), name, place(at)) for at in range(1, num_pages + 1))
        return [[word(at), *filler] for at in range(1, num_pages + 1)]

    for number in range(100):
        pdf(folder / f"{number}.pdf", *(page(*each) for each in words("pdf", number, 3, "page {}".format)))
        made = Document()
        for place, lines in enumerate(words("docx", number, 2, "page {}".format)):
            if place:
                made.add_page_break()
            made.add_paragraph("\n".join(lines))
        made.save(str(folder / f"{number}.docx"))
        ((first, *_), (second, *_)) = words("md", number, 2, "section {}".format)
        (folder / f"{number}.md").write_text(
            f"# 1\n\n{first}\n\n{' '.join(filler)}\n\n# 2\n\n{second}\n\n{' '.join(filler)}\n"
        )
        ((first, *_), (second, *_)) = words("html", number, 2, "section {}".format)
        (folder / f"{number}.html").write_text(
            f"<h1>1</h1><p>{first}<p>{' '.join(filler)}<h1>2</h1><p>{second}<p>{' '.join(filler)}"
        )
    rows = "".join(f"row{number},csv{number}x1 {filler[0]}\n" for number in range(100))
    (folder / "rows.csv").write_text(f"id,text\n{rows}")
    report = build_index([str(folder)], root, "c", config)
    assert (report.indexed, report.quarantined) == (500, 0)
    found = open_collection("c", root=root)
    for word, doc_id, place in asked[::7]:
        hits = {hit.doc_id: hit for hit in found.search(word, top_k=5, chunk_tokens=16).hits}
        kind, number = place.split()
        for passage in hits[doc_id].passages:
            shown = re.findall(r"\d+", passage.page or "")
            assert (passage.page or "").startswith(kind)
            assert word not in passage.text or shown[0] <= number <= shown[-1]
    for number in range(0, 100, 10):
        hits = {hit.doc_id: hit for hit in found.search(f"row{number}", top_k=5).hits}
        assert [passage.page for passage in hits[f"row{number}"].passages] == [None]
