"""`cairn delete NAME DOC_ID…`."""

from __future__ import annotations

from pathlib import Path

import click

from cli.settings import collection_argument
from cli.terminal import ProgressBars

_NOTHING_DELETED = 2


@click.command(context_settings={"show_default": True})
@collection_argument
@click.argument("doc_ids", nargs=-1, required=True, metavar="DOC_ID...")
def delete(*, collection: str, doc_ids: tuple[str, ...], root: str) -> int:
    """Delete documents of collection NAME by id.

    Unknown ids are listed, and exit 2 says that none was known.
    """
    from pipeline.index.layout import CollectionLayout
    from pipeline.index.maintenance import delete_documents

    with ProgressBars() as progress:
        report = delete_documents(CollectionLayout(Path(root), collection), list(doc_ids), progress)
    click.echo(f"{collection}: {report.deleted:,} deleted, generation {report.generation}")
    if report.missing:
        click.echo(f"not in the collection: {', '.join(report.missing)}", err=True)
    return 0 if report.deleted else _NOTHING_DELETED
