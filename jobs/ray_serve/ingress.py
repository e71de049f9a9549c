"""The deployment of Ray Serve that answers requests, and the application made of settings.

KubeRay and `serve deploy` name :func:`build` as ``import_path`` and give options by their names in ``args``.
"""

# pyright: reportUntypedClassDecorator=false, reportPrivateImportUsage=false
# Ray Serve's decorators have no types.

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import ray
from cairn.jobs.ray_serve.settings import ClusterSettings
from cairn.jobs.ray_serve.shard_calls import ShardCalls
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.options import options_of
from cairn.pipeline.serve.server import app_of, require_key
from cairn.pipeline.serve.settings import ServeSettings
from ray import serve

SPARE_REQUESTS: Final = 32
"""Requests a replica takes beside those it answers: health checks, and those that it tells to try again."""


@serve.ingress()
class Ingress:
    """The application of ``cairn.pipeline.serve``, whose searches ask shards."""

    def __init__(self, settings: ServeSettings, cluster: ClusterSettings) -> None:
        self._settings, self._cluster = settings, cluster

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application of one replica."""
        calls = ShardCalls(ray, self._settings, self._cluster)
        return app_of(self._settings, open_one=calls.open)


def application(settings: ServeSettings, cluster: ClusterSettings) -> serve.Application:
    """Return what Serve is to run; every machine must see the root under its name."""
    deployment: Any = serve.deployment(
        name="ingress",
        num_replicas=cluster.replicas,
        max_ongoing_requests=settings.max_requests + SPARE_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        logging_config={"enable_access_log": False},  # the application writes its own
    )(Ingress)
    return deployment.bind(settings, cluster)


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """Return the application for the options of `cairn serve` by name, with ``root`` and ``collections``."""
    serving = {"root", "collections", *options_of(ServeSettings)}
    cluster = set(options_of(ClusterSettings)) - {"engine", "address"}
    unknown = sorted(set(arguments) - serving - cluster)
    if unknown:
        raise ConfigError(f"args must be options of `cairn serve`, got {unknown[0]!r}")
    if "root" not in arguments:
        raise ConfigError("args must name the root, got none")
    values = {name: value for name, value in arguments.items() if name in serving}
    for name in ("collections", "allowed_hosts"):
        if name in values:
            values[name] = tuple(values[name])
    for name in ("root", "keys_file", "feedback_log"):
        if name in values:
            values[name] = Path(values[name])
    settings = ServeSettings(**values)
    require_key(settings)
    return application(
        settings,
        ClusterSettings(engine="ray", **{name: arguments[name] for name in cluster & set(arguments)}),
    )
