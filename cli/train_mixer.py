"""`cairn train-mixer PAIRS… --output FOLDER`: train the landmark mixer of a model that stays as it is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import click

from cli.options import add_options, chosen
from cli.settings import json_option
from cli.terminal import ProgressBars, duration, table, thousands
from pipeline.config import BASE_MODEL, Backend, Precision
from pipeline.train.mixer.settings import MixerConfig


@click.command(context_settings={"show_default": True})
@click.argument("files", nargs=-1, required=True, metavar="PAIRS...", type=click.Path(path_type=Path))
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the model, new or empty.",
)
@click.option("--base", default=BASE_MODEL, help="Model the mixer is for, by name or folder.")
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
    help="Folder that keeps vectors between runs.",
)
@click.option(
    "--whole-text-tokens",
    type=int,
    default=0,
    help="Texts of at most so many tokens the model will keep whole.",
)
@add_options(MixerConfig)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
@click.pass_context
def train_mixer(
    ctx: click.Context,
    files: tuple[Path, ...],
    output: Path,
    base: str,
    backend: Backend,
    precision: Precision,
    judged: tuple[Path, ...],
    cache: Path | None,
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
    from pipeline.train.mixer.trainer import train_mixer as run

    config = MixerConfig(**chosen(ctx, MixerConfig))
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
            whole_text_tokens=whole_text_tokens,
            progress=progress,
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
    click.echo(json.dumps(asdict(report), default=dict) if as_json else table(report_rows(asdict(report))))
    return 0


def report_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what a training on frozen vectors did, a row a figure."""
    rows: list[tuple[str, str]] = []
    for name, value in report.items():
        if name == "skipped":
            rows += [(f"  skipped: {reason}", thousands(count)) for reason, count in sorted(value.items())]
        elif name == "cut_scores":
            rows += [(f"  of the first {dim} dimensions", f"{score:.4f}") for dim, score in value.items()]
        elif name.endswith("_seconds"):
            rows.append((f"time to {name.removesuffix('_seconds')}", duration(value)))
        else:
            rows.append((name.replace("_", " "), "nothing held out" if value is None else _words(value)))
    return rows


def _words(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
