"""`cairn serve [NAME…]`: the search API over HTTP."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from cairn.cli.options import add_options, chosen
from cairn.cli.settings import root_option
from cairn.cli.terminal import echo, warn
from cairn.jobs.ray_serve.settings import ClusterSettings
from cairn.pipeline.errors import ConfigError, install_command
from cairn.pipeline.serve.settings import ServeSettings

_PACKAGES = ("fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic", "watchfiles")


def _runner(settings: ServeSettings, cluster: ClusterSettings) -> Callable[[Callable[[str], None]], None]:
    """Return what serves; importing it needs an extra."""
    if cluster.engine == "ray":
        import watchfiles as _  # noqa: F401 - of Ray Serve's packages the one that nothing else brings
        from cairn.jobs.ray_serve.run import run_on_cluster

        return partial(run_on_cluster, settings, cluster)
    from cairn.pipeline.serve.server import run_server

    return partial(run_server, settings)


@click.command(context_settings={"show_default": True})
@click.argument("collections", nargs=-1, metavar="[NAME]...")
@root_option
@add_options(ClusterSettings)
@add_options(ServeSettings)
@click.option("--quiet", is_flag=True, help="Log problems only, not each request.")
@click.pass_context
def serve(ctx: click.Context, *, collections: tuple[str, ...], root: str, quiet: bool, **_: Any) -> None:
    """Serve the search API for collections NAME, or for all that stand under the root."""
    values: dict[str, Any] = {**chosen(ctx, ServeSettings), "collections": collections, "root": Path(root)}
    settings, cluster = ServeSettings(**values), ClusterSettings(**chosen(ctx, ClusterSettings))
    if cluster.engine != "local" and settings.writable:
        raise ConfigError("a writable server must have the engine local, got ray; leave --writable out")
    if cluster.engine != "local" and settings.hide_word_statistics:
        raise ConfigError(
            "a server that hides word statistics must have the engine local, got ray, whose shards count the "
            "words of all documents; leave --hide-word-statistics out"
        )
    if cluster.engine == "local" and set(chosen(ctx, ClusterSettings)) - {"engine", "address"}:
        warn("engine local has no shards; flags about them move nothing")
    try:
        run = _runner(settings, cluster)
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        extra = "serve" if cluster.engine == "local" else "serve-ray"
        raise ConfigError(
            f"serving must have the package {error.name}, got none; install it with {install_command(extra)}"
        ) from None
    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )

    def say(address: str) -> None:
        echo(f"serving {', '.join(collections) or f'all collections under {root}'} at {address}", err=True)

    with contextlib.suppress(
        KeyboardInterrupt
    ):  # raised or not once the server has ended by the signal, as uvicorn sees fit
        run(say)
    echo("stopped", err=True)
