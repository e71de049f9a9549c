"""`ingest SOURCE… --collection NAME`: the main job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from cairn.cli.cluster import engine_options, open_engine, resolve_engine
from cairn.cli.options import GroupedCommand, add_options, chosen, given
from cairn.cli.settings import json_option, root_option
from cairn.cli.terminal import ProgressBars, echo, facts, warn
from cairn.pipeline.config import (
    DEFAULT_MODEL,
    ClusterConfig,
    ContextConfig,
    CorpusConfig,
    EncoderConfig,
    IndexConfig,
    IngestConfig,
)
from cairn.pipeline.line.ingest_settings import STAGES, resolve_ingest_config
from cairn.pipeline.model.folders.names import is_folder

_QUARANTINED_EXIT = 3
_STEPS: Final[Mapping[str | None, Any]] = {
    "cluster": {"until": "cluster"},
    "encode": {"until": "encode"},
    "write": {"is_encoded": True},
}
"""What :func:`build_index` is told of a step."""


_EXAMPLES = """\b
Examples:
  ingest articles/ --collection handbook
  ingest notes.parquet --collection notes --id-column key --text-column body
  ingest articles/ --collection handbook --sync --dry-run
  ingest s3://bucket/articles --root s3://bucket/indexes --collection handbook
"""


_FIRST = (
    "collection", "root", "id_column", "text_column", "title_column", "metadata_columns", "model", "sync",
    "dry_run", "as_json",
)  # fmt: skip
"""What `--help` shows."""


@click.command(cls=GroupedCommand, first=_FIRST, epilog=_EXAMPLES, context_settings={"show_default": True})
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "--collection",
    required=True,
    envvar="CAIRN_COLLECTION",
    help="Name of the collection to build or update.",
)
@root_option
@add_options(CorpusConfig, heading="Corpus")
@add_options(EncoderConfig, heading="Encoder")
@add_options(ClusterConfig, ContextConfig, heading="Clusters and context")
@add_options(IndexConfig, heading="Index")
@engine_options
@add_options(IngestConfig, heading="This run")
@click.option("--download", is_flag=True, help="Fetch the model from the Hugging Face hub if it is not here.")
@click.option(
    "--dry-run", is_flag=True, help="Say what would be done, and how long it would take; change nothing."
)
@click.option(
    "--step",
    type=click.Choice(("cluster", "encode", "write")),
    help="Do this step only; the next run goes on from it.",
)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
@click.pass_context
def ingest(
    ctx: click.Context,
    sources: tuple[str, ...],
    collection: str,
    root: str,
    *,
    download: bool,
    dry_run: bool,
    step: str | None,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Index SOURCES (files, folders, globs, URIs) into a collection.

    Run it again at any time: only what is new or changed is encoded, and a killed run goes on where it
    stopped.
    """
    from cairn.pipeline.line.build_index import build_index
    from cairn.pipeline.line.compatibility import stored_settings
    from cairn.pipeline.line.plan_index import plan_index
    from cairn.pipeline.model.folders.download import download_if_missing

    engine = resolve_engine(given(ctx))
    settings = _chosen(ctx)
    stored = stored_settings(root, collection)
    if download:
        built_with = stored["encoder"]["model"] if stored else DEFAULT_MODEL
        download_if_missing(settings["encoder"].get("model", built_with))
        if "sparse_model" in settings["encoder"]:
            download_if_missing(settings["encoder"]["sparse_model"])
    config = resolve_ingest_config(settings, stored)
    if dry_run:
        with ProgressBars(quiet=quiet) as progress:
            plan = plan_index(sources, root, collection, config, progress)
        echo(json.dumps(plan) if as_json else facts(plan))
        return _QUARANTINED_EXIT if plan["quarantined"] else 0
    with ProgressBars(quiet=quiet) as progress:
        report = build_index(
            sources, root, collection, config, progress, open_engine(engine, config), **_STEPS.get(step, {})
        )
    for warning in report.warnings:
        warn(warning)
    told = asdict(report)
    echo(json.dumps(told, default=dict) if as_json else facts({**told, "warnings": None}))
    return _QUARANTINED_EXIT if report.quarantined else 0


def _chosen(ctx: click.Context) -> dict[str, Any]:
    stages = {stage: chosen(ctx, kind) for stage, kind in STAGES.items()}
    encoder = stages["encoder"]
    for name in ("model", "sparse_model"):
        if name in encoder and is_folder(encoder[name]):
            # A search may start in another folder.
            encoder[name] = str(Path(encoder[name]).expanduser().resolve())
    return {**stages, **chosen(ctx, IngestConfig)}
