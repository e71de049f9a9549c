"""`cairn verify NAME`: believe nothing, hash everything."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from cli.settings import check_default_map, json_option, root_option


@click.command(context_settings={"show_default": True})
@click.argument("collection", metavar="NAME")
@root_option
@json_option
@click.pass_context
def verify(ctx: click.Context, *, collection: str, root: str, as_json: bool) -> int:
    """Check every stored file of collection NAME against its hashes; exit 1 when something is wrong."""
    check_default_map(ctx)
    from pipeline.index.layout import CollectionLayout
    from pipeline.index.maintenance import verify_collection

    problems = verify_collection(CollectionLayout(Path(root), collection))
    if as_json:
        click.echo(json.dumps({"collection": collection, "problems": [asdict(problem) for problem in problems]}, default=str))
    else:
        click.echo("\n".join(str(problem) for problem in problems) or f"{collection}: every file matches its hash")
    if problems and not as_json:
        click.echo(f"{len(problems)} problem(s); run `cairn repair {collection}`", err=True)
    return 1 if problems else 0
