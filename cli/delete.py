"""`cairn delete NAME DOC_ID…`, or `--filter` in place of ids."""

from __future__ import annotations

from pathlib import Path

import click
from cairn.cli.options import filter_option
from cairn.cli.settings import collection_argument
from cairn.cli.terminal import ProgressBars

_NOTHING_DELETED = 2


@click.command(context_settings={"show_default": True})
@collection_argument
@click.argument("doc_ids", nargs=-1, metavar="[DOC_ID...]")
@filter_option("Delete")
@click.option("--dry-run", is_flag=True, help="List the ids that would be deleted; change nothing.")
def delete(
    *, collection: str, doc_ids: tuple[str, ...], filters: tuple[str, ...], dry_run: bool, root: str
) -> int:
    """Delete documents of collection NAME by id, or those that match every --filter.

    Unknown ids are listed, and exit 2 says that none was known.
    """
    from cairn.pipeline.collection import Collection
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.index.maintenance import delete_documents

    if bool(doc_ids) == bool(filters):
        raise click.UsageError(
            f"delete must have ids or --filter, got {'both' if filters else 'neither'}; "
            f"{'leave one of them out' if filters else 'name documents, or say which'}"
        )
    layout = CollectionLayout.at(Path(root), collection)
    layout.require_exists()
    wanted, found = list(dict.fromkeys(doc_ids)), Collection(layout)
    if filters:
        wanted = found.documents.ids(found.parse_filters(filters))
    if dry_run:
        known = set(wanted if filters else found.documents.ids())
        present, missing = ([each for each in wanted if (each in known) is here] for here in (True, False))
        click.echo("\n".join([*present, f"{collection}: {len(present):,} would be deleted"]))
        num_deleted = len(present)
    else:
        with ProgressBars() as progress:
            report = delete_documents(layout, wanted, progress)
        click.echo(f"{collection}: {report.deleted:,} deleted, generation {report.generation}")
        num_deleted, missing = report.deleted, report.missing
    if missing:
        click.echo(f"not in the collection: {', '.join(missing)}", err=True)
    return 0 if num_deleted or filters else _NOTHING_DELETED
