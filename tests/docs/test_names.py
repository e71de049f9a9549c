"""What the pages name is there: paths, modules, options and values, defaults, variables, extras, layers."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from cairn.cli.main import cairn
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.evaluate.systems import baseline_systems, configured_systems
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.poolings import POOLING_RULES
from cairn.pipeline.search_options import DEFAULT_WEIGHTS

from tests.docs.pages import DOCS, ROOT, WRITTEN, blocks, code_spans, prose, shell_lines, tables

TOP_LEVEL = ("pipeline", "cli", "jobs", "tests", "docs", "examples")
OTHERS_OPTIONS = {
    "--volumes": "docker",
    "--build": "docker",
    "--api-cases": "pytest",
    "--rewrite-openapi": "pytest",
    "--dashboard-agent-listen-port": "ray",
    "--config": "python -m jobs.NAME",
    "--prepare-only": "python -m cairn.jobs.train_default",
    "--set": "python -m cairn.jobs.train_default",
}
"""Options in prose that are not ours, and whose they are."""
OTHER_PROGRAMS = re.compile(r"^(torchrun|pytest|python|docker|ray|\.venv/bin/python) ")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))

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
def own_source() -> str:
    """All Python of the repository, which is too much to read for every page."""
    return "\n".join(
        path.read_text("utf-8")
        for folder in ("pipeline", "cli", "jobs", "tests")
        for path in (ROOT / folder).rglob("*.py")
    )


@cache
def toml_names() -> frozenset[str]:
    """The names of the repository's TOML files, and of those that a user writes."""
    files = [*ROOT.glob("*.toml"), *(path for top in TOP_LEVEL for path in (ROOT / top).rglob("*.toml"))]
    return frozenset({path.name for path in files} | {"cairn.toml", "cairn-schedules.toml"})


def default_of(option: click.Option) -> str | None:
    """Return the default as an option's help shows it."""
    context = click.Context(cairn)
    context.show_default = True
    _, text = option.get_help_record(context) or ("", "")
    shown = re.search(r"\[default: ([^\]]*?)(; [\d.]*[x<>=][x<>=\d.]*)?\]", text)
    return shown[1] if shown else None


def parse(line: str) -> str:
    """Parse a command line without running it; return the verb at its end."""
    words = shlex.split(line, comments=True)
    command: click.Command = cairn
    words = words[1:] if words[0] == "cairn" else words
    while isinstance(command, click.Group) and words:
        verb = command.get_command(click.Context(command), words[0])
        assert verb is not None, line
        command, words = verb, words[1:]
    command.make_context(command.name, words, parent=click.Context(cairn))
    return str(command.name)


def lines_of_ours() -> list[str]:
    """Return every line of a shell block that runs us, in a container or with variables too."""
    lines = [
        re.sub(r"^(docker compose (exec|run) (--\S+ )*(\"[^\"]*\" )?\w+\s+|([A-Z_]+=\S+ )+)", "", line)
        for page in WRITTEN
        for block in blocks(page)
        if block.language == "sh"
        for line in shell_lines(block.text)
    ]
    return [line for line in lines if line.startswith(("ingest ", "cairn "))]


