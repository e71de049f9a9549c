"""`cairn negatives NAME --pairs …`: hard negatives of a collection, for `cairn train`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from cairn.cli.options import NamedPath, add_options, chosen
from cairn.cli.settings import collection_argument, json_option
from cairn.cli.terminal import ProgressBars, thousands
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.options import options_of

_RULE: Final = ("hard_negatives", "hard_negative_share", "hard_negative_margin")
_NUM_NEGATIVES: Final = 7


@click.command(context_settings={"show_default": True})
@collection_argument
@click.option(
    "--pairs",
    multiple=True,
    required=True,
    type=NamedPath(path_type=Path),
    help="Training pairs, Parquet or JSON lines; repeat.",
)
@click.option(
    "--output",
    required=True,
    type=NamedPath(path_type=Path, dir_okay=False),
    help="Parquet file to write: the pairs with their negatives.",
)
@add_options(
    TrainConfig,
    but=[name for name in options_of(TrainConfig) if name not in _RULE],
    defaults={"hard_negatives": _NUM_NEGATIVES},
)
@click.option(
    "--candidates",
    type=click.IntRange(1, 200),
    default=200,
    help="Documents of each answer that are looked at.",
)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
@click.pass_context
def negatives(
    ctx: click.Context,
    *,
    collection: str,
    root: str,
    pairs: tuple[Path, ...],
    output: Path,
    candidates: int,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Add to training pairs the passages of collection NAME that it confuses with their documents.

    They score below --hard-negative-share of the pair's own document, and stand in no document that holds it.
    """
    from cairn.pipeline.collection import open_collection
    from cairn.pipeline.lab.train.index_negatives import write_negatives
    from cairn.pipeline.lab.train.pairs import read_pairs

    rule = {name: options_of(TrainConfig)[name].default for name in _RULE}
    rule |= {"hard_negatives": _NUM_NEGATIVES, **chosen(ctx, TrainConfig)}
    with ProgressBars(quiet=quiet) as progress:
        report = write_negatives(
            open_collection(collection, root=root),
            read_pairs(pairs),
            output,
            num_negatives=rule["hard_negatives"],
            max_share=rule["hard_negative_share"],
            margin=rule["hard_negative_margin"],
            num_candidates=candidates,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(asdict(report)))
    else:
        click.echo(
            f"{output}: {thousands(report.pairs)} pairs with {thousands(report.negatives)} negatives; "
            f"{thousands(report.pairs_with_own)} kept their own, {thousands(report.pairs_without)} have none"
        )
    return 0
