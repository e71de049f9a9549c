"""Every row of the table of papers names a command or a module, a test and a section that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, tables
from tests.docs.test_names import parse

PAGE = DOCS / "concepts" / "papers.md"
HEAD = ["technique", "place", "use", "test with its reference", "experiment"]
ROWS = [row for _, rows in tables(PAGE) for row in rows]

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as its site makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return frozenset(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings)


def test_every_table_has_the_same_columns_and_no_empty_cell() -> None:
    for head, rows in tables(PAGE):
        assert head == HEAD
        assert rows
        assert all(len(row) == len(HEAD) and all(row) for row in rows)


@every_row
def test_use_is_a_command_that_parses_or_a_module_that_exists(row: list[str]) -> None:
    for use in row[2].split(", "):
        if use.startswith(("pipeline/", "jobs/")):
            assert (ROOT / use).exists(), use
        else:
            verb, _, rest = use.removeprefix("cairn ").partition(" ")
            sources = {
                "ingest": "texts/ --collection texts",
                "train": "pairs.jsonl --output run",
                "pretrain": "texts.jsonl --output run",
                "compress": "all-MiniLM-L6-v2 --texts texts/ --output small",
                "distill": "all-MiniLM-L6-v2 small --texts texts/ --output run",
            }
            parse(f"cairn {verb} {sources.get(verb, '')} {rest}")


@every_row
def test_test_of_a_row_exists(row: list[str]) -> None:
    for named in row[3].split(", "):
        path, _, function = named.partition("::")
        assert function in functions(ROOT / path), named


@every_row
def test_experiment_of_a_row_is_a_section_of_the_measurements(row: list[str]) -> None:
    linked = re.findall(r"\]\(\.\./measurements\.md#([\w-]+)\)", row[4])
    assert linked
    assert set(linked) <= anchors(DOCS / "measurements.md")
