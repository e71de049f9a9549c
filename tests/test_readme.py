"""README's commands: every line of ours in it is one that our command line takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from cli.main import cairn

README = (Path(__file__).resolve().parents[1] / "README.md").read_text("utf-8")


def command_lines(text: str) -> list[str]:
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [
        re.sub(r"^(docker compose exec \w+|[A-Z_]+=\S+) ", "", line)
        for block in blocks
        for line in block.splitlines()
    ]
    return [line for line in lines if line.startswith(("ingest ", "cairn "))]


def parse(line: str) -> str:
    """Parse a command line without running it; return the verb at its end."""
    words = shlex.split(line, comments=True)
    command: click.Command = cairn
    context = click.Context(cairn)
    words = words[1:] if words[0] == "cairn" else words
    while isinstance(command, click.Group):
        verb = command.get_command(context, words[0])
        assert verb is not None, line
        command, words = verb, words[1:]
    command.make_context(command.name, words, parent=context)
    return str(command.name)


def test_readme_shows_the_verbs_of_the_line() -> None:
    assert {"ingest", "search", "submit", "jobs", "add", "run", "serve"} <= set(
        map(parse, command_lines(README))
    )


@pytest.mark.parametrize("line", command_lines(README))
def test_command_line_of_the_readme_parses(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CAIRN_CONFIG", raising=False)
    parse(line)


def test_command_line_that_is_none_is_refused() -> None:
    with pytest.raises(click.UsageError):
        parse("cairn search question --colection c")
