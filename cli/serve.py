"""`cairn serve [NAME…]`: the search API over HTTP."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import click

from cli.settings import root_option
from pipeline.errors import ConfigError

_PACKAGES = ("fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic")


@click.command(context_settings={"show_default": True})
@click.argument("collections", nargs=-1, metavar="[NAME]...")
@root_option
@click.option(
    "--host", default="127.0.0.1", help="Address to listen on; one beyond this machine needs an API key."
)
@click.option("--port", type=int, default=8400, help="Port to listen on; 0: any that is free.")
@click.option(
    "--keys-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of API keys.  [default: ROOT/keys.json]",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    help="Name the server may be called by, beside its own; repeat.",
)
@click.option("--deadline-seconds", type=float, default=10.0, help="Time a request may take.")
@click.option("--max-requests", type=int, default=128, help="Requests in flight; more are told to try again.")
@click.option("--encoder-threads", type=int, help="Threads of an encoder.  [default: one a processor]")
@click.option("--search-threads", type=int, help="Searches at a time.  [default: one a processor]")
@click.option(
    "--rerank-model",
    metavar="MODEL",
    help="Cross-encoder for requests that ask to rerank, a name or folder; extra rerank.",
)
@click.option("--quiet", is_flag=True, help="Log problems only, not each request.")
def serve(
    *, collections: tuple[str, ...], root: Path, keys_file: Path | None, quiet: bool, **settings: object
) -> int:
    """Serve the search API for collections NAME, or for all that stand under the root."""
    from pipeline.serve.settings import ServeSettings

    chosen = ServeSettings(root=Path(root), collections=collections, keys_file=keys_file, **settings)  # type: ignore[arg-type]
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
        run_server(chosen, say)
    click.echo("stopped", err=True)
    return 0
