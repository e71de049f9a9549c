"""`cairn train-late PAIRS… --output FOLDER`: train the token projection of a model that stays as it is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import click

from cli.options import add_options, chosen
from cli.settings import json_option
from cli.terminal import ProgressBars, table
from cli.train_mixer import report_rows
from pipeline.config import BASE_MODEL, Backend, Precision
from pipeline.train.late.settings import LateConfig


@click.command(context_settings={"show_default": True})
@click.argument("files", nargs=-1, required=True, metavar="PAIRS...", type=click.Path(path_type=Path))
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the projection, new or empty.",
)
@click.option("--base", default=BASE_MODEL, help="Model the projection is for, by name or folder.")
@click.option(
    "--backend", type=click.Choice(get_args(Backend)), default="torch", help="What embeds the texts."
)
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    default="auto",
    help="Arithmetic they are embedded in.",
)
@click.option(
    "--judged",
    "--exclude",
    "judged",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Set to keep out of the data; repeat.",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder that keeps token states between runs.",
)
@add_options(LateConfig)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
@click.pass_context
def train_late(
    ctx: click.Context,
    files: tuple[Path, ...],
    output: Path,
    base: str,
    backend: Backend,
    precision: Precision,
    judged: tuple[Path, ...],
    cache: Path | None,
    *,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Train a token projection on PAIRS (Parquet or JSON lines with query, document, title, source).

    Every text is embedded once; with --cache another run begins with the training. FOLDER gets
    cairn_late.safetensors, and its log stands beside it as FOLDER.jsonl.
    """
    from pipeline.train.late.trainer import train_late as run

    config = LateConfig(**chosen(ctx, LateConfig))
    with ProgressBars(quiet=quiet) as progress:
        report = run(
            files,
            output,
            config,
            base=base,
            backend=backend,
            precision=precision,
            judged=judged,
            cache=cache,
            progress=progress,
        )
    if report.best_score is None:
        click.echo("nothing was held out, so the last step was kept; raise --hold-out", err=True)
    click.echo(json.dumps(asdict(report), default=dict) if as_json else table(report_rows(asdict(report))))
    return 0
