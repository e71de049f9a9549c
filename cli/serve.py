"""`cairn serve [NAME…]`: the search API over HTTP."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import click

from cli.options import add_options, chosen
from cli.settings import root_option
from pipeline.errors import ConfigError
from pipeline.serve.settings import ServeSettings

_PACKAGES = ("fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic")


@click.command(context_settings={"show_default": True})
@click.argument("collections", nargs=-1, metavar="[NAME]...")
@root_option
@add_options(ServeSettings)
@click.option("--quiet", is_flag=True, help="Log problems only, not each request.")
@click.pass_context
def serve(ctx: click.Context, *, collections: tuple[str, ...], root: str, quiet: bool, **_: Any) -> int:
    """Serve the search API for collections NAME, or for all that stand under the root."""
    values: dict[str, Any] = {**chosen(ctx, ServeSettings), "collections": collections, "root": Path(root)}
    settings = ServeSettings(**values)
    try:
        from pipeline.serve.server import run_server
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        raise ConfigError(
            f"serving must have the package {error.name}, got none; install it with `pip install "
            "'cairn-retrieval[serve]'`"
        ) from None
    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )

    def say(address: str) -> None:
        click.echo(
            f"serving {', '.join(collections) or f'all collections under {root}'} at {address}", err=True
        )

    with contextlib.suppress(
        KeyboardInterrupt
    ):  # raised or not once the server has ended by the signal, as uvicorn sees fit
        run_server(settings, say)
    click.echo("stopped", err=True)
    return 0
