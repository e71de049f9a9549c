"""`cairn switch [NAME TO]`: let a name answer from another collection."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from cairn.cli.settings import json_option, root_option
from cairn.cli.terminal import table


@click.command(context_settings={"show_default": True})
@click.argument("name", required=False, metavar="[NAME")
@click.argument("to", required=False, metavar="TO]")
@root_option
@click.option("--back", is_flag=True, help="Let NAME answer from the collection before.")
@json_option
def switch(*, name: str | None, to: str | None, root: str, back: bool, as_json: bool) -> int:
    """Let searches of NAME be answered from collection TO; without arguments list the switched names.

    Servers follow within a request, and answer from the collection before until TO is open. What writes, such
    as ingest, goes on with the collection of that name.
    """
    from pathlib import Path

    from cairn.pipeline.index import aliases
    from cairn.pipeline.index.layout import CollectionLayout

    if name is None:
        found = aliases.read_aliases(root)
        rows = [("name", "answers from", "before")]
        rows += [(each, alias.to, alias.before) for each, alias in found.items()]
        said = table(rows) if found else f"no switched names under {root}"
        click.echo(json.dumps({each: asdict(alias) for each, alias in found.items()}) if as_json else said)
        return 0
    if (to is None) != back:
        raise click.UsageError("switch must have either TO or --back")
    alias = aliases.switch(root, name, to)
    had_one = alias.before != name or CollectionLayout.at(Path(root), name).exists()
    say = f"{name} answers from {alias.to}; before from {alias.before if had_one else 'none'}"
    click.echo(json.dumps({"name": name, **asdict(alias)}) if as_json else say)
    return 0
