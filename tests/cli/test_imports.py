"""What a command and a search import, and what they say to install where a package is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL_LIBRARIES = {"torch", "transformers", "ray", "sentence_transformers"}
FRAMEWORKS = {"langchain_core", "llama_index", "haystack", "mcp", "httpx2", "httpx", "openai"}
COMMANDS = [
    ".".join(("cairn", *path.relative_to(ROOT).with_suffix("").parts))
    for path in (ROOT / "cli").rglob("*.py")
    if not path.stem.startswith("__")
]
LIBRARY = ["index", "corpus", "collection", "client.errors", "frameworks.source"]


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
        f"sys.modules[{module!r}] = None; from cairn.cli.main import cairn, run\n"
        "for words in sys.argv[1:]: assert run(cairn, words.split(), 'cairn') == 2"
    )
    done = run_python(program, tmp_path, *lines)
    told = (
        f"error: {said}, got none; install it with `pip install '.[{extra}]'` in the folder of Cairn's clone"
    )
    assert (done.returncode, done.stderr) == (0, f"{told}\n" * len(lines))


def test_the_library_without_faiss_names_the_extra(tmp_path: Path) -> None:
    program = (
        "sys.modules['faiss'] = None; import cairn\n"
        "try:\n    cairn.open_collection\nexcept cairn.CairnError as error:\n    print(error)"
    )
    done = run_python(program, tmp_path)
    assert done.stdout.startswith("an index must have the package faiss-cpu or faiss-gpu")
    assert done.stdout.endswith("`pip install '.[cpu]'` in the folder of Cairn's clone\n")


VERB = "from cairn.cli.main import cairn, run; run(cairn, {!r}.split(), 'cairn')"
INDEXES = {"lance", "lancedb", "faiss", "pyarrow"}


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        (VERB.format("list"), MODEL_LIBRARIES | {"lance", "lancedb"}),
        (VERB.format("keys list"), MODEL_LIBRARIES | INDEXES),
        (VERB.format("submit --help"), MODEL_LIBRARIES | INDEXES),
        ("import cairn.cli.main", {"numpy", "pyarrow", "jaxtyping"}),
        (
            "import cairn.pipeline.search",
            MODEL_LIBRARIES | {"lancedb", "cairn.pipeline.encode", "cairn.pipeline.model"},
        ),
        (
            f"import {', '.join(['cairn', *COMMANDS, *(f'cairn.pipeline.{name}' for name in LIBRARY)])}",
            MODEL_LIBRARIES | FRAMEWORKS,
        ),
    ],
    ids=["list", "keys", "submit", "command line", "search", "all commands"],
)
def test_what_encodes_nothing_imports_no_heavy_library(program: str, heavy: set[str], tmp_path: Path) -> None:
    """``cairn --help`` must answer at once, so a verb imports what it runs only when it runs."""
    done = run_python(f"{program}; print('imported', *sys.modules)", tmp_path)
    *_, imported = done.stdout.splitlines()
    assert imported.startswith("imported "), done.stderr
    assert heavy & set(imported.split()) == set()


def test_library_and_commands_run_without_ray(tmp_path: Path, ingest_options: list[str]) -> None:
    (tmp_path / "a.html").write_text("<h1>Stone</h1><p>The old stone path.</p>")
    program = (
        "sys.modules['ray'] = None; import cairn; import cairn.cli.main as cli\n"
        "assert cli.run(cli.cairn, sys.argv[1:], 'cairn') == 0\n"
        "print(cairn.open_collection('c').search('stone').hits[0].title)"
    )
    done = run_python(
        program, tmp_path, "ingest", "a.html", *ingest_options, "--token-bytes", "0", "--quiet", "--json"
    )
    assert (done.stdout.splitlines()[-1:], done.stderr) == (["Stone"], "")
