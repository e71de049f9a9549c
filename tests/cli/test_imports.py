"""What a command imports, and what it says where FAISS is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_FAISS = "import sys; sys.modules['faiss'] = None; "
"""What makes ``import faiss`` fail as if there were none."""


def run_python(program: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'pipeline/face')!r}]; "
    command = [sys.executable, "-c", path + program, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_command_without_faiss_is_one_sentence(tmp_path: Path) -> None:
    program = WITHOUT_FAISS + (
        "from cairn.cli.main import cairn, run\n"
        "for words in sys.argv[1:]: assert run(cairn, words.split(), 'cairn') == 2"
    )
    lines = ("evaluate .", "list", "search x --collection c", "ingest . --collection c")
    done = run_python(program, tmp_path, *lines)
    assert (done.returncode, done.stderr) == (
        0,
        "error: an index must have the package faiss-cpu or faiss-gpu, got none; install it with "
        "`pip install '.[cpu]'` in the folder of Cairn's clone\n" * len(lines),
    )


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
