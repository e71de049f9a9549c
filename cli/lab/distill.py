"""`cairn distill TEACHER STUDENT --texts FILES --output FOLDER`: follow a teacher on plain texts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from cairn.cli.options import NamedPath, add_options, chosen
from cairn.cli.settings import json_option
from cairn.cli.terminal import ProgressBars, duration, table
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
@click.option(
    "--output", required=True, type=NamedPath(path_type=Path, file_okay=False), help="Folder of the run."
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Stop after so many, at a checkpoint; the same command goes on.  [default: no limit]",
    show_default=False,
)
@add_options(DistillConfig)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
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
    from cairn.pipeline.lab.train.processes import joined_processes

    config = DistillConfig(**chosen(ctx, DistillConfig))
    with joined_processes() as processes, ProgressBars(quiet=quiet or processes.rank > 0) as progress:
        report = run(
            teacher,
            student,
            texts,
            output,
            config,
            stop_after_seconds=None if minutes is None else 60 * minutes,
            processes=processes,
            progress=progress,
        )
    if processes.rank == 0:
        found = asdict(report)
        rows = [
            (name.replace("_", " "), duration(value) if name == "seconds" else _words(value))
            for name, value in found.items()
            if value is not None
        ]
        click.echo(json.dumps(found) if as_json else table(rows))
    return 0


def _words(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
