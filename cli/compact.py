"""`cairn compact NAME`: fewer, larger files."""

from __future__ import annotations

from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click
from cairn.cli.engine import engine_options, resolve_engine
from cairn.cli.options import given
from cairn.cli.settings import collection_argument
from cairn.cli.terminal import ProgressBars


@click.command(context_settings={"show_default": True})
@collection_argument
@partial(engine_options, but=("worker_gpus", "shard_deadline"))
@click.pass_context
def compact(ctx: click.Context, *, collection: str, root: str, **_: Any) -> int:
    """Merge small files of collection NAME and drop what no kept generation needs.

    Workers of a Ray cluster write the index files of a large collection where they see its root.
    """
    from cairn.jobs.engine import open_engine
    from cairn.pipeline.config import IngestConfig
    from cairn.pipeline.index.layout import CollectionLayout
    from cairn.pipeline.index.maintenance import compact_collection

    layout = CollectionLayout.at(Path(root), collection)
    engine = open_engine(resolve_engine(given(ctx)), IngestConfig())
    with closing(engine) if engine else nullcontext(), ProgressBars() as bars:
        manifest = compact_collection(layout, bars, engine.run_tasks if engine else None)
    click.echo(
        f"{collection}: generation {manifest.generation} holds {manifest.documents:,} documents, compacted"
    )
    return 0
