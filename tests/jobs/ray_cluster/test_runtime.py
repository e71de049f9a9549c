from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from cairn.jobs.ray_cluster import runtime as ray_runtime
from cairn.jobs.ray_cluster.runtime import STARTS, RayConnection, require_accepted, start_ray
from cairn.pipeline.errors import ClusterError


def python_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> Path:
    """Put a program in the place of Python, which notes each start in the file that is returned."""
    starts, program = tmp_path / "starts", tmp_path / "python"
    program.write_text("\n".join(["#!/bin/sh", f"echo start >> {starts}", *lines]))
    program.chmod(0o755)
    monkeypatch.setattr(ray_runtime.sys, "executable", str(program))
    return starts


def test_ray_that_does_not_start_is_tried_again_and_then_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = python_that(tmp_path, monkeypatch, "echo 'Exception: timed out' >&2", "exit 1")
    with pytest.raises(
        ClusterError, match="Ray must start on this machine, got 'Exception: timed out'; use engine local"
    ):
        start_ray()
    assert len(starts.read_text().split()) == STARTS


def test_ray_that_starts_late_gives_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = python_that(
        tmp_path,
        monkeypatch,
        f"[ $(wc -l < {tmp_path}/starts) -gt 1 ] || exit 1",
        "echo here:1",
        "cat > /dev/null",
    )
    keeper, address = start_ray()
    keeper.communicate(timeout=300)
    assert (address, keeper.returncode, len(starts.read_text().split())) == ("here:1", 0, 2)


@pytest.fixture
def wrong_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a token that is no cluster's; Ray keeps the one it has read."""
    from ray._raylet import AuthenticationTokenLoader

    tokens = AuthenticationTokenLoader.instance()
    with monkeypatch.context() as changed:
        changed.setenv("RAY_AUTH_TOKEN", "b" * 64)
        tokens.reset_cache()
        yield
    tokens.reset_cache()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("wrong_token")
def test_cluster_with_another_token_is_a_failure_and_not_worth_trying_again(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ClusterError,
        match=rf"'{ray_cluster.address}' must accept us, got '.*incorrect'; set RAY_AUTH_MODE=token",
    ) as caught:
        RayConnection(ray_cluster.address)
    assert caught.value.exit_code == 1
    # What Ray looks up by itself is asked once Ray has given up, after 20 seconds.
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    monkeypatch.setattr("ray.init", Mock(side_effect=ConnectionError("Failed to connect")))
    with pytest.raises(ClusterError, match="'auto' must accept us"):
        RayConnection("auto")


@pytest.mark.slow
@pytest.mark.usefixtures("wrong_token")
def test_port_of_ray_clients_with_another_token_is_a_failure() -> None:
    """What listens there is a server in Python, which refuses in words of its own."""
    import grpc

    def refuse(_: bytes, context: Any) -> None:
        assert ("authorization", f"Bearer {'b' * 64}") in context.invocation_metadata()
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "Invalid or missing authentication token")

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                "ray.rpc.RayletDriver", {"ClusterInfo": grpc.unary_unary_rpc_method_handler(refuse)}
            )
        ]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(
            ClusterError, match=rf"'ray://127.0.0.1:{port}' must accept us, got 'Invalid or missing"
        ):
            require_accepted(f"ray://127.0.0.1:{port}")
    finally:
        server.stop(None).wait()
