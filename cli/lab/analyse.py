"""`cairn analyse MODEL --texts DATA`: Length Collapse and landmark pooling, on a model's own weights."""

from __future__ import annotations

import json
from pathlib import Path

import click
from cairn.cli.lab.analysis_tables import analysis_lines
from cairn.cli.options import COUNT, SEED, NamedPath
from cairn.cli.settings import json_option
from cairn.cli.terminal import ProgressBars
from cairn.pipeline.options import MAX_NUMBER


@click.command(context_settings={"show_default": True})
@click.argument("model", metavar="MODEL")
@click.option(
    "--texts",
    required=True,
    type=NamedPath(path_type=Path),
    help="File, or folder of some, as `ingest` reads; of a judged folder its corpus.",
)
@click.option("--text-column", default="text", help="Column with the text.")
@click.option(
    "--temperature",
    "temperatures",
    multiple=True,
    type=float,
    help="A temperature to compare; repeat.  [default: 1, 0.9 and 0.8]",
)
@click.option("--layers", type=COUNT, help="Run the first so many layers of the model.  [default: all]")
@click.option(
    "--max-tokens",
    type=click.IntRange(2, MAX_NUMBER),
    default=512,
    help="Longest piece of text; time grows with its cube.",
)
@click.option("--chunk-tokens", type=COUNT, default=32, help="Tokens between two landmarks.")
@click.option("--seed", type=SEED, default=0, help="Of the texts drawn.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@json_option
def analyse(
    *,
    model: str,
    texts: Path,
    text_column: str,
    temperatures: tuple[float, ...],
    layers: int | None,
    max_tokens: int,
    chunk_tokens: int,
    seed: int,
    quiet: bool,
    as_json: bool,
) -> int:
    """Measure how MODEL's attention treats texts of growing length, and what its landmarks hold.

    MODEL is a name or a folder. It runs in fp32, without prefixes or a context.
    """
    from cairn.pipeline.lab.analysis.length_collapse import TEMPERATURES
    from cairn.pipeline.lab.analysis.report import analyse_model, read_texts
    from cairn.pipeline.model.folders.model_defaults import encoder_config

    config = encoder_config({"model": model, **({"layers": layers} if layers else {})})
    with ProgressBars(quiet=quiet) as progress:
        analysis = analyse_model(
            config,
            read_texts(texts, text_column),
            temperatures=tuple(dict.fromkeys(temperatures)) or TEMPERATURES,
            max_tokens=max_tokens,
            chunk_tokens=chunk_tokens,
            seed=seed,
            progress=progress,
        )
    click.echo(json.dumps(analysis.to_dict()) if as_json else "\n".join(analysis_lines(analysis)))
    return 0
