"""`cairn mcp NAME`: a collection as tools of a language model, on stdin and stdout."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click
from cairn.cli.settings import collection_argument


@click.command(name="mcp", context_settings={"show_default": True})
@collection_argument
@click.option(
    "--url", help="Ask the server at this URL instead; its key is taken from CAIRN_API_KEY.  [default: none]"
)
def mcp(*, collection: str, root: str, url: str | None) -> None:
    """Serve collection NAME to a language model.

    MCP on stdin and stdout, with tools that only read. `cairn serve` has them for all collections at /mcp.
    """
    from cairn.pipeline.frameworks.mcp_server import OneCollection, make_server
    from cairn.pipeline.frameworks.source import open_source

    source = open_source(
        collection, root=None if url else Path(root), url=url, api_key=os.environ.get("CAIRN_API_KEY")
    )
    with contextlib.suppress(KeyboardInterrupt):
        make_server(lambda _: OneCollection(source)).run("stdio")
