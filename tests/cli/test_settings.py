import json
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import _VERBS, cairn
from cairn.cli.settings import warn_of_variables

REQUIRED = {"ingest": ("--collection", "c"), "train": ("--output", "run", "--steps", "2")}


def contexts_of(verb: str) -> list[click.Context]:
    """Return the context of a verb as it stands on the command line, and those of the verbs below it."""
    root = click.Context(cairn, info_name="cairn", **cairn.context_settings)
    command = cairn.get_command(root, verb)
    assert command is not None
    own = click.Context(command, info_name=verb, parent=root)
    below = command.commands if isinstance(command, click.Group) else {}
    return [own, *(click.Context(each, info_name=name, parent=own) for name, each in below.items())]


def test_settings_come_from_flag_then_environment_then_file(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cairn.toml").write_text('root = "from-file"\n')
    assert call("list")[1] == f"no collections under {tmp_path / 'from-file'}\n"
    monkeypatch.setenv("CAIRN_ROOT", "from-environment")
    assert call("list")[1] == f"no collections under {tmp_path / 'from-environment'}\n"
    assert call("list", "--root", "flag")[1] == f"no collections under {tmp_path / 'flag'}\n"


def test_line_break_of_a_prefix_is_written_alike_in_shell_and_file(call: Any, tmp_path: Path) -> None:
    code, of_shell, err = call("evaluate", "--public", "--query-prefix", "Instruct: a\\nQuery: ")
    assert code == 0, err
    (tmp_path / "cairn.toml").write_text('[evaluate]\nquery-prefix = "Instruct: a\\nQuery: "\n')
    assert call("evaluate", "--public")[1] == of_shell
    assert repr("Instruct: a\nQuery: ").strip("'") in of_shell


def test_misspelt_setting_in_the_file_is_refused(call: Any, corpus: str, tmp_path: Path) -> None:
    (tmp_path / "cairn.toml").write_text('[ingest]\ncolection = "c"\n')
    code, _, err = call("ingest", corpus)
    assert code == 2
    assert "[ingest] has no setting 'colection'" in err
    (tmp_path / "cairn.toml").write_text('rooot = "x"\n')
    code, _, err = call("list")
    assert code == 2
    assert "'rooot' before the first table; there are root, collection" in err


def test_misspelt_names_come_with_what_was_meant(call: Any, tmp_path: Path) -> None:
    (tmp_path / "cairn.toml").write_text("[search]\ntopk = 1\n")
    assert "[search] has no setting 'topk'; did you mean 'top-k'?" in call("search", "stone")[2]
    (tmp_path / "cairn.toml").write_text("[search]\nxyzzy = 'stone'\n")
    assert "no setting 'xyzzy'; there are chunk-tokens, collection, filter," in call("search", "stone")[2]


def test_refused_value_comes_with_the_default_of_its_verb(call: Any) -> None:
    code, _, err = call("search", "stone", "--collection", "c", "--top-k", "0")
    assert (code, err) == (
        2,
        "error: top_k must be a whole number from 1 to 200, got 0 (default: 5)\n",
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("top-k = inf", "top-k must be a whole number from 1 to 200, got inf"),
        ("top-k = 2.7", "top-k must be a whole number from 1 to 200, got 2.7"),
        ("top-k = true", "top-k must be a whole number from 1 to 200, got True"),
        ("top-k = '3'", "top-k must be a whole number from 1 to 200, got '3'"),
        ("top-k = [1]", "top-k must be a whole number from 1 to 200, got [1]"),
        ("top-k = {}", "top-k must be a whole number from 1 to 200, got a dict of 0 items"),
        ("hybrid = 1", "hybrid must be true or false, got 1"),
        ("hybrid = []", "hybrid must be true or false, got []"),
        ("hybrid = 2026-01-01", "hybrid must be true or false, got a value of type date"),
        ("no-hybrid = true", "has no setting 'no-hybrid'; write hybrid = false"),
        ("granularity = 3", "granularity must be one of document, chunk, both, got 3"),
        ("filter = [1]", "filter must be a list, each text, got [1]"),
        ("rerank = 1", "rerank must be text, got 1"),
    ],
)
def test_value_of_another_type_in_the_file_is_refused_with_table_and_key(
    line: str, sentence: str, call: Any, tmp_path: Path
) -> None:
    (tmp_path / "cairn.toml").write_text(f"[search]\n{line}\n")
    assert call("search", "stone", "--collection", "c")[::2] == (
        2,
        f"error: cairn.toml: [search] {sentence}\n",
    )


