"""`ingest SOURCE… --collection NAME`: the main job."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import click
from cairn.cli.engine import engine_options, resolve_engine
from cairn.cli.options import GroupedCommand, add_options, chosen, given
from cairn.cli.settings import json_option, root_option
from cairn.cli.terminal import ProgressBars, duration, table, thousands
from cairn.jobs.engine import open_engine
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
from cairn.pipeline.types import IngestReport

_QUARANTINED_EXIT = 3


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
    config = resolve_ingest_config(settings, stored)
    if dry_run:
        with ProgressBars(quiet=quiet) as progress:
            plan = plan_index(sources, root, collection, config, progress)
        click.echo(
            json.dumps(plan)
            if as_json
            else table([(key.replace("_", " "), _cell(value)) for key, value in plan.items()])
        )
        return _QUARANTINED_EXIT if plan["quarantined"] else 0
    with ProgressBars(quiet=quiet) as progress:
        report = build_index(sources, root, collection, config, progress, open_engine(engine, config))
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(json.dumps(asdict(report), default=dict) if as_json else _summary(report))
    return _QUARANTINED_EXIT if report.quarantined else 0


def _chosen(ctx: click.Context) -> dict[str, Any]:
    stages = {stage: chosen(ctx, kind) for stage, kind in STAGES.items()}
    encoder = stages["encoder"]
    if "model" in encoder and is_folder(encoder["model"]):
        # A search may start in another folder.
        encoder["model"] = str(Path(encoder["model"]).expanduser().resolve())
    return {**stages, **chosen(ctx, IngestConfig)}


def _cell(value: object) -> str:
    if isinstance(value, float):
        return duration(value)
    if isinstance(value, int):
        return thousands(value)
    if isinstance(value, dict):
        from cairn.pipeline.line.build_index import describe_reasons

        return describe_reasons(cast("dict[str, int]", value)) or "none"
    return "; ".join(cast("list[str]", value)) or "none"


def _summary(report: IngestReport) -> str:
    rows: list[tuple[str, str]] = [
        ("rows", thousands(report.rows)),
        ("  indexed", f"{thousands(report.indexed)}  ({thousands(report.encoded)} encoded in this run)"),
        ("  unchanged", thousands(report.unchanged)),
        ("  quarantined", thousands(report.quarantined)),
        *((f"    {reason}", thousands(count)) for reason, count in sorted(report.quarantine_reasons.items())),
        *([("    see", report.quarantine_file)] if report.quarantine_file else []),
        ("deleted", thousands(report.deleted)),
        ("files", f"{thousands(report.files)}  ({thousands(report.unread_files)} unchanged and not read)"),
        ("chunks", thousands(report.chunks)),
        ("tokens", thousands(report.tokens)),
        ("generation", str(report.generation)),
        ("time", duration(report.seconds)),
        *((f"  {stage}", duration(seconds)) for stage, seconds in report.stage_seconds.items()),
    ]
    return table(rows)
