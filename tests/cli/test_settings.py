import json
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import _VERBS, cairn
from cairn.cli.settings import warn_of_variables


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


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        ('[ingest]\ncolection = "c"', ("ingest", "x"), "[ingest] has no setting 'colection'"),
        ('rooot = "x"', ("list",), "'rooot' before the first table; there are root, collection"),
        ("[search]\ntopk = 1", ("search", "x"), "[search] has no setting 'topk'; did you mean 'top-k'?"),
        ("[search]\nxyzzy = 1", ("search", "x"), "no setting 'xyzzy'; there are chunk-tokens, collection,"),
        ("[serch]\ntop-k = 1", ("list",), "[serch] is no verb; did you mean 'search'?"),
    ],
)
def test_misspelt_name_in_the_file_is_refused_with_what_was_meant(
    refused: Any, tmp_path: Path, text: str, words: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "cairn.toml").write_text(f"{text}\n")
    assert sentence in refused(*words)


def test_refused_value_comes_with_the_default_of_its_verb(refused: Any) -> None:
    told = refused("search", "stone", "--collection", "c", "--top-k", "0")
    assert told == "error: top_k must be a whole number from 1 to 200, got 0 (default: 5)\n"


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
    line: str, sentence: str, refused: Any, tmp_path: Path
) -> None:
    (tmp_path / "cairn.toml").write_text(f"[search]\n{line}\n")
    told = refused("search", "stone", "--collection", "c")
    assert told == f"error: cairn.toml: [search] {sentence}\n"


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
    ("name", "right"),
    [
        ("CAIRN_INGEST_MODEL", "did you mean CAIRN_MODEL?"),
        ("CAIRN_SYNC", "did you mean CAIRN_INGEST_SYNC?"),
        ("CAIRN_INGEST_JSN", "did you mean CAIRN_INGEST_JSON?"),
    ],
)
def test_variable_that_sets_no_option_of_the_verb_is_ignored_with_the_right_one(
    name: str, right: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CAIRN_SEARCH_TOPK", "1")
    _, _, err = call("ingest", "corpus.parquet")
    assert f"warning: {name} sets no option of `cairn ingest` and is ignored; {right}\n" in err
    assert "CAIRN_SEARCH_TOPK" not in err


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
