from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture
def collections(call: Any, tmp_path: Path, ingest_options: list[str]) -> None:
    for name, kind in (("stones", pa.int64()), ("pebbles", pa.int64()), ("words", pa.string())):
        rows = pa.table({"id": ["a"], "text": ["granite"], "year": pa.array([2001]).cast(kind)})
        pq.write_table(rows, tmp_path / f"{name}.parquet")
        options = [name if word == "c" else word for word in ingest_options]
        assert call("ingest", f"{name}.parquet", *options, "--quiet")[0] == 0


def test_key_is_shown_once_listed_without_itself_and_revoked(call: Any, refused: Any, tmp_path: Path) -> None:
    code, token, said = call("keys", "create", "reader")
    token = token.strip()
    assert (code, token[:6]) == (0, "cairn_")
    key_id = token.split("_")[1]
    assert f"key {key_id} may search everywhere" in said
    code, out, _ = call("keys", "list")
    assert (code, token not in out, "reader" in out, key_id in out) == (0, True, True, True)
    assert token not in (tmp_path / "cairn-data" / "keys.json").read_text()
    assert call("keys", "revoke", key_id)[:2] == (0, f"{key_id} (reader) is revoked\n")
    listed = json.loads(call("keys", "list", "--json")[1])[0]
    fields = {"key_id", "name", "scopes", "collections", "restriction", "created_at", "revoked_at"}
    assert (set(listed), bool(listed["revoked_at"])) == (fields, True)
    refused("keys", "revoke", key_id)
    options = ("--scope", "embed", "--scope", "search", "--for", "peebles", "--json")
    code, out, said = call("keys", "create", "embedder", *options)
    made = json.loads(out)
    assert (code, made["key"].startswith(f"cairn_{made['key_id']}_")) == (0, True)
    allowed = (made["scopes"], made["collections"], made["restriction"])
    assert allowed == (["search", "embed"], ["peebles"], None)
    assert "warning: there is no collection peebles under cairn-data" in said


def test_key_from_a_variable_is_taken_once_and_not_shown(
    call: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = f"cairn_0123456789ab_{'x' * 43}"
    monkeypatch.setenv("MY_KEY", token)
    for _ in range(2):
        code, out, said = call("keys", "create", "app", "--from-env", "MY_KEY")
        assert (code, out, token in said) == (0, "", False)
        assert "key 0123456789ab may search everywhere" in said
    assert [key["key_id"] for key in json.loads(call("keys", "list", "--json")[1])] == ["0123456789ab"]
    call("keys", "revoke", "0123456789ab")
    assert token not in refused("keys", "create", "app", "--from-env", "MY_KEY")


def test_keys_whose_file_is_lost_are_not_called_none(call: Any, refused: Any, tmp_path: Path) -> None:
    call("keys", "create", "reader")
    (tmp_path / "cairn-data" / "keys.json").unlink()
    told = "the file of API keys must be there once keys were made, got no keys.json"
    assert told in refused("keys", "list")


REFUSED = [
    "--filter year=2000",
    "--for stones --filter owner=me",
    "--for stones --filter year=soon",
    "--for nowhere --filter year=2000",
    "--for stones --for words --filter year=2000",
    "--scope root",
    "--for ../up",
]


@pytest.mark.usefixtures("collections")
def test_filter_of_a_key_is_typed_as_its_columns_are_or_the_key_refused_in_a_sentence(
    call: Any, refused: Any, tmp_path: Path
) -> None:
    for options in REFUSED:
        refused("keys", "create", "odd", *options.split())
        assert not (tmp_path / "cairn-data" / "keys.json").exists(), options
    options = ("--for", "stones", "--for", "pebbles", "--filter", "year>=2000")
    made = json.loads(call("keys", "create", "tenant", *options, "--json")[1])
    assert made["restriction"] == {"type": "gte", "key": "year", "value": 2000}


def test_keys_lie_where_the_settings_say(call: Any, tmp_path: Path) -> None:
    (tmp_path / "cairn.toml").write_text('root = "elsewhere"\n')
    call("keys", "create", "reader")
    assert (tmp_path / "elsewhere" / "keys.json").exists()
    call("keys", "create", "reader", "--keys-file", "own.json")
    assert (tmp_path / "own.json").exists()
