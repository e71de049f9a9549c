"""The documentation builds without a warning, and every page can be found and read."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, README, ROOT, WRITTEN, blocks

LINES = {README: 250, DOCS / "design" / "architecture.md": 200}
MAX_COLUMNS = 110


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, capture_output=True, text=True
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    return tmp_path


def named(entry: Any) -> Iterator[str]:
    """Yield the pages of a navigation."""
    if isinstance(entry, str):
        yield entry
    for each in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from named(each)


def test_site_is_built_strictly(copy: Path) -> None:
    finished = build(copy)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert (copy / "site" / "guide" / "ingest.html").is_file()


@pytest.mark.parametrize(
    "link", ["nowhere.md", pytest.param("guide/ingest.md#nowhere", marks=pytest.mark.slow)]
)
def test_site_with_a_broken_link_is_not_built(link: str, copy: Path) -> None:
    page = copy / "docs" / "index.md"
    page.write_text(f"{page.read_text('utf-8')}\n[A page]({link})\n", "utf-8")
    assert build(copy).returncode != 0


def test_navigation_names_every_page_once() -> None:
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]["nav"]
    assert sorted(named(navigation)) == sorted(
        page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")
    )


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_of_a_page_are_there(page: Path) -> None:
    """The generator does not look at pictures, nor at README."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text("utf-8"))
    assert [target for target in targets if not (page.parent / target).is_file()] == []


@pytest.mark.parametrize("page", LINES, ids=lambda page: page.name)
def test_page_that_leads_to_others_is_short(page: Path) -> None:
    assert len(page.read_text("utf-8").splitlines()) <= LINES[page]


def test_pictures_of_the_pages_are_all_used() -> None:
    text = "\n".join(page.read_text("utf-8") for page in WRITTEN)
    assert [path.name for path in (DOCS / "images").iterdir() if path.name not in text] == []


def test_every_block_says_its_language() -> None:
    languages = {block.language for page in WRITTEN for block in blocks(page)}
    assert languages <= {"sh", "python", "toml", "json", "text"}


@pytest.mark.parametrize(
    "page", sorted((DOCS / "design" / "decisions").glob("[!i]*.md")), ids=lambda p: p.stem
)
def test_decision_has_problem_decision_and_consequences(page: Path) -> None:
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    assert headings[1:] == ["Problem", "Decision", "Consequences"]
    assert f"[{headings[0]}]({page.name})" in (page.parent / "index.md").read_text("utf-8")
