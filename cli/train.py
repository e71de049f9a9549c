"""`cairn train SOURCE… --output FOLDER`.

Fine-tune an encoder for landmarks and context on pairs of queries and documents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.settings import given, json_option
from cli.terminal import ProgressBars, duration, table, thousands
from pipeline.config import BASE_MODEL

if TYPE_CHECKING:
    from pipeline.train.settings import TrainConfig
    from pipeline.types import ModelScorer

_NOT_SETTINGS = (
    "sources",
    "documents",
    "output",
    "base",
    "judged",
    "dev",
    "dev_queries",
    "dev_documents",
    "quiet",
    "as_json",
)


class Numbers(click.ParamType):
    """``32,64,128`` or, in ``cairn.toml``, ``[32, 64, 128]``."""

    name = "number,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers; their limits are the configuration's business."""
        try:
            return tuple(int(part) for part in (value.split(",") if isinstance(value, str) else value))
        except (TypeError, ValueError):
            self.fail(
                f"{value!r} must be whole numbers with commas between them, as in 32,64,128", param, ctx
            )


@click.command(context_settings={"show_default": True})
@click.argument("sources", nargs=-1, metavar="[SOURCE...]", type=click.Path(path_type=Path))
@click.option(
    "--documents",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Parquet of long documents to make pairs of; repeat.",
)
@click.option(
    "--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder of the run."
)
@click.option("--base", default=BASE_MODEL, help="Model to start from: a BERT-like one, by name or folder.")
@click.option(
    "--judged",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Evaluation set to keep out of the data; repeat.",
)
@click.option(
    "--dev",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Judged set that says which step is the best; repeat.",
)
@click.option("--dev-every", type=int, help="Steps between its scores.  [default: 500]")
@click.option(
    "--dev-queries",
    type=click.IntRange(min=1),
    default=300,
    help="Draw at most so many queries of each dev set.",
)
@click.option(
    "--dev-documents",
    type=click.IntRange(min=1),
    default=2000,
    help="Draw at most so many documents, judged ones first.",
)
@click.option("--steps", type=int, required=True, help="Optimiser steps, one a batch.")
@click.option("--batch-pairs", type=int, help="Pairs of a batch.  [default: 64]")
@click.option(
    "--sequence-documents", type=int, help="Neighbouring documents that make one sequence.  [default: 4]"
)
@click.option(
    "--pooling",
    type=click.Choice(["mean", "lmk"]),
    help="What a chunk's vector is pooled from.  [default: lmk]",
)
@click.option(
    "--attention", type=click.Choice(["chunk", "landmark"]), help="What a token sees.  [default: landmark]"
)
@click.option("--max-query-tokens", type=int, help="Tokens of a query that are read.  [default: 64]")
@click.option("--max-document-tokens", type=int, help="Tokens of a document that are read.  [default: 256]")
@click.option(
    "--context-documents",
    type=int,
    help="Documents of the batch that are its context; 0: none.  [default: 64]",
)
@click.option(
    "--max-context-tokens", type=int, help="Tokens of a context document that are read.  [default: 64]"
)
@click.option("--context-absence", type=float, help="Share of steps without a context.  [default: 0.25]")
@click.option(
    "--context-dropout",
    type=float,
    help="Share of context vectors that give way to the null token.  [default: 0.005]",
)
@click.option(
    "--title-share", type=float, help="Share of sequences that begin with their title.  [default: 0.5]"
)
@click.option(
    "--hard-negatives",
    type=int,
    help="Mined negatives a query, below a share of the positive's score.  [default: 0]",
)
@click.option(
    "--hard-negative-share", type=float, help="That share of the positive's score.  [default: 0.95]"
)
@click.option(
    "--surrogate",
    type=click.Choice(["static", "encoder"]),
    help="What clusters, filters and mines.  [default: static]",
)
@click.option(
    "--tour",
    type=click.Choice(["random", "greedy"]),
    help="How clusters are packed into batches.  [default: greedy]",
)
@click.option("--temperature", type=float, help="Temperature of the loss.  [default: 0.02]")
@click.option(
    "--margin",
    type=float,
    help="Leave out what the surrogate scores this far above the positive; inf: nothing.  [default: 0]",
)
@click.option(
    "--matryoshka-dims",
    type=Numbers(),
    help="Widths that must retrieve by themselves, as 64,128,384.  [default: all dims]",
)
@click.option(
    "--matryoshka-layers",
    type=Numbers(),
    help="Depths that must, ending with the last, as 3,6.  [default: the last]",
)
@click.option(
    "--distillation-weight",
    type=float,
    help="Pull towards the base model's own chunk vectors; 0: none.  [default: 0.5]",
)
@click.option(
    "--distillation-temperature",
    type=float,
    help="Temperature of its ranking of the other chunks.  [default: 0.05]",
)
@click.option("--peak-lr", type=float, help="Learning rate after the warm-up.  [default: 2e-05]")
@click.option("--gate-lr", type=float, help="The same for gates.  [default: 0.01]")
@click.option(
    "--warmup-share",
    type=float,
    help="Share of the steps that warm up; the rest decays to 0.  [default: 0.1]",
)
@click.option("--weight-decay", type=float, help="Decay of matrices.  [default: 0.01]")
@click.option("--max-gradient-norm", type=float, help="Longer gradients are cut to it.  [default: 1]")
@click.option(
    "--initial-gate", type=float, help="Where gates start that the base does not have.  [default: -1]"
)
@click.option(
    "--freeze-embeddings", is_flag=True, help="Train the layers alone; what changed is then 21 MB in bf16."
)
@click.option(
    "--lora-rank",
    type=int,
    help="Learn updates of this rank (LoRA) and leave the base as it is; 0: train it whole.  [default: 0]",
)
@click.option(
    "--lora-alpha",
    type=float,
    help="What updates are multiplied with, over the rank.  [default: twice the rank]",
)
@click.option(
    "--lora-matrices",
    type=click.Choice(["attention", "all"]),
    help="Matrices of a layer that get one.  [default: all]",
)
@click.option("--heldout-pairs", type=int, help="Pairs kept out to find the best step.  [default: 256]")
@click.option("--evaluate-every", type=int, help="Steps between their scores.  [default: 50]")
@click.option("--checkpoint-every", type=int, help="Steps between checkpoints.  [default: 50]")
@click.option(
    "--micro-batch-tokens", type=int, help="Tokens computed at a time: bounds memory.  [default: 16384]"
)
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16"]),
    help="Arithmetic of products.  [default: auto]",
)
@click.option("--seed", type=int, help="Seed of everything drawn.  [default: 0]")
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
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Fine-tune an encoder on SOURCES (Parquet or JSON lines with query, document, title, source), or on --documents (text, title, source).

    A killed run goes on from its newest checkpoint when the same command is given again. FOLDER/model and
    FOLDER/best are for --model. Dev sets (folders as of `cairn evaluate`) are kept out of the data, too.
    Several processes: `torchrun --no-python cairn train …`.
    """
    from pipeline.train.joined_processes import joined_processes
    from pipeline.train.loop import train as run
    from pipeline.train.settings import TrainConfig

    chosen = given(ctx)
    config = TrainConfig(**{name: value for name, value in chosen.items() if name not in _NOT_SETTINGS})
    with joined_processes() as processes, ProgressBars(quiet=quiet or processes.rank > 0) as progress:
        scorer = _scorer(dev, dev_queries, dev_documents, config, chosen, progress)
        report = run(
            sources,
            output,
            config,
            base=base,
            documents=documents,
            judged=(*judged, *dev),
            scorer=scorer,
            processes=processes,
            progress=progress,
        )
    if processes.rank == 0:
        click.echo(json.dumps(asdict(report), default=dict) if as_json else table(_rows(asdict(report))))
    return 0


def _scorer(
    folders: Sequence[Path],
    max_queries: int,
    max_documents: int,
    config: TrainConfig,
    chosen: Mapping[str, Any],
    progress: ProgressBars,
) -> ModelScorer | None:
    """Return what scores models on the dev sets, None without any."""
    from pipeline.errors import ConfigError

    if not folders:
        for name in ("dev_every", "dev_queries", "dev_documents"):
            if name in chosen:
                raise ConfigError(f"{name} must go with dev sets, got none; name them with --dev")
        return None
    from pipeline.evaluate.dev_scores import DevScorer
    from pipeline.evaluate.retrieval_set import read_retrieval_set, sample_set

    sets = [
        sample_set(
            read_retrieval_set(folder), max_queries=max_queries, max_documents=max_documents, seed=config.seed
        )
        for folder in folders
    ]
    for judged in sets:
        if judged.skipped:
            counted = ", ".join(f"{count} {reason}" for reason, count in judged.skipped.items())
            click.echo(f"warning: left out of {judged.name}: {counted}", err=True)
    return DevScorer(sets, precision=config.precision, progress=progress)


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in report.items():
        if name == "skipped":
            rows += [(f"  skipped: {reason}", thousands(count)) for reason, count in sorted(value.items())]
        elif name == "seconds":
            rows.append(("time", duration(value)))
        else:
            rows.append((name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value)))
    return rows
