"""`cairn train-late PAIRS… --output FOLDER`: train the token projection of a model that stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from cairn.cli.lab.runs import frozen_base, frozen_base_options, show, shown_options
from cairn.cli.options import add_options, chosen
from cairn.cli.terminal import ProgressBars
from cairn.pipeline.lab.train.settings import LateConfig


@click.command(context_settings={"show_default": True})
@frozen_base_options(trained="projection", output="projection", kept="token states")
@add_options(LateConfig)
@shown_options
@click.pass_context
def train_late(
    ctx: click.Context,
    files: tuple[Path, ...],
    output: Path,
    *,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Train a token projection on PAIRS (Parquet or JSON lines with query, document, title, source).

    Every text is embedded once; with --cache another run begins with the training. FOLDER gets
    cairn_late.safetensors, and its log stands beside it as FOLDER.jsonl.
    """
    from cairn.pipeline.lab.train.late import train_late as run

    config = LateConfig(**chosen(ctx, LateConfig))
    with ProgressBars(quiet=quiet) as progress:
        report = run(files, output, config, progress=progress, **frozen_base(ctx))
    if report.best_score is None:
        click.echo("nothing was held out, so the last step was kept; raise --hold-out", err=True)
    elif not report.best_step:
        click.echo("no step scored above the start, which was kept; give more pairs", err=True)
    show(report, as_json=as_json)
    return 0
