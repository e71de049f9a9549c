"""`cairn compress MODEL --texts FILES --output FOLDER`: take layers out of a model and round its weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from cairn.cli.options import COUNT, NamedPath, add_options, chosen
from cairn.cli.settings import json_option
from cairn.cli.terminal import ProgressBars, echo, table, thousands, warn
from cairn.pipeline.lab.compress.settings import CompressConfig

if TYPE_CHECKING:
    from cairn.pipeline.lab.compress.compression import MeasuredModel


@click.command(context_settings={"show_default": True})
@click.argument("model")
@click.option(
    "--texts",
    multiple=True,
    required=True,
    type=NamedPath(path_type=Path),
    help="Table with text, like what will be encoded; repeat.",
)
@click.option(
    "--output",
    required=True,
    type=NamedPath(path_type=Path, file_okay=False),
    help="Folder of the smaller model, new or empty.",
)
@add_options(CompressConfig)
@click.option(
    "--judged",
    multiple=True,
    type=NamedPath(path_type=Path),
    help="Judged set to score each step on; repeat.",
)
@click.option("--judged-queries", type=COUNT, default=300, help="Draw at most so many queries of each.")
@click.option("--judged-documents", type=COUNT, default=2000, help="Draw at most so many documents of each.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
@click.pass_context
def compress(
    ctx: click.Context,
    model: str,
    texts: tuple[Path, ...],
    output: Path,
    judged: tuple[Path, ...],
    *,
    judged_queries: int,
    judged_documents: int,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """Write a smaller MODEL (a name or a folder), and show its size and scores after each step.

    The texts say what matters least: nothing is trained, and no labels are needed. FOLDER is a model for
    `ingest --model`.
    """
    from cairn.pipeline.lab.compress.compression import compress as run
    from cairn.pipeline.lab.evaluate.dev_scores import DevScorer

    config = CompressConfig(**chosen(ctx, CompressConfig))
    with ProgressBars(quiet=quiet) as progress:
        scorer = None
        if judged:
            scorer = DevScorer.of(
                judged,
                max_queries=judged_queries,
                max_documents=judged_documents,
                seed=0,
                warn=warn,
                progress=progress,
            )
        report = run(model, texts, output, config, scorer=scorer, progress=progress)
    echo(json.dumps(asdict(report), default=dict) if as_json else table(_rows(report.steps)))


def _rows(steps: tuple[MeasuredModel, ...]) -> list[tuple[str, ...]]:
    """Return a heading and a row a step: sizes in MB, a column for each score."""
    names = list(steps[0].scores)
    rows: list[tuple[str, ...]] = [("step", "layers", "parameters", "disk MB", "matrices MB", *names)]
    rows += [
        (
            each.step,
            str(each.layers),
            thousands(each.parameters),
            f"{each.disk_bytes / 1e6:.1f}",
            f"{each.matrix_bytes / 1e6:.2f}",
            *(f"{each.scores[name]:.4f}" for name in names),
        )
        for each in steps
    ]
    return rows
