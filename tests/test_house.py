"""Claims about the house that no linter checks."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "cli", "jobs")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODEL_LIBRARIES = {"torch", "transformers", "ray", "sentence_transformers"}
FRAMEWORKS = ("langchain_core", "llama_index", "haystack", "mcp", "httpx2", "httpx", "openai")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def modules_after_import(*modules: str) -> set[str]:
    """Import in a fresh interpreter, where nothing that the suite loaded can hide a claim's failure."""
    program = (
        f"import importlib, json, sys\nfor name in {modules!r}: "
        "importlib.import_module(name)\nprint(json.dumps(sorted(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    return set(json.loads(output))


def test_pinned_versions_are_those_that_are_asked_for():
    """pip refuses where the two contradict each other, but only in an environment that is made new."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {name: asked for name, asked in project["optional-dependencies"].items() if name != "gpu"}
    asked = map(Requirement, [*project["dependencies"], *itertools.chain.from_iterable(extras.values())])
    found = {canonicalize_name(name): version for name, version in pins.items()} | {project["name"]: "0"}
    wrong = [
        str(one)
        for one in asked
        if not one.specifier.contains(found.get(canonicalize_name(one.name), "0"), prereleases=True)
    ]

    assert wrong == []


def test_source_files_never_pickle():
    pickled = re.compile(
        r"^\s*(import|from) (pickle|cloudpickle|joblib|dill|shelve|marshal)\b|allow_pickle\s*=\s*True",
        re.MULTILINE,
    )

    assert [relative(path) for path in SOURCES if pickled.search(path.read_text("utf-8"))] == []


def test_what_a_search_and_the_cli_import_has_no_model_library_and_no_framework():
    """``cairn --help`` must answer at once, so a verb imports what it runs only when it runs."""
    modules = [
        ".".join(("cairn", *path.relative_to(ROOT).with_suffix("").parts))
        for path in sorted((ROOT / "cli").rglob("*.py"))
        if not path.stem.startswith("__")
    ]
    library = ("", *(f".pipeline.{name}" for name in ("index", "corpus", "collection", "client.errors")))
    modules += [f"cairn{name}" for name in (*library, ".pipeline.frameworks.source")]

    heavy = {*MODEL_LIBRARIES, "lancedb", "cairn.pipeline.encode", "cairn.pipeline.model"}
    assert modules_after_import("cairn.pipeline.search").isdisjoint(heavy)
    assert modules_after_import(*modules).isdisjoint({*MODEL_LIBRARIES, *FRAMEWORKS})
    assert modules_after_import("cairn.cli.main").isdisjoint({"numpy", "pyarrow", "jaxtyping"})
