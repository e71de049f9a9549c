"""`cairn drop NAME`: delete a collection."""

from __future__ import annotations

from pathlib import Path

import click
from cairn.cli.settings import collection_argument
from cairn.pipeline.errors import UsageError
from click.core import ParameterSource


@click.command(context_settings={"show_default": True})
@collection_argument
@click.option("--yes", is_flag=True, help="Delete without asking.")
@click.pass_context
def drop(ctx: click.Context, *, collection: str, root: str, yes: bool) -> int:
    """Delete collection NAME with everything that is stored of it; its name must be typed, or --yes given.

    A collection that is being written is refused. Sources are not touched.
    """
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.index.maintenance import drop_collection, require_droppable

    if ctx.get_parameter_source("collection") is not ParameterSource.COMMANDLINE:
        raise click.UsageError("drop must have the NAME of a collection, got none; cairn.toml does not count")
    layout = CollectionLayout.at(Path(root), collection)
    require_droppable(layout)
    if not yes:
        try:
            typed = click.prompt(f"type {collection} to delete it", err=True)
        except click.Abort:
            typed = ""
        if typed != collection:
            raise UsageError(
                f"{collection} must be typed to delete it, got {typed[:80]!r}; nothing was deleted, --yes "
                "deletes without asking"
            )
    drop_collection(layout)
    click.echo(f"{collection}: deleted")
    return 0
