"""The reference pages say what the program says of itself, all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


def test_pages_are_current(tmp_path: Path) -> None:
    """As `make reference` writes them: checks of shapes, which tests turn on, change what signatures say."""
    subprocess.run(
        [sys.executable, "-m", "tests.docs.reference_pages", str(tmp_path)], cwd=FOLDER.parents[1], check=True
    )
    written, kept = (
        {page.name: page.read_text(encoding="utf-8") for page in folder.glob("*.md")}
        for folder in (tmp_path, FOLDER)
    )
    assert written == kept, "run `make reference`"
