"""The reference pages say what the program says of itself, all of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import cairn as cairn_library

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
COMMAND_LINE = (FOLDER / "command-line.md").read_text(encoding="utf-8")
PYTHON = (FOLDER / "python.md").read_text(encoding="utf-8")
HTTP = (FOLDER / "http.md").read_text(encoding="utf-8")


def test_pages_are_current(tmp_path: Path) -> None:
    """As `make reference` writes them: checks of shapes, which tests turn on, change what signatures say."""
    subprocess.run(
        [sys.executable, "-m", "tests.docs.reference_pages", str(tmp_path)], cwd=FOLDER.parents[1], check=True
    )
    written = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.iterdir()}
    assert written == {
        "command-line.md": COMMAND_LINE,
        "http.md": HTTP,
        "python.md": PYTHON,
    }, "run `make reference`"


def test_page_has_every_public_name_and_no_place_of_this_machine() -> None:
    names = {name for name in cairn_library.__all__ if not name.startswith("__")}
    assert {name for name in names if f"\n## `{name}`\n" not in PYTHON} == set()
    assert "### `Collection.search_vectors`" in PYTHON
    assert re.search(r"0x[0-9a-f]{6}|<class|:\w+:`|(?<!`)``\w", PYTHON) is None
