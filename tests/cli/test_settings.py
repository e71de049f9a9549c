import json
from pathlib import Path
from typing import Any

import pytest


def test_settings_come_from_flag_then_environment_then_file(
    call: Any, corpus: str, ingest_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cairn.toml").write_text('root = "from-file"\n')
    call("ingest", corpus, *ingest_options, "--quiet")
    assert (tmp_path / "from-file" / "c" / "CURRENT").exists()
    monkeypatch.setenv("CAIRN_ROOT", "from-environment")
    call("ingest", corpus, *ingest_options, "--quiet")
    assert (tmp_path / "from-environment" / "c" / "CURRENT").exists()
    call("ingest", corpus, *ingest_options, "--quiet", "--root", "from-flag")
    assert (tmp_path / "from-flag" / "c" / "CURRENT").exists()


def test_temperature_by_length_in_the_file_is_a_list_of_pairs(
    call: Any, corpus: str, ingest_options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "cairn.toml").write_text("[ingest]\ntemperature-by-length = [[8, 0.95], [16, 0.9]]\n")
    assert call("ingest", corpus, *ingest_options, "--quiet")[0] == 0
    manifest = json.loads(
        (tmp_path / "cairn-data" / "c" / "generations" / "00000001" / "MANIFEST.json").read_text()
    )
    assert manifest["settings"]["encoder"]["temperature_by_length"] == [[8, 0.95], [16, 0.9]]


def test_misspelt_setting_in_the_file_is_refused(call: Any, corpus: str, tmp_path: Path) -> None:
    (tmp_path / "cairn.toml").write_text('[ingest]\ncolection = "c"\n')
    code, _, err = call("ingest", corpus)
    assert code == 2
    assert "[ingest] has no setting 'colection'" in err
    (tmp_path / "cairn.toml").write_text('rooot = "x"\n')
    code, _, err = call("status")
    assert code == 2
    assert "'rooot' before the first table; there are root, collection" in err


def test_every_option_a_verb_names_can_stand_in_the_file(
    call: Any, corpus: str, ingest_options: list[str], tmp_path: Path
) -> None:
    call("ingest", corpus, *ingest_options, "--quiet")
    for filters in ('"title=nothing"', '["title=nothing"]'):
        (tmp_path / "cairn.toml").write_text(f"[search]\nfilter = {filters}\njson = true\ntop-k = 2\n")
        code, out, _ = call("search", "stone", "--collection", "c")
        assert (code, json.loads(out)["hits"]) == (0, [])


def test_misspelt_names_come_with_what_was_meant(call: Any, tmp_path: Path) -> None:
    (tmp_path / "cairn.toml").write_text("[search]\ntopk = 1\n")
    assert "[search] has no setting 'topk'; did you mean 'top-k'?" in call("search", "stone")[2]
    (tmp_path / "cairn.toml").write_text("[search]\nquery = 'stone'\n")
    assert "no setting 'query'; there are chunk-tokens, collection, filter," in call("search", "stone")[2]


def test_refused_value_comes_with_the_default_of_its_verb(call: Any) -> None:
    code, _, err = call("search", "stone", "--collection", "c", "--top-k", "0")
    assert (code, err) == (
        2,
        "error: top_k must be a whole number from 1 to 200, got 0 (default: 5)\n",
    )


def test_misspelt_table_in_the_file_is_refused(call: Any, tmp_path: Path) -> None:
    (tmp_path / "cairn.toml").write_text("[serch]\ntop-k = 1\n")
    code, _, err = call("status")
    assert code == 2
    assert "[serch] is no verb; did you mean 'search'?" in err


def test_misspelt_variable_of_the_verb_is_named(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAIRN_STATUS_JSN", "1")
    monkeypatch.setenv("CAIRN_SEARCH_TOPK", "1")
    assert "warning: CAIRN_STATUS_JSN sets no option of `cairn status`" in call("status")[2]
    assert "CAIRN_SEARCH_TOPK" not in call("status")[2]


def test_variable_of_a_verb_with_a_longer_name_is_not_taken_for_a_mistake(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_TRAIN_MIXER_STEPS", "1")
    assert "warning" not in call("train", "pairs.parquet")[2]


def test_any_option_has_a_variable_of_its_verb(
    call: Any, corpus: str, ingest_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call("ingest", corpus, *ingest_options, "--quiet")
    monkeypatch.setenv("CAIRN_SEARCH_TOP_K", "1")
    _, out, _ = call("search", "stone", "--collection", "c", "--json")
    assert len(json.loads(out)["hits"]) == 1


def test_broken_settings_file_is_one_sentence(call: Any, tmp_path: Path) -> None:
    (tmp_path / "cairn.toml").write_text("root = \n")
    code, _, err = call("status")
    assert code == 2
    assert (err.startswith("error: "), err.count("\n")) == (True, 1)
