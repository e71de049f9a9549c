"""`cairn lineage NAME DOC_ID`: where a document came from."""

from __future__ import annotations

import json

import click
from cairn.cli.settings import collection_argument, json_option
from cairn.cli.terminal import table, thousands

_NO_DOCUMENT = 2


@click.command(context_settings={"show_default": True})
@collection_argument
@click.argument("doc_id")
@json_option
def lineage(*, collection: str, doc_id: str, root: str, as_json: bool) -> int:
    """Show which file, row and run document DOC_ID of collection NAME came from, and what encoded it."""
    from cairn.pipeline.collection import open_collection

    found = open_collection(collection, root=root).lineage(doc_id)
    if found is None:
        click.echo(f"not in the collection: {doc_id}", err=True)
        return _NO_DOCUMENT
    if as_json:
        click.echo(json.dumps(found.to_dict(), ensure_ascii=False))
        return 0
    run = found.run
    row = "" if found.source_row is None else f", row {thousands(found.source_row)}"
    context = f"{thousands(found.context_documents)} documents" if found.context_documents else "not read"
    rows = [
        ("document", found.doc_id),
        ("source", f"{found.source_file}{row}"),
        ("read by", "not recorded" if run is None else f"run {run.run_id}  ({run.started_at})"),
        ("model", f"{found.model}{f' at {found.model_revision}' if found.model_revision else ''}"),
        ("", f"fingerprint {found.encoder_fingerprint}"),
        ("context", context),
        ("cluster", str(found.cluster_id)),
        ("encoded as", f"{thousands(found.num_chunks)} chunks of {thousands(found.num_tokens)} tokens"),
        ("content", f"sha256 {found.content_sha256}"),
        ("generation", f"{found.generation}  ({found.published_at}, run {found.published_by})"),
    ]
    click.echo(table(rows))
    return 0
