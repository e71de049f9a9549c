"""`cairn train SOURCE… --output FOLDER`.

Fine-tune an encoder for landmarks and context on pairs of queries and documents.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from cairn.cli.lab.judged_sets import dev_scorer
from cairn.cli.lab.runs import minutes_option, output_option, run_limits, show, shown_options
from cairn.cli.options import COUNT, NamedPath, add_options, chosen, given
from cairn.pipeline.config import BASE_MODEL
from cairn.pipeline.lab.train.settings import QueryWriterConfig, TrainConfig

if TYPE_CHECKING:
    from cairn.pipeline.types import ModelScorer, ProgressListener


@click.command(context_settings={"show_default": True})
@click.argument("sources", nargs=-1, metavar="[SOURCE...]", type=NamedPath(path_type=Path))
@click.option(
    "--documents",
    multiple=True,
    type=NamedPath(path_type=Path),
    help="Parquet of long documents to make pairs of; repeat.",
)
@output_option()
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
@minutes_option
@add_options(TrainConfig, QueryWriterConfig)
@shown_options
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

    config = TrainConfig(**chosen(ctx, TrainConfig))
    with run_limits(minutes, quiet=quiet) as limits:
        scorer = _scorer(dev, dev_queries, dev_documents, config, given(ctx), limits["progress"])
        report = run(
            sources,
            output,
            config,
            base=base,
            documents=documents,
            query_writer=QueryWriterConfig(**chosen(ctx, QueryWriterConfig)),
            judged=(*judged, *dev),
            scorer=scorer,
            **limits,
        )
    if limits["processes"].rank:
        return 0
    if report.best_score is None:
        click.echo(
            "no pairs were held out, so no step was scored and there is no FOLDER/best; use FOLDER/model, "
            "give more pairs or name sets with --dev",
            err=True,
        )
    elif not report.best_step:
        click.echo(
            "no step scored above the base, so FOLDER/best is the base; give more pairs, or lower --peak-lr",
            err=True,
        )
    show(report, as_json=as_json)
    return 0


def _scorer(
    folders: Sequence[Path],
    max_queries: int,
    max_documents: int,
    config: TrainConfig,
    set_options: Collection[str],
    progress: ProgressListener,
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
