"""What an installation gives: the name ``cairn``, console scripts, the default model, its requirements."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import cairn
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CODE = [path for folder in ("cli", "jobs", "pipeline") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.*")),
    *(ROOT / name for name in ("README.md", "AGENTS.md", "Dockerfile", "Makefile")),
]
COMES_WITH = {
    "anyio": "mcp",
    "opentelemetry-api": "fastapi",
    "pydantic": "fastapi",
    "pydantic-core": "fastapi",
    "requests": "ray",
    "starlette": "fastapi",
    "watchfiles": "ray",
}
"""Distributions that are part of a requirement's interface: Ray raises gRPC's errors, for one."""

MakeEnvironment = Callable[..., Path]


def build_without_network(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run(environment: Path, *command: str) -> str:
    """Run a command of the environment in its folder, outside of the repository and of what leads there."""
    command = (str(environment / "bin" / command[0]), *command[1:])
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=environment, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def make_environment(tmp_path_factory: pytest.TempPathFactory) -> MakeEnvironment:
    """Return a maker of environments that hold Cairn alone and read its requirements from the tests' own."""

    def make(name: str, *install: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        venv.create(folder)
        python = str(folder / "bin" / "python")
        # Python searches this folder for modules but reads no .pth file in it, such as the tests' own Cairn.
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        build_without_network(
            "--python", python, "install", "--no-build-isolation", "--no-deps", "--ignore-installed", *install
        )
        return folder

    return make


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build_without_network("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(make_environment: MakeEnvironment, wheel: Path) -> Path:
    return make_environment("installed", str(wheel))


@pytest.fixture(scope="module")
def editable(make_environment: MakeEnvironment) -> Path:
    return make_environment("editable", "--editable", str(ROOT))


def imported_from(environment: Path) -> dict[str, str]:
    program = (
        "import cairn, cairn.cli, cairn.jobs, cairn.pipeline, cairn.langchain, importlib.util, json\n"
        "assert {name for name in cairn.__all__ if not getattr(cairn, name, None)} == set()\n"
        "assert not any(map(importlib.util.find_spec, ('pipeline', 'jobs', 'cli', 'tests')))\n"
        "print(json.dumps({'cairn': cairn.__file__, 'pipeline': cairn.pipeline.__file__,"
        " 'version': cairn.__version__}))"
    )
    return json.loads(run(environment, "python", "-c", program))


def test_cairn_lists_its_names_and_has_no_others():
    assert set(cairn.__all__) <= set(dir(cairn))
    with pytest.raises(AttributeError, match="module 'cairn' has no attribute 'opn_collection'"):
        cairn.opn_collection  # noqa: B018


@pytest.fixture
def folder_of_a_user(tmp_path: Path) -> Path:
    """A folder with modules named as Cairn's own packages."""
    (tmp_path / "pipeline.py").write_text("mine = True\n")
    (tmp_path / "cli.py").write_text("mine = True\n")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/__init__.py").write_text("mine = True\n")
    return tmp_path


@pytest.mark.parametrize("install", [pytest.param("editable", marks=pytest.mark.slow), "installed"])
def test_cairn_in_a_folder_with_its_names_is_itself(
    install: str, request: pytest.FixtureRequest, folder_of_a_user: Path
):
    environment = request.getfixturevalue(install)
    python = str(environment / "bin" / "python")
    program = "import cairn, cairn.jobs.job; print(cairn.open_collection.__module__)"
    commands = [[python, "-c", program], [str(environment / "bin" / "cairn"), "list"]]
    if install == "installed":
        beside = "import pipeline, jobs, cli; assert pipeline.mine and jobs.mine and cli.mine"
        commands.append([python, "-c", f"{beside}; {program}"])
    for command in commands:
        done = subprocess.run(command, cwd=folder_of_a_user, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() in (
            "cairn.pipeline.collection",
            f"no collections under {folder_of_a_user.resolve() / 'cairn-data'}",
        )


@pytest.mark.slow
def test_cairn_imports_from_an_editable_install(editable: Path):
    found = imported_from(editable)

    assert found == {
        "cairn": str(ROOT / "pipeline/face/cairn/__init__.py"),
        "pipeline": str(ROOT / "pipeline/__init__.py"),
        "version": PROJECT["version"],
    }


def test_cairn_imports_from_the_wheel(installed: Path):
    found = imported_from(installed)

    assert found.pop("version") == PROJECT["version"]
    assert all(Path(path).is_relative_to(installed) for path in found.values())
    assert Path(found["pipeline"]).parents[1] == Path(found["cairn"]).parent
    assert all(Path(path).with_name("py.typed").is_file() for path in found.values())


@pytest.mark.slow
def test_console_scripts_of_the_wheel_index_and_search(installed: Path):
    texts = ["Water boils at a lower temperature on a mountain.", "Bread rises because of its yeast."]
    pq.write_table(pa.table({"id": ["boiling", "bread"], "text": texts}), installed / "corpus.parquet")

    assert PROJECT["version"] in run(installed, "cairn", "--version")
    run(installed, "ingest", "corpus.parquet", "--collection", "facts")
    answer = json.loads(
        run(installed, "cairn", "search", "why does dough rise", "--collection", "facts", "--json")
    )

    assert answer["hits"][0]["doc_id"] == "bread"


def test_client_loads_no_requirement_of_indexing(installed: Path):
    program = (
        "import json, sys\n"
        "import cairn.pipeline.client.clients\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    loaded = set(json.loads(run(installed, "python", "-c", program)))

    assert "httpx2" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "lancedb", "lance", "faiss", "ray", "click"})


def test_client_alone_asks_for_what_all_of_cairn_does():
    client = tomllib.loads((ROOT / "pipeline/client/pyproject.toml").read_text("utf-8"))
    extra = PROJECT["optional-dependencies"]["client"]

    assert set(client["project"]["dependencies"]) <= {*PROJECT["dependencies"], *extra}
    assert client["project"]["version"] == PROJECT["version"]


@pytest.mark.slow
def test_client_alone_searches(
    make_environment: MakeEnvironment, tmp_path: Path, stones_address: str, stones_root: Path
):
    source = ROOT / "pipeline/client"
    build_without_network(
        "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path), str(source)
    )
    [wheel] = tmp_path.glob("cairn_index_client-*.whl")
    environment = make_environment("client", str(wheel))
    [packages] = environment.glob("lib/python*/site-packages")
    modules = {path.name for path in (packages / "cairn/pipeline/client").glob("*.py")}
    assert modules == {path.name for path in source.glob("*.py")}

    program = f"""
import sys
for name in ("cairn.jobs", "faiss", "lancedb", "ray", "torch", "transformers"):
    sys.modules[name] = None
import cairn
with cairn.CairnClient({stones_address!r}) as client:
    answer = client.collection("stones").search("granite and slate", top_k=2)
print(cairn.__version__, *(hit.doc_id for hit in answer.hits))
try:
    cairn.open_collection
except ImportError as error:
    print(error)
"""
    found, sentence = run(environment, "python", "-c", program).splitlines()
    expected = cairn.open_collection("stones", root=stones_root).search("granite and slate", top_k=2)
    assert found.split() == [PROJECT["version"], *(hit.doc_id for hit in expected.hits)]
    assert "install cairn-index" in sentence


def test_every_import_is_of_a_declared_requirement():
    extras = chain.from_iterable(PROJECT["optional-dependencies"].values())
    declared = {canonicalize_name(Requirement(line).name) for line in (*PROJECT["dependencies"], *extras)}
    providers = packages_distributions()
    missing: dict[str, list[str]] = {}
    for path in CODE:
        if path.is_relative_to(ROOT / "jobs/configs"):  # files for other schedulers, run by theirs
            continue
        for module in imported_modules(path) - {"cairn"}:
            names = {canonicalize_name(name) for name in providers.get(module, [module])}
            if declared.isdisjoint(names | {COMES_WITH[name] for name in names & set(COMES_WITH)}):
                missing.setdefault(module, []).append(path.relative_to(ROOT).as_posix())

    assert missing == {}


def imported_modules(path: Path) -> set[str]:
    """Return the top-level names of the modules outside of the standard library that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names)


def test_pinned_versions_are_those_that_are_asked_for():
    """pip refuses where the two contradict each other, but only in an environment that is made new."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    extras = [asked for name, asked in PROJECT["optional-dependencies"].items() if name != "gpu"]
    asked = map(Requirement, [*PROJECT["dependencies"], *chain.from_iterable(extras)])
    found = {canonicalize_name(name): version for name, version in pins.items()} | {PROJECT["name"]: "0"}
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

    assert [str(path) for path in CODE if pickled.search(path.read_text("utf-8"))] == []


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
