"""`cairn sample FOLDER`: a real corpus for the first five minutes, made from Python's own documentation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import click

from cli.settings import json_option
from cli.terminal import ProgressBars, table, thousands


@click.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("cairn-sample"))
@click.option("--max-documents", type=click.IntRange(min=1), help="Write at most this many documents.  [default: all]")
@json_option
def sample(*, folder: Path, max_documents: int | None, as_json: bool) -> int:
    """Write a Parquet corpus into FOLDER: docstrings, help topics and descriptions of what is installed here."""
    from pipeline.corpus.sample import write_sample

    with ProgressBars() as progress:
        report = write_sample(folder, max_documents=max_documents, progress=progress)
    values = asdict(report)
    click.echo(
        json.dumps(values, default=str) if as_json else table((key.replace("_", " "), _cell(value)) for key, value in values.items())
    )
    return 0


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return thousands(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {thousands(number)}" for key, number in cast("Mapping[str, int]", value).items())
    return ", ".join(map(str, cast("tuple[object, ...]", value))) or "none" if isinstance(value, tuple) else str(value)
