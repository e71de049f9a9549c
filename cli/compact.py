"""`cairn compact NAME`: fewer, larger files."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from cli.engine import engine_options, resolve_engine
from cli.options import given
from cli.settings import collection_argument
from cli.terminal import ProgressBars


@click.command(context_settings={"show_default": True})
@collection_argument
@partial(engine_options, but=("worker_gpus", "shard_deadline"))
@click.pass_context
def compact(ctx: click.Context, *, collection: str, root: str, **_: Any) -> int:
    """Merge small files of collection NAME and drop what no kept generation needs.

    Workers of a Ray cluster write the index files of a large collection where they see its root.
    """
    from jobs.run import open_engine
    from pipeline.config import IngestConfig
    from pipeline.index.layout import CollectionLayout
    from pipeline.index.maintenance import compact_collection

    layout = CollectionLayout(Path(root), collection)
    with closing(open_engine(resolve_engine(given(ctx)), IngestConfig())) as engine, ProgressBars() as bars:
        manifest = compact_collection(layout, bars, engine.run_tasks)
    click.echo(
        f"{collection}: generation {manifest.generation} holds {manifest.documents:,} documents, compacted"
    )
    return 0
