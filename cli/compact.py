"""`cairn compact NAME`: fewer, larger files."""

from __future__ import annotations

from pathlib import Path

import click

from cli.settings import collection_argument
from cli.terminal import ProgressBars


@click.command(context_settings={"show_default": True})
@collection_argument
def compact(*, collection: str, root: str) -> int:
    """Merge small files of collection NAME and drop what no kept generation needs."""
    from pipeline.index.layout import CollectionLayout
    from pipeline.index.maintenance import compact_collection

    with ProgressBars() as progress:
        manifest = compact_collection(CollectionLayout(Path(root), collection), progress)
    click.echo(
        f"{collection}: generation {manifest.generation} holds {manifest.documents:,} documents, compacted"
    )
    return 0