@pytest.mark.parametrize("line", lines_of_ours())
def test_command_line_of_a_page_parses(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CAIRN_CONFIG", raising=False)
    parse(line)


def test_pages_show_the_verbs_of_the_line() -> None:
    shown = set(map(parse, lines_of_ours()))
    assert {"ingest", "search", "submit", "jobs", "add", "run", "serve", "evaluate", "train"} <= shown


def test_command_line_that_is_none_is_refused() -> None:
    with pytest.raises(click.UsageError):
        parse("cairn search question --colection c")


@every_page
def test_verbs_that_a_page_names_are_there(page: Path) -> None:
    named = [re.match(r"cairn( [a-z-]+)+", span) for span in code_spans(page)]
    found = [name[0] for name in named if name]
    verbs = {" ".join(name.split()[:2]) for name in found}
    assert verbs <= set(commands())


@every_page
def test_options_that_a_page_names_are_there_and_take_the_values(page: Path) -> None:
    for span in code_spans(page):
        if OTHER_PROGRAMS.match(span) or "--" not in span:
            continue
        words = shlex.split(span)
        for word, value in zip(words, [*words[1:], "--"], strict=True):
            if not re.fullmatch(r"--[a-z][\w-]*", word) or word in OTHERS_OPTIONS:
                continue
            assert word in options(), (span, word)
            takers = [option for option in options()[word] if not option.is_flag]
            if takers and not value.startswith("--") and not value.isupper() and "…" not in value:
                assert any(takes(option, value) for option in takers), (span, value)


def takes(option: click.Option, value: str) -> bool:
    """Whether a value is one of the option's."""
    try:
        option.type.convert(value, option, click.Context(cairn))
    except click.UsageError:
        return False
    return True


@every_page
def test_defaults_that_a_page_names_are_those_of_the_options(page: Path) -> None:
    """In tables with the columns `option` and `default`."""
    for head, rows in tables(page):
        if {"option", "default"} <= set(head):
            for row in rows:
                name, default = row[head.index("option")], row[head.index("default")]
                assert default in {default_of(option) for option in options()[name]}, name


def test_defaults_are_compared_with_something() -> None:
    compared = [
        row
        for page in WRITTEN
        for head, rows in tables(page)
        if {"option", "default"} <= set(head)
        for row in rows
    ]
    assert len(compared) >= 30


@every_page
def test_paths_that_a_page_names_are_there(page: Path) -> None:
    spans = [span.rstrip("/") for span in code_spans(page)]
    paths = [span for span in spans if re.fullmatch(rf"({'|'.join(TOP_LEVEL)})(/[\w.-]+)+", span)]
    files = [span for span in spans if re.fullmatch(r"[\w-]+\.(toml|md|txt|yml)", span)]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert [name for name in files if not (ROOT / name).exists() and name not in toml_names()] == []


@every_page
def test_modules_and_names_of_code_that_a_page_names_are_there(page: Path) -> None:
    text = "\n".join([*code_spans(page), *(block.text for block in blocks(page) if block.language == "sh")])
    for name in re.findall(r"(?<![\w./-])(?:pipeline|jobs|cli|cairn)(?:\.[A-Za-z_]\w*)+", text):
        if not name.endswith((".toml", ".service", ".timer")) and not name.endswith(".NAME"):
            module, _, attribute = name.rpartition(".")
            found = getattr(importlib.import_module(module), attribute, None)
            assert found is not None or importlib.import_module(name)


@every_page
def test_names_in_capitals_that_a_page_ties_to_a_file_are_in_it(page: Path) -> None:
    """As in: `COMMIT_POINTS` of `pipeline/index/publish.py`."""
    for name, path in re.findall(r"`([A-Z_]{4,})`\s+(?:of|in)\s+`([\w/.-]+\.py)`", prose(page)):
        assert re.search(rf"^{name}\b", (ROOT / path).read_text("utf-8"), re.MULTILINE), (name, path)


@every_page
def test_variables_that_a_page_names_are_read_somewhere(page: Path) -> None:
    ours = {
        f"{name} {flag.removeprefix('--')}".upper().replace(" ", "_").replace("-", "_")
        for name, command in commands().items()
        for param in command.params
        for flag in param.opts
    }
    for name in set(re.findall(r"\bCAIRN_[A-Z_]+[A-Z]\b", page.read_text("utf-8"))):
        assert name in ours or f'"{name}"' in own_source() or name in ("CAIRN_ROOT", "CAIRN_CHROMIUM"), name


@every_page
def test_extras_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"'\.\[([\w,-]+)\]'", page.read_text("utf-8"))
    extras = set(PROJECT["project"]["optional-dependencies"])
    assert {extra for names in named for extra in names.split(",")} <= extras


@every_page
def test_targets_of_make_that_a_page_names_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    spans = [span for span in code_spans(page) if span.startswith("make ")]
    assert {span.split()[1] for span in spans} <= targets


def test_layers_of_the_pages_are_those_that_are_checked() -> None:
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    inside = next(one for one in contracts if one.get("containers") == ["cairn.pipeline"])
    page = (DOCS / "design" / "architecture.md").read_text("utf-8")
    shown = page.split("<!-- layers: pipeline -->\n```text\n")[1].split("```")[0]
    assert shown.splitlines() == inside["layers"]


def test_weights_of_a_score_are_the_defaults_of_a_search() -> None:
    weights: dict[str, str] = {}
    for head, rows in tables(DOCS / "concepts" / "ranking.md"):
        if head == ["part", "weight"]:
            weights |= {row[0]: row[1] for row in rows}
    document, chunk = (float(weights[f"cosine of the {part} vector"]) for part in ("document", "best chunk"))
    assert chunk / document == DEFAULT_WEIGHTS["chunk"] / DEFAULT_WEIGHTS["document"]
    dense = DEFAULT_WEIGHTS["document"] + DEFAULT_WEIGHTS["chunk"]
    share = dense / (dense + DEFAULT_WEIGHTS["bm25"])
    assert weights["dense score"] == "1/2"
    assert share == 0.5


def test_poolings_of_the_page_are_those_of_the_table() -> None:
    shown = [
        name
        for head, rows in tables(DOCS / "concepts" / "landmarks.md")
        if head[0] == "pooling"
        for row in rows
        for name in row[0].split(", ")
    ]
    assert shown == list(POOLING_RULES)


def test_systems_that_the_guide_names_are_in_the_table() -> None:
    systems = [*baseline_systems(EncoderConfig(), 512), *configured_systems(encoder_config({}))]
    shown = [
        name
        for head, rows in tables(DOCS / "guide" / "evaluate.md")
        if head[0] == "row"
        for row in rows
        for name in row[0].split(", ")
    ]
    assert len(shown) >= 8
    assert set(shown) <= {system.name for system in systems}


def test_commits_of_the_measurements_are_in_the_history() -> None:
    known = subprocess.run(
        ["git", "rev-list", "--all"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    if len(known) < 100:
        pytest.skip("the history is not here")
    page = (DOCS / "measurements.md").read_text("utf-8")
    named = set(re.findall(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7}\b", page))
    assert named
    assert {name for name in named if not any(one.startswith(name) for one in known)} == set()
