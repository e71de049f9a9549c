"""Which addresses a server may listen on, with and without keys."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from cairn.pipeline.errors import ConfigError, StorageError
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.server import bind, require_key, run_server
from cairn.pipeline.serve.settings import ServeSettings, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "LOCALHOST"])
def test_own_addresses_need_no_key(tmp_path: Path, host: str) -> None:
    assert is_loopback(host)
    require_key(ServeSettings(root=tmp_path, host=host))


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.168.1.5", "10.0.0.1", "search.example", "localhost.example", "", "fe80::1"]
)
def test_address_beyond_this_machine_needs_a_key(tmp_path: Path, host: str) -> None:
    settings = ServeSettings(root=tmp_path, host=host)
    with pytest.raises(ConfigError, match="cairn keys create NAME --root"):
        require_key(settings)
    key, _ = KeyFile(settings.keys_path).create("reader")
    require_key(settings)
    KeyFile(settings.keys_path).revoke(key.key_id)
    with pytest.raises(ConfigError, match="no API key"):
        require_key(settings)


def test_lost_file_of_keys_opens_no_server(tmp_path: Path) -> None:
    settings = ServeSettings(root=tmp_path)
    require_key(settings)
    KeyFile(settings.keys_path).create("reader")
    settings.keys_path.unlink()
    with pytest.raises(ConfigError, match=r"got no keys\.json; restore it or make new keys"):
        require_key(settings)
    (tmp_path / "keys.json.made").unlink()
    require_key(settings)


def test_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with bind(ServeSettings(root=tmp_path, port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StorageError, match=f"port {port} of 127.0.0.1 cannot be listened on"):
            bind(ServeSettings(root=tmp_path, port=port)).close()


def test_answers_are_not_held_back_for_more_to_send(tmp_path: Path) -> None:
    with (
        bind(ServeSettings(root=tmp_path, port=0)) as listener,
        socket.create_connection(listener.getsockname()[:2]),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_rerank_model_that_is_not_there_is_told_before_anything_is_served(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cairn models get cross-encoder/none"):
        run_server(ServeSettings(root=tmp_path, port=0, rerank_model="cross-encoder/none"), pytest.fail)


def test_host_that_does_not_resolve_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no-such-host\.invalid cannot be listened on"):
        bind(ServeSettings(root=tmp_path, host="no-such-host.invalid", port=0))


def test_sixth_version_is_bound(tmp_path: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with bind(ServeSettings(root=tmp_path, host="::1", port=0)) as listener:
        assert listener.family == socket.AF_INET6


@pytest.mark.parametrize(
    "wrong",
    [
        {"collections": ("../up",)},
        {"port": -1},
        {"port": 65_536},
        {"deadline_seconds": 0.0},
        {"deadline_seconds": float("nan")},
        {"deadline_seconds": 601.0},
        {"max_requests": 0},
        {"encoder_threads": 0},
        {"search_threads": 257},
    ],
)
def test_settings_out_of_bounds_are_refused(tmp_path: Path, wrong) -> None:
    with pytest.raises(ConfigError):
        ServeSettings(root=tmp_path, **wrong)
