"""The page of faults names a test for each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs/design/reliability.md"
ROW = re.compile(r"^\| (\d+)\*? \|.*\| `tests/([\w/]+\.py)` `(\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


def test_page_has_every_row() -> None:
    assert [int(number) for number, _, _ in ROWS] == [*range(1, 41)]


@pytest.mark.parametrize(("number", "file", "name"), ROWS)
def test_row_names_a_test_that_is_there(number: str, file: str, name: str) -> None:
    content = (TESTS / file).read_text(encoding="utf-8")
    assert re.search(rf"^def test_{name}\w*\(", content, re.MULTILINE), f"row {number}: {file} {name}"
