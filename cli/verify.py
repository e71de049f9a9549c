"""`cairn verify NAME`: believe nothing, hash everything."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from cairn.cli.settings import collection_argument, json_option

if TYPE_CHECKING:
    from cairn.pipeline.index.maintenance import Fault


@click.command(context_settings={"show_default": True})
@collection_argument
@json_option
def verify(*, collection: str, root: str, as_json: bool) -> int:
    """Check every stored file of collection NAME against its hashes; exit 1 when something is wrong."""
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.index.maintenance import verify_collection

    layout = CollectionLayout.at(Path(root), collection)
    problems = verify_collection(layout)
    if as_json:
        click.echo(
            json.dumps(
                {"collection": collection, "problems": [asdict(problem) for problem in problems]}, default=str
            )
        )
    else:
        click.echo(
            "\n".join(_line(problem) for problem in problems) or f"{collection}: every file matches its hash"
        )
    if problems and not as_json:
        click.echo(f"{len(problems)} problem(s); run `{layout.command('repair')}`", err=True)
    return 1 if problems else 0


def _line(problem: Fault) -> str:
    where = "" if problem.generation is None else f"generation {problem.generation}, "
    return f"{where}{problem.file}: {problem.sentence}"
