"""`cairn pretrain SOURCE… --output FOLDER`.

Pretrain an encoder on text: masked words over layers and widths, or RetroMAE with landmarks.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from cairn.cli.lab.train import report_rows
from cairn.cli.options import NamedPath, add_options, chosen
from cairn.cli.settings import json_option
from cairn.cli.terminal import ProgressBars, table
from cairn.pipeline.config import BASE_MODEL
from cairn.pipeline.lab.train.settings import PretrainConfig


@click.command(context_settings={"show_default": True})
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=NamedPath(path_type=Path))
@click.option(
    "--output", required=True, type=NamedPath(path_type=Path, file_okay=False), help="Folder of the run."
)
@click.option("--base", default=BASE_MODEL, help="Encoder to start from, by name or folder.")
@click.option(
    "--from-config",
    type=NamedPath(path_type=Path, dir_okay=False),
    help="Start from new weights that this config.json describes, with the base's tokenizer.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Stop after so many, at a checkpoint; the same command goes on.  [default: no limit]",
    show_default=False,
)
@add_options(PretrainConfig)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
@click.pass_context
def pretrain(
    ctx: click.Context,
    sources: tuple[Path, ...],
    output: Path,
    base: str,
    from_config: Path | None,
    *,
    minutes: float | None,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Pretrain an encoder on SOURCES: Parquet or JSON lines with text and, optionally, language.

    A killed run continues from its newest checkpoint when the same command runs again. FOLDER/model and
    FOLDER/best are for --model, and for --base of `cairn train`.
    Several processes: `torchrun --no-python cairn pretrain …`.
    """
    from cairn.pipeline.lab.train.pretrain import pretrain as run
    from cairn.pipeline.lab.train.processes import joined_processes

    config = PretrainConfig(**chosen(ctx, PretrainConfig))
    with joined_processes() as processes, ProgressBars(quiet=quiet or processes.rank > 0) as progress:
        report = run(
            sources,
            output,
            config,
            base=base,
            from_config=from_config,
            stop_after_seconds=None if minutes is None else 60 * minutes,
            processes=processes,
            progress=progress,
        )
    if processes.rank == 0:
        click.echo(
            json.dumps(asdict(report), default=dict) if as_json else table(report_rows(asdict(report)))
        )
    return 0
