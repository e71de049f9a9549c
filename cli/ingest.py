"""`ingest SOURCE… --collection NAME`: the main job."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import click

from cli.engine import engine_options, resolve_engine
from cli.flags import FIELD_OF
from cli.settings import TemperatureSteps, given, json_option, root_option, warn_of_window
from cli.terminal import ProgressBars, duration, table, thousands
from jobs.ingest_settings import resolve_ingest_config
from pipeline.config import Backend, Landmarks
from pipeline.poolings import Attention, Pooling
from pipeline.types import IngestReport

_QUARANTINED_EXIT = 3
_STAGE_OF = {
    "corpus": ("id_column", "text_column", "title_column", "query_column", "metadata_columns"),
    "cluster": ("num_clusters", "surrogate"),
    "context": ("context_documents",),
    "encoder": (
        *(
            "model",
            "pooling",
            "attention",
            "window_tokens",
            "landmarks",
            "landmark_interval",
            "temperature",
            "query_temperature",
        ),
        *("whole_text_tokens", "temperature_by_length", "dims", "layers", "causal"),
        *("query_prefix", "document_prefix", "pool_prefix", "use_context", "precision", "backend"),
    ),
    "index": ("index_kind",),
}


@click.command(context_settings={"show_default": True})
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "--collection",
    required=True,
    envvar="CAIRN_COLLECTION",
    help="Name of the collection to build or update.",
)
@root_option
@click.option("--id-column", envvar="CAIRN_ID_COLUMN", help="Column with the document id.  [default: id]")
@click.option("--text-column", envvar="CAIRN_TEXT_COLUMN", help="Column with the text.  [default: text]")
@click.option(
    "--title-column",
    envvar="CAIRN_TITLE_COLUMN",
    help="Column with the title.  [default: title, where there is one]",
)
@click.option(
    "--query-column",
    envvar="CAIRN_QUERY_COLUMN",
    help="Column with a typical query, for clustering.  [default: query, if any]",
)
@click.option(
    "--metadata-columns",
    multiple=True,
    help="Columns to keep for filters; repeat.  [default: every other column]",
)
@click.option(
    "--model",
    envvar="CAIRN_MODEL",
    help="Encoder: a name, cached or embedded, or a folder.  [default: cairn-minilm]",
)
@click.option(
    "--pooling",
    type=click.Choice(get_args(Pooling)),
    help="What a chunk's vector is pooled from.  [default: mean]",
)
@click.option(
    "--attention",
    type=click.Choice(get_args(Attention)),
    help="What a token sees: its chunk, window, or chunk and landmarks.  [default: chunk]",
)
@click.option(
    "--window-tokens",
    type=int,
    help="Tokens of a window, at most, for full and landmark.  [default: 512; landmark: 8192]",
)
@click.option(
    "--landmarks",
    type=click.Choice(get_args(Landmarks)),
    help="Where chunks end: at words, or sentences.  [default: fixed]",
)
@click.option(
    "--landmark-interval", type=int, help="Tokens of a chunk between two landmarks, at most.  [default: 64]"
)
@click.option(
    "--whole-text-tokens",
    type=int,
    help="A text of at most so many tokens is one chunk.  [default: as the model says, else 0]",
)
@click.option(
    "--temperature", type=float, help="Divide attention logits by this (TempScale).  [default: 1.0]"
)
@click.option("--query-temperature", type=float, help="The same for queries alone.  [default: as documents]")
@click.option(
    "--temperature-by-length",
    type=TemperatureSteps(),
    help="The same for rows of so many tokens on: 128:0.95,512:0.9.",
)
@click.option(
    "--dims", type=int, help="Keep the first so many dimensions of every vector (Matryoshka).  [default: all]"
)
@click.option(
    "--layers", type=int, help="Run the first so many layers of the model (Matryoshka).  [default: all]"
)
@click.option(
    "--causal/--bidirectional",
    default=None,
    help="What tokens of a decoder see: the past, or all.  [default: bidirectional]",
)
@click.option(
    "--query-prefix", help="Text before every query, such as 'query: '; read, never pooled.  [default: none]"
)
@click.option(
    "--document-prefix", help="Text before every row of a document; read, never pooled.  [default: none]"
)
@click.option(
    "--pool-prefix/--no-pool-prefix",
    default=None,
    help="Take prefixes into the mean.  [default: as the model's folder says]",
)
@click.option(
    "--use-context/--no-context",
    default=None,
    help="Let the encoder read the stored context.  [default: as the model says]",
)
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16"]),
    help="Arithmetic of the encoder.  [default: auto]",
)
@click.option(
    "--backend",
    type=click.Choice(get_args(Backend)),
    help="What runs the encoder; openvino is an extra.  [default: torch]",
)
@click.option("--num-clusters", type=int, help="Clusters of the corpus.  [default: from its size]")
@click.option(
    "--surrogate",
    type=click.Choice(["static", "encoder"]),
    help="What clustering embeds with.  [default: static]",
)
@click.option("--context-documents", type=int, help="Documents in the stored context.  [default: 512]")
@click.option(
    "--index-kind",
    type=click.Choice(["auto", "flat", "ivf_sq8", "ivf_rabitq"]),
    help="FAISS index.  [default: auto, by size]",
)
@engine_options
@click.option(
    "--sync", is_flag=True, envvar="CAIRN_SYNC", help="Delete documents that the sources no longer hold."
)
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
    sync: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Index Parquet SOURCES (files, folders, globs, URIs) into a collection.

    Run it again at any time: only what is new or changed is encoded, and a killed run goes on where it
    stopped.
    """
    from jobs.build_index import build_index
    from jobs.compatibility import stored_settings
    from jobs.plan_index import plan_index

    engine = resolve_engine(given(ctx))
    config = resolve_ingest_config({**_chosen(given(ctx)), "sync": sync}, stored_settings(root, collection))
    warn_of_window(given(ctx), config.encoder)
    if dry_run:
        with ProgressBars(quiet=quiet) as progress:
            plan = plan_index(sources, root, collection, config, progress)
        click.echo(
            json.dumps(plan)
            if as_json
            else table([(key.replace("_", " "), _cell(value)) for key, value in plan.items()])
        )
        return 0
    with ProgressBars(quiet=quiet) as progress:
        report = build_index(sources, root, collection, config, progress, engine)
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(json.dumps(asdict(report), default=dict) if as_json else _summary(report))
    return _QUARANTINED_EXIT if report.quarantined else 0


