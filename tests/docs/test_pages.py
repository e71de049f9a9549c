"""What the pages say of the code is so, their links lead somewhere, and their site builds."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from cairn.cli.main import cairn
from cairn.jobs.schedule.scheduler import KEPT_RUNS
from cairn.pipeline import search_options
from cairn.pipeline.config import ClusterConfig, CorpusConfig, IndexConfig
from cairn.pipeline.context import drift
from cairn.pipeline.line.waiting_writes import KEPT_KEYS, MAX_WAITING_DOCUMENTS
from cairn.pipeline.poolings import POOLING_RULES
from cairn.pipeline.search_options import DEFAULT_WEIGHTS
from cairn.pipeline.serve.schemas import MAX_QUERIES
from cairn.pipeline.serve.settings import MAX_BODY_BYTES, MAX_FILE_BYTES, MAX_WRITE_BYTES
from cairn.pipeline.serve.write_routes import MAX_DOCUMENTS

from tests.docs.pages import DOCS, README, ROOT, WRITTEN, blocks, code_spans, prose, shell_lines, tables

TOP_LEVEL = ("pipeline", "cli", "jobs", "tests", "docs", "examples")
OTHERS_OPTIONS = {
    "--volumes", "--build", "--api-cases", "--rewrite-openapi", "--dashboard-agent-listen-port",
    "--prepare-only", "--set",
}  # fmt: skip
"""Options in prose that belong to docker, pytest, Ray and jobs."""
OTHER_PROGRAMS = re.compile(r"^(torchrun|pytest|python|docker|ray|\.venv/bin/python) ")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
CLUSTER, CORPUS, INDEX = ClusterConfig(), CorpusConfig(), IndexConfig()
LIMITS = {
    "guide/ingest.md": [
        f"| id too long | {CORPUS.max_id_characters:,} characters |",
        f"| text too large | {CORPUS.max_document_bytes >> 20} MiB |",
        f"up to {INDEX.flat_max_vectors:,} vectors",
        f"from {INDEX.rabitq_min_vectors:,} on",
    ],
    "guide/search.md": [
        f"| a query | {search_options.MAX_QUERY_BYTES:,} bytes in UTF-8 |",
        f"1 to {search_options.MAX_TOP_K} |",
        f"0 to {search_options.MAX_PASSAGES} |",
    ],
    "guide/serve.md": [
        f"| body of a request | {MAX_BODY_BYTES >> 20} MiB |",
        f"| queries in a list | {MAX_QUERIES} |",
    ],
    "guide/write.md": [
        f"| body with documents | {MAX_WRITE_BYTES >> 20} MiB |",
        f"| documents in a request | {MAX_DOCUMENTS:,} |",
        f"A file may have {MAX_FILE_BYTES >> 20} MiB",
        f"| documents that wait to be published | {MAX_WAITING_DOCUMENTS:,};",
        f"The last {KEPT_KEYS:,} keys are known",
    ],
    "guide/nightly.md": [f"the last {KEPT_RUNS:,} runs"],
    "concepts/context.md": [
        f"up to {CLUSTER.max_sample_documents:,} documents",
        f"| none | fewer than {100 * drift.SLIGHT_DISTANCE:.0f} % ",
        f"| re-contextualise | {100 * drift.LARGE_DISTANCE:.0f} % ",
    ],
}

every_page = pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def commands() -> dict[str, click.Command]:
    """Every verb by what is typed for it."""

    def below(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
        yield name, command
        if isinstance(command, click.Group):
            for verb in command.list_commands(click.Context(command)):
                found = command.get_command(click.Context(command), verb)
                assert found is not None
                yield from below(found, f"{name} {verb}")

    return dict(below(cairn, "cairn"))


@cache
def options() -> dict[str, list[click.Option]]:
    """Options of all verbs by what is typed for them; several verbs may have one of a name."""
    found: dict[str, list[click.Option]] = {}
    for command in commands().values():
        for param in command.params:
            if isinstance(param, click.Option):
                for name in (*param.opts, *param.secondary_opts):
                    found.setdefault(name, []).append(param)
    return found


@cache
def source(path: Path) -> str:
    """Return the code of a file, or of all files of a folder."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return "\n".join(file.read_text("utf-8") for file in files)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as its site makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return frozenset(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings)


