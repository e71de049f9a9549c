"""Flags that choose where shards are encoded, in this process or on a Ray cluster, and where jobs go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, get_args

import click
from cairn.cli.options import HeadedOption, add_options
from cairn.jobs.engine_settings import EngineConfig, EngineName, engine_of, worker_range
from cairn.pipeline.options import options_of

_HEADING = "Ray"
_Function = TypeVar("_Function", bound=Callable[..., Any])


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
            metavar="N|MIN:MAX",
            callback=lambda _ctx, _param, value: value and worker_range(value) and value,
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
    engine = engine_of(chosen)
    if engine.name == "local" and {"workers", *options_of(EngineConfig)} & set(chosen) - {"address"}:
        click.echo(
            "warning: engine local works in this process and has no workers; flags about them move nothing",
            err=True,
        )
    return engine
