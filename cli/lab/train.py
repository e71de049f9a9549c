"""`cairn train SOURCE… --output FOLDER`.

Fine-tune an encoder for landmarks and context on pairs of queries and documents.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from cairn.cli.lab.judged_sets import dev_scorer
from cairn.cli.options import COUNT, NamedPath, add_options, chosen, given
from cairn.cli.settings import json_option
from cairn.cli.terminal import ProgressBars, duration, table, thousands
from cairn.pipeline.config import BASE_MODEL
from cairn.pipeline.lab.train.settings import QueryWriterConfig, TrainConfig

if TYPE_CHECKING:
    from cairn.pipeline.types import ModelScorer


@click.command(context_settings={"show_default": True})
@click.argument("sources", nargs=-1, metavar="[SOURCE...]", type=NamedPath(path_type=Path))
@click.option(
    "--documents",
    multiple=True,
    type=NamedPath(path_type=Path),
    help="Parquet of long documents to make pairs of; repeat.",
)
@click.option(
    "--output", required=True, type=NamedPath(path_type=Path, file_okay=False), help="Folder of the run."
)
@click.option("--base", default=BASE_MODEL, help="Encoder to start from, by name or folder.")
@click.option(
    "--judged",
    multiple=True,
    type=NamedPath(path_type=Path),
    help="Evaluation set to keep out of the data; repeat.",
)
@click.option(
    "--dev",
    multiple=True,
    type=NamedPath(path_type=Path),
    help="Judged set that says which step is the best; repeat.",
)
@click.option(
    "--dev-queries",
    type=COUNT,
    default=300,
    help="Draw at most so many queries of each dev set.",
)
@click.option(
    "--dev-documents",
    type=COUNT,
    default=2000,
    help="Draw at most so many documents, judged ones first.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Stop after so many, at a checkpoint; the same command goes on.  [default: no limit]",
    show_default=False,
)
@add_options(TrainConfig, QueryWriterConfig)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
@click.pass_context
def train(
    ctx: click.Context,
    sources: tuple[Path, ...],
    output: Path,
    base: str,
    judged: tuple[Path, ...],
    *,
    documents: tuple[Path, ...],
    dev: tuple[Path, ...],
    dev_queries: int,
    dev_documents: int,
    minutes: float | None,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Fine-tune an encoder on SOURCES, or on --documents (text, title, source).

    SOURCES are Parquet or JSON lines with query, document, title and source.

    A killed run continues from its newest checkpoint when the same command runs again. Use FOLDER/model or
    FOLDER/best as --model. Dev sets (folders as of `cairn evaluate`) are kept out of the data, too.
    Several processes: `torchrun --no-python cairn train …`.
    """
    from cairn.pipeline.lab.train.contrastive import train as run
    from cairn.pipeline.lab.train.processes import joined_processes

    config = TrainConfig(**chosen(ctx, TrainConfig))
    with joined_processes() as processes, ProgressBars(quiet=quiet or processes.rank > 0) as progress:
        scorer = _scorer(dev, dev_queries, dev_documents, config, given(ctx), progress)
        report = run(
            sources,
            output,
            config,
            base=base,
            documents=documents,
            query_writer=QueryWriterConfig(**chosen(ctx, QueryWriterConfig)),
            judged=(*judged, *dev),
            scorer=scorer,
            stop_after_seconds=None if minutes is None else 60 * minutes,
            processes=processes,
            progress=progress,
        )
    if processes.rank == 0:
        if report.best_score is None:
            click.echo(
                "no pairs were held out, so no step was scored and there is no FOLDER/best; use "
                "FOLDER/model, give more pairs or name sets with --dev",
                err=True,
            )
        elif not report.best_step:
            click.echo(
                "no step scored above the base, so FOLDER/best is the base; give more pairs, or lower "
                "--peak-lr",
                err=True,
            )
        click.echo(
            json.dumps(asdict(report), default=dict) if as_json else table(report_rows(asdict(report)))
        )
    return 0


def _scorer(
    folders: Sequence[Path],
    max_queries: int,
    max_documents: int,
    config: TrainConfig,
    set_options: Collection[str],
    progress: ProgressBars,
) -> ModelScorer | None:
    """Return what scores models on the dev sets, None without any."""
    from cairn.pipeline.errors import ConfigError

    if not folders:
        for name in ("dev_every", "dev_queries", "dev_documents"):
            if name in set_options:
                raise ConfigError(f"{name} must go with dev sets, got none; name them with --dev")
        return None
    return dev_scorer(
        folders,
        max_queries=max_queries,
        max_documents=max_documents,
        seed=config.seed,
        precision=config.precision,
        progress=progress,
    )


def report_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what a run did, a row a figure."""
    rows: list[tuple[str, str]] = []
    for name, value in report.items():
        if name == "skipped":
            rows += [(f"  skipped: {reason}", thousands(count)) for reason, count in sorted(value.items())]
        elif name == "seconds":
            rows.append(("time", duration(value)))
        elif value is not None:
            rows.append((name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value)))
    return rows