def _chosen(parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    model = str(parameters.get("model", ""))
    if model and Path(model).is_dir():
        parameters["model"] = str(Path(model).resolve())  # a search may start in another folder
    return {
        stage: {FIELD_OF.get(name, name): parameters[name] for name in names if name in parameters}
        for stage, names in _STAGE_OF.items()
    }


def _cell(value: object) -> str:
    if isinstance(value, float):
        return duration(value)
    return thousands(value) if isinstance(value, int) else str(value)


def _summary(report: IngestReport) -> str:
    rows: list[tuple[str, str]] = [
        ("rows", thousands(report.rows)),
        ("  indexed", f"{thousands(report.indexed)}  ({thousands(report.encoded)} encoded in this run)"),
        ("  unchanged", thousands(report.unchanged)),
        ("  quarantined", thousands(report.quarantined)),
        *((f"    {reason}", thousands(count)) for reason, count in sorted(report.quarantine_reasons.items())),
        ("deleted", thousands(report.deleted)),
        ("chunks", thousands(report.chunks)),
        ("tokens", thousands(report.tokens)),
        ("generation", str(report.generation)),
        ("time", duration(report.seconds)),
        *((f"  {stage}", duration(seconds)) for stage, seconds in report.stage_seconds.items()),
    ]
    return table(rows)