def default_of(option: click.Option) -> str | None:
    """Return the default as an option's help shows it."""
    context = click.Context(cairn)
    context.show_default = True
    _, text = option.get_help_record(context) or ("", "")
    shown = re.search(r"\[default: ([^\]]*?)(; [\d.]*[x<>=][x<>=\d.]*)?\]", text)
    return shown[1] if shown else None


def takes(option: click.Option, value: str) -> bool:
    """Whether a value is one of the option's."""
    try:
        option.type.convert(value, option, click.Context(cairn))
    except click.UsageError:
        return False
    return True


def command_lines() -> list[str]:
    """Return every line of a shell block that runs us, in a container or with variables too."""
    lines = [
        re.sub(r"^(docker compose (exec|run) (--\S+ )*(\"[^\"]*\" )?\w+\s+|([A-Z_]+=\S+ )+)", "", line)
        for page in WRITTEN
        for block in blocks(page)
        if block.language == "sh"
        for line in shell_lines(block.text)
    ]
    return [line for line in lines if line.startswith(("ingest ", "cairn "))]


@pytest.mark.parametrize("line", command_lines())
def test_command_line_of_a_page_parses(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CAIRN_CONFIG", raising=False)
    words = shlex.split(line, comments=True)
    command: click.Command = cairn
    words = words[1:] if words[0] == "cairn" else words
    while isinstance(command, click.Group) and words:
        verb = command.get_command(click.Context(command), words[0])
        assert verb is not None, line
        command, words = verb, words[1:]
    command.make_context(command.name, words, parent=click.Context(cairn))


@every_page
def test_verbs_and_options_that_a_page_names_are_there_and_take_the_values(page: Path) -> None:
    for span in code_spans(page):
        if verb := re.match(r"cairn [a-z-]+", span):
            assert verb[0] in commands(), span
        if OTHER_PROGRAMS.match(span) or "--" not in span:
            continue
        words = shlex.split(span)
        for word, value in zip(words, [*words[1:], "--"], strict=True):
            if not re.fullmatch(r"--[a-z][\w-]*", word) or word in OTHERS_OPTIONS:
                continue
            assert word in options(), span
            takers = [option for option in options()[word] if not option.is_flag]
            if takers and not value.startswith("--") and not value.isupper() and "…" not in value:
                assert any(takes(option, value) for option in takers), (span, value)


@every_page
def test_defaults_in_tables_of_a_page_are_those_of_the_options(page: Path) -> None:
    for head, rows in tables(page):
        if {"option", "default"} <= set(head):
            for row in rows:
                name, default = row[head.index("option")], row[head.index("default")]
                assert default in {default_of(option) for option in options()[name]}, name


@every_page
def test_files_functions_and_constants_that_a_page_names_are_there(page: Path) -> None:
    """As in `tests/test_config.py::test_x`, or a capital name followed by `of` and its file."""
    spans = [span.rstrip("/") for span in code_spans(page)]
    for span in spans:
        if re.fullmatch(rf"({'|'.join(TOP_LEVEL)})(/[\w.-]+)+(::\w+)?", span):
            path, _, function = span.partition("::")
            assert (ROOT / path).exists(), span
            assert not function or f"def {function}(" in source(ROOT / path), span
    known = {path.name for path in (ROOT / "jobs").rglob("*.toml")} | {"cairn.toml", "cairn-schedules.toml"}
    files = [span for span in spans if re.fullmatch(r"[\w-]+\.(toml|md|txt|yml)", span)]
    assert [name for name in files if not (ROOT / name).exists() and name not in known] == []
    for name, path in re.findall(r"`([A-Z_]{4,})`\s+(?:of|in)\s+`([\w/.-]+\.py)`", prose(page)):
        assert re.search(rf"^{name}\b", source(ROOT / path), re.MULTILINE), (name, path)
    for path, name in re.findall(r"`(tests/[\w/]+\.py)` `(\w+)`", prose(page)):
        assert f"def test_{name}" in source(ROOT / path), (path, name)


@every_page
def test_modules_and_names_of_code_that_a_page_names_are_there(page: Path) -> None:
    text = "\n".join([*code_spans(page), *(block.text for block in blocks(page) if block.language == "sh")])
    for name in re.findall(r"(?<![\w./-])(?:pipeline|jobs|cli|cairn)(?:\.[A-Za-z_]\w*)+", text):
        if not name.endswith((".toml", ".service", ".timer", ".NAME")):
            module, _, attribute = name.rpartition(".")
            found = getattr(importlib.import_module(module), attribute, None)
            assert found is not None or importlib.import_module(name)


@every_page
def test_variables_extras_and_targets_of_make_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text("utf-8")
    flags = {
        f"{name} {flag.removeprefix('--')}".upper().replace(" ", "_").replace("-", "_")
        for name, command in commands().items()
        for param in command.params
        for flag in param.opts
    }
    for name in set(re.findall(r"\bCAIRN_[A-Z_]+[A-Z]\b", text)) - flags - {"CAIRN_ROOT", "CAIRN_CHROMIUM"}:
        assert any(f'"{name}"' in source(ROOT / folder) for folder in TOP_LEVEL[:4]), name
    extras = {extra for names in re.findall(r"'\.\[([\w,-]+)\]'", text) for extra in names.split(",")}
    assert extras <= set(PROJECT["project"]["optional-dependencies"])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert {span.split()[1] for span in code_spans(page) if span.startswith("make ")} <= targets


@every_page
def test_links_and_pictures_of_a_page_are_there(page: Path) -> None:
    """The generator looks at neither pictures nor README."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]+)(?:#([^)]*))?\)", page.read_text("utf-8")):
        linked = page.parent / target
        assert linked.is_file(), target
        assert not anchor or linked.suffix != ".md" or anchor in anchors(linked), (target, anchor)


@pytest.mark.parametrize("page", LIMITS)
def test_limits_that_a_page_states_are_those_of_the_code(page: str) -> None:
    text = " ".join((DOCS / page).read_text("utf-8").split())
    assert [phrase for phrase in LIMITS[page] if phrase not in text] == []


def test_layers_of_the_pages_are_those_that_are_checked() -> None:
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    inside = next(one for one in contracts if one.get("containers") == ["cairn.pipeline"])
    page = (DOCS / "design/architecture.md").read_text("utf-8")
    shown = page.split("<!-- layers: pipeline -->\n```text\n")[1].split("```")[0]
    assert shown.splitlines() == inside["layers"]


def test_weights_of_the_page_are_the_defaults_of_a_search() -> None:
    rows = [
        row for head, rows in tables(DOCS / "concepts/ranking.md") if head[1:] == ["weight"] for row in rows
    ]
    shown = {row[0]: row[1] for row in rows}
    document, chunk = (float(shown[f"cosine of the {part} vector"]) for part in ("document", "best chunk"))
    assert chunk / document == DEFAULT_WEIGHTS["chunk"] / DEFAULT_WEIGHTS["document"]
    assert shown["dense score"] == "1/2"
    assert DEFAULT_WEIGHTS["bm25"] == DEFAULT_WEIGHTS["document"] + DEFAULT_WEIGHTS["chunk"]


def test_poolings_of_the_page_are_those_of_the_table() -> None:
    columns = [rows for head, rows in tables(DOCS / "concepts/landmarks.md") if head[0] == "pooling"]
    assert [name for row in columns[0] for name in row[0].split(", ")] == list(POOLING_RULES)


def test_figures_of_readme_are_those_of_the_measurements() -> None:
    columns = ["chunks", "chunks and BM25", "Cairn, vectors", "Cairn"]
    measured = [
        [dict(zip(head, rows[-1], strict=True))[column] for column in columns]
        for head, rows in tables(DOCS / "measurements.md")
        if head[0] == "set" and set(columns) <= set(head) and rows[-1][0] == "mean"
    ]
    shown = [
        [row[head.index(column)].strip("*") for column in columns]
        for head, rows in tables(README)
        if head[0] == "measure"
        for row in rows
    ]
    assert shown
    assert shown == measured


@pytest.mark.slow
def test_site_is_built(tmp_path: Path) -> None:
    """Strictly: a broken link fails."""
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site/guide/ingest.html").is_file()


def test_navigation_names_every_page_once() -> None:
    named = re.findall(r'= "([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text("utf-8"))
    assert sorted(named) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
