"""The page of a passage and the words that answered, over every surface that shows passages."""

from __future__ import annotations

import asyncio
import json

import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.collection import open_collection
from cairn.pipeline.frameworks.mcp_server import OneCollection, make_server
from cairn.pipeline.frameworks.source import find_passages
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.search.ranking import BY_VECTORS_ALONE
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
TEXT, WORDLESS = "granite basalt", "?!"
QUERY = {"query": TEXT, "top_k": len(PAGES), "passages": 1}


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
    (source / "f.csv").write_text("id,title,text\nrow,basalt,granite\n")
    few = {"num_clusters": 1, "context_documents": 2, "token_bytes": 8}
    config = settings(tiny_model_folder, landmark_interval=64, use_context=False, **few)
    build_index([str(source)], folder / "root", "c", config)
    return folder / "root"


@pytest.fixture(scope="module")
def opened(root):
    return open_collection("c", root=root)


def words_of(text, start, highlights):
    """Return the marked words of a text that begins at a character of its document, best first."""
    marked = sorted(highlights, key=lambda each: -each["weight"])
    return [text[each["start_char"] - start : each["end_char"] - start] for each in marked]


def shown(hits, doc_id="doc_id", passages="passages"):
    """Return of each document's first passage the page and what is marked in it and in the title."""
    firsts = {hit[doc_id]: hit[passages][0] for hit in hits}
    return {name: told_of(first, first["text"], first["start_char"]) for name, first in firsts.items()}


def told_of(passage, text, start):
    in_title = [(each["start_char"], each["end_char"]) for each in passage["title_highlights"]]
    return passage["page"], words_of(text, start, passage["highlights"]), in_title


async def ask_tool(opened, query):
    async with Client(make_server(lambda _: OneCollection(opened))) as client:
        return (await client.call_tool("search", {"query": query, "top_k": 9})).structured_content


def test_every_passage_has_its_page_and_the_words_that_answered_over_every_surface(root, opened, capsys):
    expected = shown(opened.search(**QUERY).to_dict()["hits"])
    assert {doc_id: told[0] for doc_id, told in expected.items()} == PAGES
    assert all("granite" in words for _, words, _ in expected.values())
    assert expected["row"][2] == [(0, len("basalt"))]
    found = find_passages(opened, TEXT, len(PAGES), {})
    assert {each.doc_id: told_of(each.metadata, each.text, each.start_char) for each in found} == expected
    told = asyncio.run(ask_tool(opened, TEXT))
    firsts = {each["doc_id"]: each["passages"][0] for each in told["documents"]}
    assert {doc_id: [first["page"], first["highlights"]] for doc_id, first in firsts.items()} == {
        doc_id: [place, words] for doc_id, (place, words, _) in expected.items()
    }
    settings = ServeSettings(root=root, deadline_seconds=300.0)
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8400") as server:

        def asked_store(query):
            body = {"query": query, "max_num_results": len(PAGES)}
            return server.post("/v1/vector_stores/c/search", json=body).json()

        hits = server.post("/v1/collections/c/search", json=QUERY).json()["hits"]
        stored, wordless = asked_store(TEXT), asked_store([WORDLESS, WORDLESS])
    assert shown(hits) == shown(stored["data"], "file_id", "content") == expected
    assert found[0].metadata["warnings"] == told["warnings"] == stored["warnings"] == []
    by_vectors = find_passages(opened, WORDLESS, 1, {})[0].metadata["warnings"]
    assert by_vectors == wordless["warnings"] == asyncio.run(ask_tool(opened, WORDLESS))["warnings"]
    assert by_vectors == [BY_VECTORS_ALONE]
    words = ["search", TEXT, "--collection", "c", "--root", str(root), "--top-k", "9"]
    assert run(cairn, words, "cairn") == 0
    said = capsys.readouterr().out
    assert all(f"  {place}  " in said for place in PAGES.values() if place)
    assert run(cairn, [*words, "--json"], "cairn") == 0
    assert shown(json.loads(capsys.readouterr().out)["hits"]) == expected


@pytest.mark.parametrize(
    ("doc_id", "pages"), [("a.pdf", "2 pages"), ("b.xlsx", "1 sheet"), ("c.md", None), ("row", None)]
)
def test_lineage_says_how_many_pages_a_document_has(opened, doc_id, pages):
    found = opened.lineage(doc_id)
    assert found is not None
    assert found.pages == pages
