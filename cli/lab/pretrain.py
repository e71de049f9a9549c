"""`cairn pretrain SOURCE… --output FOLDER`.

Pretrain an encoder on text: masked words over layers and widths, or RetroMAE with landmarks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from cairn.cli.lab.runs import minutes_option, output_option, run_limits, show, shown_options
from cairn.cli.options import NamedPath, add_options, chosen
from cairn.pipeline.config import BASE_MODEL
from cairn.pipeline.lab.train.settings import PretrainConfig


@click.command(context_settings={"show_default": True})
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=NamedPath(path_type=Path))
@output_option()
@click.option("--base", default=BASE_MODEL, help="Encoder to start from, by name or folder.")
@click.option(
    "--from-config",
    type=NamedPath(path_type=Path, dir_okay=False),
    help="Start from new weights that this config.json describes, with the base's tokenizer.",
)
@minutes_option
@add_options(PretrainConfig)
@shown_options
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

    config = PretrainConfig(**chosen(ctx, PretrainConfig))
    with run_limits(minutes, quiet=quiet) as limits:
        report = run(sources, output, config, base=base, from_config=from_config, **limits)
    if limits["processes"].rank == 0:
        show(report, as_json=as_json)
    return 0
