"""Serve on a Ray cluster until stopped: `cairn serve --engine ray`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from cairn.jobs.ray_cluster.runtime import RayConnection
from cairn.jobs.ray_serve.settings import ClusterSettings
from cairn.pipeline.errors import ClusterError
from cairn.pipeline.index.names import store_uri
from cairn.pipeline.serve.server import KEEP_ALIVE_SECONDS, bind, require_key, run_server
from cairn.pipeline.serve.settings import ServeSettings

APPLICATION: Final = "cairn"
ONE_LOOP: Final = ("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP")
"""Settings of Ray Serve, "0" for a request that stays on one event loop: ours never waits on it."""


def run_on_cluster(
    settings: ServeSettings, cluster: ClusterSettings, on_listening: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM; ``on_listening`` hears the address once requests are taken.

    One replica is this process, as without shards. Several are Ray Serve's, whose proxy listens on the head
    of the cluster.
    """
    require_key(settings)
    # A Ray of our own must not let its processes stand back behind all others, as Ray's workers do.
    os.environ.setdefault("RAY_worker_niceness", "0")
    for name in ONE_LOOP:
        os.environ.setdefault(name, "0")
    is_local = store_uri(settings.root) is None
    found = replace(settings, root=settings.root.resolve() if is_local else settings.root)
    connection = RayConnection(cluster.address)
    try:
        _serve(connection.ray, found, cluster, on_listening)
    finally:
        connection.close()


def _serve(
    ray: Any, settings: ServeSettings, cluster: ClusterSettings, on_listening: Callable[[str], None]
) -> None:
    from cairn.jobs.ray_serve.shard_calls import ShardCalls, stop_shards  # once Ray has its token

    # SIGTERM, too, comes back as an exception when a server has ended by it: shards are still to be stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if cluster.replicas == 1:
            run_server(settings, on_listening, ShardCalls(ray, settings, cluster).open)
        else:
            _serve_by_ray(settings, cluster, on_listening)
    finally:
        stop_shards(ray)


def _serve_by_ray(
    settings: ServeSettings, cluster: ClusterSettings, on_listening: Callable[[str], None]
) -> None:
    from cairn.jobs.ray_serve.ingress import application
    from ray import serve

    listening = replace(settings, port=settings.port or _free_port(settings))
    try:
        serve.start(
            http_options={
                "host": listening.host,
                "port": listening.port,
                "location": "HeadOnly",
                "keep_alive_timeout_s": KEEP_ALIVE_SECONDS,
            }
        )
        try:
            serve.run(application(listening, cluster), name=APPLICATION)
        except RuntimeError as error:
            raise ClusterError(f"Ray Serve must start the application, got {error}") from error
        host = f"[{listening.host}]" if ":" in listening.host else listening.host
        on_listening(f"http://{host}:{listening.port}")
        threading.Event().wait()
    finally:
        serve.shutdown()


def _free_port(settings: ServeSettings) -> int:
    with bind(settings) as listener:
        port: int = listener.getsockname()[1]
        return port
