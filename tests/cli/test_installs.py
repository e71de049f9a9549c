"""What the core install runs without, and that every command that installs more works from the clone."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.cli.test_imports import ROOT, run_python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CODE = [path for folder in ("cli", "jobs", "pipeline") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.*")),
    *(ROOT / name for name in ("README.md", "AGENTS.md", "Dockerfile", "Makefile")),
]


def installed_extras(path: Path) -> set[str]:
    """Return the extras that a file says to install: in a command, or by the function that writes one."""
    text = path.read_text("utf-8")
    commands = re.findall(r"pip install[^\n`]*?'?\.\[([\w,-]+)\]", text)
    named = re.findall(r"""(?:install_command\(|extra_missing\([^)]*?\bextra=)["']([\w-]+)["']""", text)
    return {extra for each in (*commands, *named) for extra in each.split(",")}


def test_every_extra_that_code_or_a_page_says_to_install_is_the_projects() -> None:
    said = {extra: path for path in (*CODE, *PAGES) for extra in installed_extras(path)}
    assert {"cpu", "ray", "schedule", "serve", "store"} <= set(said)
    assert set(said) <= set(PROJECT["optional-dependencies"]), said


def test_no_command_installs_a_distribution_of_ours_by_its_name() -> None:
    """Until one is published, the name may be another author's."""
    named = re.compile(r"pip install[^\n`]*\bcairn-")
    decisions = ROOT / "docs/design/decisions"
    found = [str(path) for path in (*CODE, *PAGES) if decisions not in path.parents]
    assert [path for path in found if named.search(Path(path).read_text("utf-8"))] == []


def test_core_install_holds_what_html_needs_and_no_ray() -> None:
    core = {re.split(r"[<>=\[]", line)[0] for line in PROJECT["dependencies"]}
    assert {"beautifulsoup4", "markdownify"} <= core
    assert "ray" not in core


def test_a_command_that_needs_ray_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<h1>Stone</h1>")
    program = (
        "import sys; sys.modules['ray'] = None; from cairn.cli.main import cairn, run\n"
        "for words in sys.argv[1:]: assert run(cairn, words.split(), 'cairn') == 2"
    )
    lines = ("ingest a.html --collection c --engine ray", "submit job.toml", "compact c --engine ray")
    done = run_python(program, tmp_path, *lines)
    said = "error: a Ray cluster must have the package ray, got none; install it with `pip install '.[ray]'`"
    assert [line.partition(" in the folder")[0] for line in done.stderr.splitlines()] == [said] * len(lines)


def test_library_and_commands_run_without_ray(tmp_path: Path, ingest_options: list[str]) -> None:
    (tmp_path / "a.html").write_text("<h1>Stone</h1><p>The old stone path.</p>")
    program = (
        "import sys; sys.modules['ray'] = None; import cairn; import cairn.cli.main as cli\n"
        "assert cli.run(cli.cairn, sys.argv[1:], 'cairn') == 0\n"
        "print(cairn.open_collection('c').search('stone').hits[0].title)"
    )
    done = run_python(
        program, tmp_path, "ingest", "a.html", *ingest_options, "--token-bytes", "0", "--quiet", "--json"
    )
    assert (done.stdout.splitlines()[-1:], done.stderr) == (["Stone"], "")
