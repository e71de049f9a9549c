"""Flags that choose where shards are encoded, in this process or on a Ray cluster, and where jobs go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, get_args

import click
from cairn.cli.options import HeadedOption, add_options
from cairn.jobs.engine_settings import EngineConfig, EngineName
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.options import options_of, shown
from typing_extensions import override

_HEADING = "Ray"
_Function = TypeVar("_Function", bound=Callable[..., Any])


class WorkerRange(click.ParamType):
    """``8``, or ``2:8``: at least and at most so many."""

    name = "n|min:max"

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Return both numbers; a single one is both."""
        least, _, most = str(value).partition(":")
        try:
            return int(least), int(most or least)
        except ValueError:
            raise ConfigError(f"workers must be a number, or two as in 2:8, got {shown(value)}") from None


def job_server_option(function: _Function) -> _Function:
    """Add ``--address`` of a cluster's jobs."""
    return click.option(
        "--address",
        envvar="RAY_API_SERVER_ADDRESS",
        default="http://127.0.0.1:8265",
        help="Dashboard of the Ray cluster, for its jobs.",
    )(function)


def engine_options(function: _Function, but: Collection[str] = ()) -> _Function:
    """Add the flags of an engine, without the fields named in ``but``."""
    for option in (
        add_options(EngineConfig, but=but, heading=_HEADING),
        click.option(
            "--workers",
            cls=HeadedOption,
            heading=_HEADING,
            type=WorkerRange(),
            help="Workers on it, N or MIN:MAX.  [default: as many as it has room for]",
        ),
        click.option(
            "--engine",
            cls=HeadedOption,
            heading=_HEADING,
            type=click.Choice(get_args(EngineName)),
            help="Who does the work.  [default: ray with an address, else local]",
        ),
    ):
        function = option(function)
    return function


def resolve_engine(chosen: Mapping[str, Any]) -> EngineConfig:
    """Return the engine that flags, environment and ``cairn.toml`` ask for.

    ``chosen`` holds the options that were set.
    """
    name = chosen.get("engine") or ("ray" if chosen.get("address") else "local")
    fields = {option: chosen[option] for option in options_of(EngineConfig) if option in chosen}
    if "workers" in chosen:
        fields["min_workers"], fields["max_workers"] = chosen["workers"]
    engine = EngineConfig(name=name, **fields)
    if name == "local" and set(fields) - {"address"}:
        click.echo(
            "warning: engine local works in this process and has no workers; flags about them move nothing",
            err=True,
        )
    return engine
