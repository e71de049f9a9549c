"""What the verbs that train share: sources and output, how they run, and what they print at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast, get_args

import click
from cairn.cli.options import NamedPath
from cairn.cli.settings import json_option
from cairn.cli.terminal import ProgressBars, duration, table, thousands
from cairn.pipeline.config import BASE_MODEL, Backend, Precision

if TYPE_CHECKING:
    from cairn.pipeline.lab.train.processes import Processes
    from cairn.pipeline.types import ProgressListener

_Function = TypeVar("_Function", bound=Callable[..., Any])
_PATH, _FOLDER = NamedPath(path_type=Path), NamedPath(path_type=Path, file_okay=False)


class Limits(TypedDict):
    """How a run goes: when it stops, who computes it, who hears of it."""

    stop_after_seconds: float | None
    processes: Processes
    progress: ProgressListener


class FrozenBase(TypedDict):
    """The base of a training that leaves it as it is, and the data kept out of it."""

    base: str
    backend: Backend
    precision: Precision
    judged: tuple[Path, ...]
    cache: Path | None


def output_option(of: str = "run") -> Callable[[_Function], _Function]:
    """Add ``--output``."""
    return click.option("--output", required=True, type=_FOLDER, help=f"Folder of the {of}.")


minutes_option = click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Stop after so many, at a checkpoint; the same command goes on.  [default: no limit]",
    show_default=False,
)


def shown_options(function: _Function) -> _Function:
    """Add ``--quiet`` and ``--json``."""
    return click.option("--quiet", is_flag=True, help="No progress on stderr.")(json_option(function))


def frozen_base_options(*, trained: str, output: str, kept: str) -> Callable[[_Function], _Function]:
    """Add PAIRS, ``--output`` and the options of :class:`FrozenBase`.

    ``trained``, ``output`` and ``kept`` name what is trained, what the folder holds and what the cache keeps.
    """
    embeds, arithmetic = click.Choice(get_args(Backend)), click.Choice(get_args(Precision))
    judged = ("--judged", "--exclude", "judged")
    made = (
        click.argument("files", nargs=-1, required=True, metavar="PAIRS...", type=_PATH),
        output_option(f"{output}, new or empty"),
        click.option("--base", default=BASE_MODEL, help=f"Model the {trained} is for, by name or folder."),
        click.option("--backend", type=embeds, default="torch", help="What embeds the texts."),
        click.option("--precision", type=arithmetic, default="auto", help="Arithmetic they are embedded in."),
        click.option(*judged, multiple=True, type=_PATH, help="Set to keep out of the data; repeat."),
        click.option("--cache", type=_FOLDER, help=f"Folder that keeps {kept} between runs."),
    )

    def add(function: _Function) -> _Function:
        for decorate in reversed(made):
            function = decorate(function)
        return function

    return add


def frozen_base(ctx: click.Context) -> FrozenBase:
    """Return what the command line says of the base."""
    return cast("FrozenBase", {name: ctx.params[name] for name in FrozenBase.__annotations__})


@contextmanager
def run_limits(minutes: float | None, *, quiet: bool) -> Generator[Limits]:
    """Join the processes that ``torchrun`` started; the first of them shows progress."""
    from cairn.pipeline.lab.train.processes import joined_processes

    with joined_processes() as processes, ProgressBars(quiet=quiet or processes.rank > 0) as progress:
        seconds = None if minutes is None else 60 * minutes
        yield Limits(stop_after_seconds=seconds, processes=processes, progress=progress)


def show(report: Any, *, as_json: bool) -> None:
    """Print what a run did."""
    said = asdict(report)
    click.echo(json.dumps(said, default=dict) if as_json else table(_rows(said)))


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in report.items():
        if name == "skipped":
            rows += [(f"  skipped: {reason}", thousands(count)) for reason, count in sorted(value.items())]
        elif name == "cut_scores":
            rows += [(f"  of the first {dim} dimensions", f"{score:.4f}") for dim, score in value.items()]
        elif name == "seconds":
            rows.append(("time", duration(value)))
        elif name.endswith("_seconds"):
            rows.append((f"time to {name.removesuffix('_seconds')}", duration(value)))
        elif value is not None:
            rows.append((name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value)))
    return rows
