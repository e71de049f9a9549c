"""`cairn repair NAME`: back to the last good state, losing nothing that is still readable."""

from __future__ import annotations

from pathlib import Path

import click
from cairn.cli.settings import collection_argument
from cairn.cli.terminal import ProgressBars
from cairn.pipeline.errors import CairnError


@click.command(context_settings={"show_default": True})
@collection_argument
def repair(*, collection: str, root: str) -> int:
    """Rebuild damaged files of collection NAME from its tables, or return to its last intact generation."""
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.index.maintenance import repair_collection
    from cairn.pipeline.index.stored_files import read_manifest
    from cairn.pipeline.index.verify import losses_path

    layout = CollectionLayout.at(Path(root), collection)
    try:
        with ProgressBars() as progress:
            outcome = repair_collection(layout, progress)
    except CairnError:
        if losses_path(layout).is_file():
            click.echo(f"documents that this repair gives up are named in {losses_path(layout)}", err=True)
        raise
    if outcome.lost and not read_manifest(layout, outcome.generation).documents:
        click.echo(f"EVERY document of collection {collection!r} is lost")
    click.echo(outcome.action)
    for doc_id in outcome.lost:
        click.echo(f"lost, or older than before: {doc_id}")
    if outcome.lost:
        again = layout.command("ingest", "SOURCE...", "--collection", collection, "--reread")
        click.echo(
            f"{len(outcome.lost)} document(s) were given up, or are older than before; "
            f"run `{again}` to encode them again"
        )
    return 0
