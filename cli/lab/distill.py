"""`cairn distill TEACHER STUDENT --texts FILES --output FOLDER`: follow a teacher on plain texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from cairn.cli.lab.runs import minutes_option, output_option, run_limits, show, shown_options
from cairn.cli.options import NamedPath, add_options, chosen
from cairn.pipeline.lab.train.settings import DistillConfig


@click.command(context_settings={"show_default": True})
@click.argument("teacher")
@click.argument("student")
@click.option(
    "--texts",
    multiple=True,
    required=True,
    type=NamedPath(path_type=Path),
    help="Parquet or JSON lines with text; repeat.",
)
@output_option()
@minutes_option
@add_options(DistillConfig)
@shown_options
@click.pass_context
def distill(
    ctx: click.Context,
    teacher: str,
    student: str,
    texts: tuple[Path, ...],
    output: Path,
    *,
    minutes: float | None,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Train STUDENT to follow TEACHER, both a name or a folder, without queries and labels.

    Of a teacher with the same tokenizer and width, hidden states are followed as well as vectors, so that a
    model gets back what `cairn compress` took. A killed run continues from its newest checkpoint when the
    same command runs again. Use FOLDER/best or FOLDER/model as --model.
    """
    from cairn.pipeline.lab.train.distill import distill as run

    config = DistillConfig(**chosen(ctx, DistillConfig))
    with run_limits(minutes, quiet=quiet) as limits:
        report = run(teacher, student, texts, output, config, **limits)
    if limits["processes"].rank == 0:
        show(report, as_json=as_json)
    return 0
