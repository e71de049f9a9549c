"""`cairn repair NAME`: back to the last good state, losing nothing that is still readable."""

from __future__ import annotations

from pathlib import Path

import click

from cli.settings import collection_argument
from cli.terminal import ProgressBars


@click.command(context_settings={"show_default": True})
@collection_argument
def repair(*, collection: str, root: str) -> int:
    """Rebuild damaged files of collection NAME from its tables, or return to its last intact generation."""
    from pipeline.index.layout import CollectionLayout
    from pipeline.index.maintenance import repair_collection

    with ProgressBars() as progress:
        outcome = repair_collection(CollectionLayout(Path(root), collection), progress)
    click.echo(outcome.action)
    for doc_id in outcome.lost:
        click.echo(f"lost, or older than before: {doc_id}")
    return 0
