"""What `cairn train-mixer` and `cairn train-late` share: pairs, output, and the base that stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast, get_args

import click
from cairn.cli.options import NamedPath
from cairn.cli.terminal import duration, thousands
from cairn.pipeline.config import BASE_MODEL, Backend, Precision

_Function = TypeVar("_Function", bound=Callable[..., Any])


class FrozenBase(TypedDict):
    """The base of a training that leaves it as it is, and the data kept out of it."""

    base: str
    backend: Backend
    precision: Precision
    judged: tuple[Path, ...]
    cache: Path | None


def frozen_base_options(*, trained: str, output: str, kept: str) -> Callable[[_Function], _Function]:
    """Add PAIRS, ``--output`` and the options of :class:`FrozenBase`.

    ``trained``, ``output`` and ``kept`` name what is trained, what the folder holds and what the cache keeps.
    """
    path, folder = NamedPath(path_type=Path), NamedPath(path_type=Path, file_okay=False)
    made = (
        click.argument("files", nargs=-1, required=True, metavar="PAIRS...", type=path),
        click.option("--output", required=True, type=folder, help=f"Folder of the {output}, new or empty."),
        click.option("--base", default=BASE_MODEL, help=f"Model the {trained} is for, by name or folder."),
        click.option(
            "--backend", type=click.Choice(get_args(Backend)), default="torch", help="What embeds the texts."
        ),
        click.option(
            "--precision",
            type=click.Choice(get_args(Precision)),
            default="auto",
            help="Arithmetic they are embedded in.",
        ),
        click.option(
            "--judged",
            "--exclude",
            "judged",
            multiple=True,
            type=path,
            help="Set to keep out of the data; repeat.",
        ),
        click.option("--cache", type=folder, help=f"Folder that keeps {kept} between runs."),
    )

    def add(function: _Function) -> _Function:
        for decorate in reversed(made):
            function = decorate(function)
        return function

    return add


def frozen_base(ctx: click.Context) -> FrozenBase:
    """Return what the command line says of the base."""
    return cast("FrozenBase", {name: ctx.params[name] for name in FrozenBase.__annotations__})


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
