"""API keys: shown once, stored hashed, revoked at once, and never a way around a damaged file."""

from __future__ import annotations

import hashlib
import json
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from cairn.pipeline.errors import ConfigError, IntegrityError
from cairn.pipeline.serve import keys as keys_module
from cairn.pipeline.serve.keys import KeyFile, Keyring

RESTRICTION = {"type": "eq", "key": "tenant", "value": "acme"}


@pytest.fixture
def file(tmp_path):
    return KeyFile(tmp_path / "root" / "keys.json")


def test_keys_are_stored_as_hashes_for_their_owner_alone_and_read_as_they_were_made(file):
    key, token = file.create("reader")
    content = file.path.read_text()
    assert token not in content
    assert token.split("_", 2)[2] not in content  # the secret part may hold underscores itself
    assert key.sha256 == hashlib.sha256(token.encode()).hexdigest()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    made = [
        key,
        file.create(
            "tenant", scopes=["embed", "search"], collections=["stones", "stones"], restriction=RESTRICTION
        )[0],
        file.create("all", scopes=["admin", "embed", "search"])[0],
    ]
    assert file.read() == made
    assert (made[1].scopes, made[1].collections, made[1].restriction) == (
        ("search", "embed"),
        ("stones",),
        RESTRICTION,
    )


def test_token_that_differs_anywhere_is_no_key(file):
    _, token = file.create("reader")
    keyring = Keyring(file, is_required=True)
    changed = [
        token[:index] + ("0" if char != "0" else "1") + token[index + 1 :] for index, char in enumerate(token)
    ]
    for other in [
        *changed,
        "",
        token[:-1],
        token + "0",
        token.upper(),
        f" {token}",
        "cairn__",
        "é" * 20,
        "\ud800",
    ]:
        assert keyring.grant_of(other) is None
    assert keyring.grant_of(token) is not None


def test_tokens_are_compared_in_constant_time_whether_or_not_the_id_is_known(file, monkeypatch):
    _, token = file.create("reader")
    compared: list[tuple[str, str]] = []
    original = keys_module.hmac.compare_digest
    monkeypatch.setattr(
        keys_module.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or original(a, b)
    )
    keyring = Keyring(file, is_required=True)
    for tried in (token, token[:-1] + "x", "cairn_" + "0" * 12 + "_" + "a" * 43, "nonsense"):
        keyring.grant_of(tried)
    assert [(len(left), len(right)) for left, right in compared] == [(64, 64)] * 4


@pytest.mark.parametrize("how", ["revoke", "remove"])
def test_key_made_or_revoked_counts_at_once_and_losing_all_opens_no_server(file, how):
    keyring = Keyring(file, is_required=False)
    assert not keyring.is_required
    key, token = file.create("reader")
    assert keyring.is_required
    assert keyring.grant_of(token) is not None
    if how == "revoke":
        file.revoke(key.key_id)
    else:
        file.path.unlink()
    assert keyring.is_required
    assert keyring.grant_of(token) is None


TAMPERED = [
    lambda raw: raw.update(format_version=2),
    lambda raw: raw["keys"][0].update(scopes=["everything"]),
    lambda raw: raw["keys"][0].update(restriction="tenant=acme"),
    lambda raw: raw["keys"][0].update(collections="stones"),
    lambda raw: raw["keys"][0].pop("restriction"),
    lambda raw: raw["keys"][0].pop("revoked_at"),
    lambda raw: raw["keys"][0].update(extra=1),
    lambda raw: raw["keys"][0].update(sha256="0"),
    lambda raw: raw["keys"][0].update(revoked_at=False),
    lambda raw: raw["keys"][0].update(key_id="../up"),
    lambda raw: raw["keys"].append({**raw["keys"][0], "restriction": None}),
    lambda raw: raw.update(keys={}),
]


@pytest.mark.parametrize("change", [*TAMPERED, b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_file_that_was_tampered_with_or_cannot_be_read_lets_nobody_in(file, change, caplog):
    _, token = file.create("tenant", collections=["stones"], restriction=RESTRICTION)
    keyring = Keyring(file, is_required=True)
    raw = json.loads(file.path.read_text())
    if callable(change):
        change(raw)
    file.path.write_bytes(change if isinstance(change, bytes) else json.dumps(raw).encode())
    with pytest.raises(IntegrityError):
        keyring.grant_of(token)
    assert "serve.keys_unreadable" in caplog.text


def test_concurrent_creations_lose_no_key(file):
    with ThreadPoolExecutor(4) as pool:
        made = [*pool.map(lambda number: file.create(f"reader {number}")[0], range(20))]
    assert sorted(key.key_id for key in file.read()) == sorted(key.key_id for key in made)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "line\nbreak"},
        {"name": "x" * 101},
        {"scopes": []},
        {"scopes": ["search", "root"]},
        {"collections": []},
        {"collections": ["../up"]},
        {"restriction": {}},
        {"scopes": ["search", "admin"], "collections": ["stones"]},
        {"scopes": ["admin"], "restriction": RESTRICTION},
        *({"scopes": ["principal", other]} for other in ("write", "admin")),  # which only read
    ],
)
def test_key_that_makes_no_sense_is_refused(file, wrong):
    with pytest.raises(ConfigError):
        file.create(**{"name": "reader", **wrong})
    assert not file.path.exists()


def test_name_is_of_one_good_key_and_of_several_does_not_say_which_to_revoke(file):
    first, _ = file.create("reader")
    with pytest.raises(ConfigError, match=f"must be new, got 'reader', which key {first.key_id} has"):
        file.create("reader", scopes=["embed"])
    assert file.read() == [first]
    file.revoke("reader")
    second, _ = file.create("reader")
    assert [(key.key_id, key.revoked_at is None) for key in file.read()] == [
        (first.key_id, False),
        (second.key_id, True),
    ]
    made = [file.create("compose", token=f"cairn_{number:012x}_{'x' * 43}")[0].key_id for number in range(2)]
    with pytest.raises(ConfigError, match=f"got one of {made[0]}, {made[1]}; name an id"):
        file.revoke("compose")
    assert file.revoke(made[0]).key_id == made[0]
    assert file.revoke("compose").key_id == made[1]
