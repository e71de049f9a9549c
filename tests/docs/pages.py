"""The pages of the project, and the code in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GENERATED = DOCS / "reference"
README = ROOT / "README.md"
GUIDE = sorted((DOCS / "guide").glob("*.md"))
WRITTEN = [
    README,
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/README.md",
    *sorted(page for page in DOCS.rglob("*.md") if GENERATED not in page.parents),
]
"""Every page that people write; those of the reference are made from the program."""

_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[\w-]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block; ``reason`` says why it is not run, None where it is."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def name(self) -> str:
        """Return where it stands."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in order."""
    text = page.read_text("utf-8")
    for found in _FENCE.finditer(text):
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start("language")) + 1,
            language=found["language"],
            text=found["text"],
            reason=found["reason"],
        )


def shell_lines(text: str) -> list[str]:
    """Return the commands of a shell block, each with the lines it continues on."""
    lines: list[str] = []
    quoted = False
    for line in text.splitlines():
        if quoted or (lines and lines[-1].endswith("\\")):
            lines[-1] = f"{lines[-1].removesuffix(chr(92))}\n{line}"
        else:
            lines.append(line)
        quoted = lines[-1].replace("\\'", "").count("'") % 2 == 1
    return [line for line in lines if line.strip()]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text("utf-8"))


def code_spans(page: Path) -> list[str]:
    """Return what stands between backticks in a page's prose."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def tables(page: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield the head and the rows of each table of a page; code marks are left out."""
    for table in re.findall(r"(?:^\|.*\|\n)+", page.read_text("utf-8"), re.MULTILINE):
        head, _, *rows = (
            [cell.strip().replace("`", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in table.splitlines()
        )
        yield head, rows