@pytest.mark.parametrize(
    ("verb", "line"),
    [
        ("ingest", "sync = 1"),
        ("ingest", "dry-run = 1"),
        ("compare", "top-k = '3'"),
        ("ingest", "layers = true"),
        pytest.param("ingest", f"temperature = 1{'0' * 400}", id="huge temperature"),
        ("ingest", "workers = inf"),
        ("serve", "port = 1e3"),
        ("serve", "deadline = [1]"),
        ("train", "matryoshka-dims = [32.5]"),
        ("train", "dev-queries = 1.5"),
        ("evaluate", "compare = 'one'"),
    ],
)
def test_wrong_value_in_the_file_is_a_usage_error_of_every_verb(
    verb: str, line: str, call: Any, tmp_path: Path
) -> None:
    (tmp_path / "cairn.toml").write_text(f"[{verb}]\n{line}\n")
    code, _, err = call(verb, "source", *REQUIRED.get(verb, ()))
    assert (code, line.split()[0].replace("-", "_") in err.replace("-", "_"), "unforeseen" in err) == (
        2,
        True,
        False,
    )


def test_misspelt_table_in_the_file_is_refused(call: Any, tmp_path: Path) -> None:
    (tmp_path / "cairn.toml").write_text("[serch]\ntop-k = 1\n")
    code, _, err = call("list")
    assert code == 2
    assert "[serch] is no verb; did you mean 'search'?" in err


def test_misspelt_variable_of_the_verb_is_named(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAIRN_LIST_JSN", "1")
    monkeypatch.setenv("CAIRN_SEARCH_TOPK", "1")
    assert "warning: CAIRN_LIST_JSN sets no option of `cairn list`" in call("list")[2]
    assert "CAIRN_SEARCH_TOPK" not in call("list")[2]


@pytest.mark.parametrize("verb", _VERBS)
def test_variable_is_named_in_a_warning_or_sets_an_option_and_never_both(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contexts = contexts_of(verb)
    options = [
        (context, each)
        for context in contexts
        for each in context.command.get_params(context)
        if isinstance(each, click.Option)
    ]
    spelt = {name for _, each in options for name in (str(each.name), each.opts[0].removeprefix("--"))}
    prefixes = {context.command_path.replace(" ", "_") for context in contexts}
    names = {f"{prefix}_{name}".replace("-", "_").upper() for prefix in prefixes for name in spelt}
    assert names
    for name in names:
        monkeypatch.setenv(name, "1")
        is_read = any(each.value_from_envvar(context) is not None for context, each in options)
        warn_of_variables(contexts[0].command, {name: "1"}, _VERBS)
        warned = capsys.readouterr().err
        assert (name in warned) != is_read, name
        monkeypatch.delenv(name)


def test_variable_that_deletes_documents_says_nothing_and_does_it(
    call: Any, corpus: str, ingest_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call("ingest", corpus, *ingest_options, "--quiet")
    pq.write_table(pq.read_table(corpus).slice(0, 2), corpus)
    monkeypatch.setenv("CAIRN_INGEST_SYNC", "1")
    monkeypatch.setenv("CAIRN_INGEST_JSON", "1")
    code, out, err = call("ingest", corpus, *ingest_options, "--quiet")
    assert (code, json.loads(out)["deleted"], err) == (0, 1, "")


@pytest.mark.parametrize(
    ("name", "right"), [("CAIRN_INGEST_MODEL", "CAIRN_MODEL"), ("CAIRN_SYNC", "CAIRN_INGEST_SYNC")]
)
def test_variable_of_an_option_that_has_another_is_ignored_with_the_right_one(
    name: str, right: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    _, _, err = call("ingest", "corpus.parquet")
    assert f"warning: {name} sets no option of `cairn ingest` and is ignored; did you mean {right}?\n" in err


@pytest.mark.parametrize("is_flag", [True, False])
def test_file_that_is_named_takes_the_place_of_cairn_toml(
    is_flag: bool, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cairn.toml").write_text("[serch]\ntop-k = 1\n")
    (tmp_path / "other.toml").write_text('job = "build_index"\nroot = "elsewhere"\n[keys]\n')
    monkeypatch.setenv("CAIRN_CONFIG", "absent.toml" if is_flag else "other.toml")
    words = ("--config", "other.toml") if is_flag else ()
    assert call("list", *words) == (0, f"no collections under {tmp_path / 'elsewhere'}\n", "")
    assert call("list", "--root", "third", *words)[1] == f"no collections under {tmp_path / 'third'}\n"
    assert call("keys", *words, "list")[0] == 0
    assert call("list", "--config", "third.toml")[2] == "error: --config must name a file, got 'third.toml'\n"
