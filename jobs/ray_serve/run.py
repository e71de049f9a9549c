"""Serve on a Ray cluster until stopped: `cairn serve --engine ray`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from jobs.ray_cluster.runtime import RayConnection
from jobs.ray_serve.settings import ClusterSettings
from pipeline.errors import ClusterError
from pipeline.serve.server import KEEP_ALIVE_SECONDS, bind, require_key
from pipeline.serve.settings import ServeSettings

APPLICATION: Final = "cairn"
ONE_LOOP: Final = ("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP")
"""Settings of Ray Serve, "0" for a request that stays on one event loop: ours never waits on it."""


def run_on_cluster(
    settings: ServeSettings, cluster: ClusterSettings, on_listening: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM; ``on_listening`` hears the address once requests are taken.

    Serve's proxy listens on the head of the cluster.
    """
    require_key(settings)
    listening = replace(settings, port=settings.port or _free_port(settings))
    # A Ray of our own must not let its processes stand back behind all others, as Ray's workers do.
    os.environ.setdefault("RAY_worker_niceness", "0")
    for name in ONE_LOOP:
        os.environ.setdefault(name, "0")
    connection = RayConnection(cluster.address)
    try:
        _serve(connection.ray, listening, cluster, on_listening)
    finally:
        connection.close()


def _serve(
    ray: Any, settings: ServeSettings, cluster: ClusterSettings, on_listening: Callable[[str], None]
) -> None:
    from ray import serve  # Ray reads its token when it is imported

    from jobs.ray_serve.ingress import absolute, application
    from jobs.ray_serve.shard_calls import stop_shards

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        serve.start(
            http_options={
                "host": settings.host,
                "port": settings.port,
                "location": "HeadOnly",
                "keep_alive_timeout_s": KEEP_ALIVE_SECONDS,
            }
        )
        try:
            serve.run(application(replace(settings, root=absolute(settings.root)), cluster), name=APPLICATION)
        except RuntimeError as error:
            raise ClusterError(f"Ray Serve must start the application, got {error}") from error
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        on_listening(f"http://{host}:{settings.port}")
        stopped.wait()
    finally:
        serve.shutdown()
        stop_shards(ray)


def _free_port(settings: ServeSettings) -> int:
    with bind(settings) as listener:
        port: int = listener.getsockname()[1]
        return port
