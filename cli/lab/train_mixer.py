"""`cairn train-mixer PAIRS… --output FOLDER`: train the landmark mixer of a model that stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from cairn.cli.lab.runs import frozen_base, frozen_base_options, show, shown_options
from cairn.cli.options import add_options, chosen
from cairn.cli.terminal import ProgressBars
from cairn.pipeline.lab.train.settings import MixerConfig
from cairn.pipeline.options import MAX_NUMBER


@click.command(context_settings={"show_default": True})
@frozen_base_options(trained="mixer", output="model", kept="vectors")
@click.option(
    "--whole-text-tokens",
    type=click.IntRange(0, MAX_NUMBER),
    default=0,
    help="Texts of at most so many tokens the model will keep whole.",
)
@add_options(MixerConfig)
@shown_options
@click.pass_context
def train_mixer(
    ctx: click.Context,
    files: tuple[Path, ...],
    output: Path,
    whole_text_tokens: int,
    *,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Train a landmark mixer on PAIRS (Parquet or JSON lines with query, document, title, source).

    Every text is embedded once; with --cache another run begins with the training. FOLDER is for --model, and
    its log stands beside it as FOLDER.jsonl.
    """
    from cairn.pipeline.lab.train.mixer import train_mixer as run

    config = MixerConfig(**chosen(ctx, MixerConfig))
    with ProgressBars(quiet=quiet) as progress:
        report = run(
            files,
            output,
            config,
            whole_text_tokens=whole_text_tokens,
            progress=progress,
            **frozen_base(ctx),
        )
    if report.base_score is None:
        click.echo(
            "nothing was held out, so the last step was kept, good or bad; give more pairs, or raise "
            "--hold-out",
            err=True,
        )
    elif not report.best_step:
        click.echo(
            "no step scored above the base model, so the mixer mixes nothing; give more pairs, or lower "
            "--peak-lr",
            err=True,
        )
    show(report, as_json=as_json)
    return 0
