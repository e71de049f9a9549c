"""What a command imports, and what it says to install where a package is missing: an extra of ours."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CODE = [path for folder in ("cli", "jobs", "pipeline") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.*")),
    *(ROOT / name for name in ("README.md", "AGENTS.md", "Dockerfile", "Makefile")),
]
WITHOUT_FAISS = "import sys; sys.modules['faiss'] = None; "
"""What makes ``import faiss`` fail as if there were none."""


def run_python(program: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'pipeline/face')!r}]; "
    command = [sys.executable, "-c", path + program, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("module", "lines", "said", "extra"),
    [
        (
            "faiss",
            ("evaluate .", "list", "search x --collection c", "ingest . --collection c"),
            "an index must have the package faiss-cpu or faiss-gpu",
            "cpu",
        ),
        (
            "ray",
            ("ingest a.html --collection c --engine ray", "submit job.toml", "compact c --engine ray"),
            "a Ray cluster must have the package ray",
            "ray",
        ),
    ],
)
def test_a_command_without_a_package_names_the_extra_in_one_sentence(
    tmp_path: Path, module: str, lines: tuple[str, ...], said: str, extra: str
) -> None:
    (tmp_path / "a.html").write_text("<h1>Stone</h1>")
    program = (
        f"import sys; sys.modules[{module!r}] = None; from cairn.cli.main import cairn, run\n"
        "for words in sys.argv[1:]: assert run(cairn, words.split(), 'cairn') == 2"
    )
    done = run_python(program, tmp_path, *lines)
    told = (
        f"error: {said}, got none; install it with `pip install '.[{extra}]'` in the folder of Cairn's clone"
    )
    assert (done.returncode, done.stderr) == (0, f"{told}\n" * len(lines))


def test_the_library_without_faiss_names_the_extra(tmp_path: Path) -> None:
    program = WITHOUT_FAISS + (
        "import cairn\ntry:\n    cairn.open_collection\nexcept cairn.CairnError as error:\n    print(error)"
    )
    done = run_python(program, tmp_path)
    assert done.stdout.startswith("an index must have the package faiss-cpu or faiss-gpu")
    assert done.stdout.endswith("`pip install '.[cpu]'` in the folder of Cairn's clone\n")


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (("list",), {"torch", "transformers", "lance", "lancedb", "ray"}),
        (("keys", "list"), {"torch", "transformers", "lance", "lancedb", "ray", "faiss", "pyarrow"}),
        (("submit", "--help"), {"torch", "transformers", "lance", "lancedb", "ray", "faiss", "pyarrow"}),
    ],
    ids=["list", "keys", "submit"],
)
def test_a_command_that_encodes_nothing_imports_no_heavy_library(
    arguments: tuple[str, ...], heavy: set[str], tmp_path: Path
) -> None:
    program = (
        "from cairn.cli.main import cairn, run\n"
        "run(cairn, sys.argv[1:], 'cairn'); print('imported', *sys.modules)"
    )
    done = run_python(program, tmp_path, *arguments)
    *_, imported = done.stdout.splitlines()
    assert imported.startswith("imported "), done.stderr
    assert heavy & set(imported.split()) == set()


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
