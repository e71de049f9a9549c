"""The page of a passage, over every surface that shows passages."""

from __future__ import annotations

import asyncio
import json

import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.collection import open_collection
from cairn.pipeline.frameworks.mcp_server import OneCollection, make_server
from cairn.pipeline.frameworks.source import find_passages
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.settings import ServeSettings
from mcp import Client
from openpyxl import Workbook
from starlette.testclient import TestClient

from tests.corpus.test_documents import page, pdf
from tests.small_ingests import settings

PAGES = {
    "a.pdf": "page 2",
    "b.xlsx": "sheet Prices",
    "c.md": "section Install",
    "d.py": "lines 1-2",
    "e.html": "line 1",
    "row": None,
}
QUERY = {"query": "granite", "top_k": len(PAGES), "passages": 1}


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny_model_folder):
    """A root with a collection of a document of each kind, whose only passage has the page above."""
    folder = tmp_path_factory.mktemp("pages")
    source = folder / "in"
    source.mkdir()
    pdf(source / "a.pdf", b"", page("granite"))
    book = Workbook()
    book.create_sheet("Prices").append(["granite", 3])
    book.remove(book.worksheets[0])
    book.save(source / "b.xlsx")
    (source / "c.md").write_text("# Install\n\ngranite\n")
    (source / "d.py").write_text("# the stone\ngranite = 1\n")
    (source / "e.html").write_text("<p>granite</p>")
    (source / "f.csv").write_text("id,text\nrow,granite\n")
    few = {"num_clusters": 1, "context_documents": 2}
    config = settings(tiny_model_folder, landmark_interval=64, use_context=False, **few)
    build_index([str(source)], folder / "root", "c", config)
    return folder / "root"


@pytest.fixture(scope="module")
def opened(root):
    return open_collection("c", root=root)


def paged(hits, doc_id="doc_id", passages="passages"):
    """Return the page of each document's first passage, of hits as JSON."""
    return {hit[doc_id]: hit[passages][0]["page"] for hit in hits}


async def ask_tool(opened):
    async with Client(make_server(lambda _: OneCollection(opened))) as client:
        return (await client.call_tool("search", {"query": "granite", "top_k": 9})).structured_content


def test_every_passage_has_its_page_over_every_surface(root, opened, capsys):
    assert paged(opened.search(**QUERY).to_dict()["hits"]) == PAGES
    found = find_passages(opened, "granite", len(PAGES), {})
    assert {each.doc_id: each.metadata["page"] for each in found} == PAGES
    assert paged(asyncio.run(ask_tool(opened))["documents"]) == PAGES
    settings = ServeSettings(root=root, deadline_seconds=300.0)
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8400") as server:
        hits = server.post("/v1/collections/c/search", json=QUERY).json()["hits"]
        asked = {"query": "granite", "max_num_results": len(PAGES)}
        stored = server.post("/v1/vector_stores/c/search", json=asked).json()["data"]
    assert paged(hits) == paged(stored, "file_id", "content") == PAGES
    words = ["search", "granite", "--collection", "c", "--root", str(root), "--top-k", "9"]
    assert run(cairn, words, "cairn") == 0
    shown = capsys.readouterr().out
    assert all(f"  {place}  " in shown for place in PAGES.values() if place)
    assert run(cairn, [*words, "--json"], "cairn") == 0
    assert paged(json.loads(capsys.readouterr().out)["hits"]) == PAGES


@pytest.mark.parametrize(
    ("doc_id", "pages"), [("a.pdf", "2 pages"), ("b.xlsx", "1 sheet"), ("c.md", None), ("row", None)]
)
def test_lineage_says_how_many_pages_a_document_has(opened, doc_id, pages):
    found = opened.lineage(doc_id)
    assert found is not None
    assert found.pages == pages
