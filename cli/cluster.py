"""Ray clusters: flags that choose where shards are encoded, and `cairn submit CONFIG`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
from cairn.cli.options import FieldOption, NamedPath, add_options
from cairn.cli.settings import json_option
from cairn.cli.terminal import echo, warn
from cairn.jobs.engine import EngineConfig, EngineName, engine_of, require_ray, worker_range
from cairn.pipeline import durable
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.options import options_of
from typing_extensions import override

if TYPE_CHECKING:  # nothing is loaded before an engine is called
    from cairn.pipeline.config import IngestConfig
    from cairn.pipeline.line.engine import Engine

_HEADING = "Ray"
_INTERRUPTED = 130
_CONFIGS = files("cairn.jobs") / "configs"
_EXAMPLES = sorted(
    each.name.removesuffix(".toml") for each in _CONFIGS.iterdir() if each.name.endswith(".toml")
)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Workers(click.ParamType):
    name = "n|min:max"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        worker_range(value)
        return value


def engine_options(function: _Function, but: Collection[str] = ()) -> _Function:
    """Add the flags of an engine, without the fields named in ``but``."""
    for option in (
        add_options(EngineConfig, but=but, heading=_HEADING),
        click.option(
            "--workers",
            cls=FieldOption,
            heading=_HEADING,
            type=_Workers(),
            help="Workers on it, N or MIN:MAX.  [default: as many as it has room for]",
        ),
        click.option(
            "--engine",
            cls=FieldOption,
            heading=_HEADING,
            type=click.Choice(get_args(EngineName)),
            help="Who does the work.  [default: ray with an address, else local]",
        ),
    ):
        function = option(function)
    return function


def resolve_engine(chosen: Mapping[str, Any]) -> EngineConfig:
    """Return the engine that the ``chosen`` flags, the environment and ``cairn.toml`` ask for."""
    engine = engine_of(chosen)
    if engine.name == "local" and {"workers", *options_of(EngineConfig)} & set(chosen) - {"address"}:
        warn("engine local works in this process and has no workers; flags about them move nothing")
    return engine


def open_engine(engine: EngineConfig, config: IngestConfig) -> Engine | None:
    """Return the engine that the line is given, None for its own; it connects at its first call."""
    if engine.name == "local":
        return None
    require_ray()
    from cairn.jobs.ray_cluster.engine import RayEngine

    return RayEngine(engine, config)


@click.command(context_settings={"show_default": True})
@click.argument("config", required=False, type=NamedPath(path_type=Path, dir_okay=False))
@click.option(
    "--example",
    type=click.Choice(_EXAMPLES),
    help="Write an example of CONFIG, called EXAMPLE.toml, into this folder and submit nothing.",
)
@click.option(
    "--address",
    envvar="RAY_API_SERVER_ADDRESS",
    default="http://127.0.0.1:8265",
    help="Dashboard of the Ray cluster, for its jobs.",
)
@click.option("--detach", is_flag=True, help="Submit and return; do not follow.")
@json_option
def submit(*, config: Path | None, example: str | None, address: str, detach: bool, as_json: bool) -> int:
    """Run the job of the TOML file CONFIG on a Ray cluster, follow its log and end with its exit code.

    A job that runs already is joined. Ctrl-C leaves it running; the same command follows it again.
    """
    if example is not None:
        _write_example(example, as_json=as_json)
        return 0
    if config is None:
        raise click.UsageError("submit must have a job file, got none; --example build_index writes one")
    from cairn.jobs.ray_cluster.submission import JobServer

    server = JobServer(address)
    submission = server.submit(config)
    say = f"{'submitted' if submission.is_new else 'joined'} {submission.submission_id}"
    if detach:
        echo(
            json.dumps({"submission_id": submission.submission_id, "is_new": submission.is_new})
            if as_json
            else say
        )
        return 0
    echo(say, err=True)
    try:
        outcome = server.follow(
            submission.submission_id, lambda text: click.echo(text, nl=False, err=as_json)
        )
    except KeyboardInterrupt:
        echo(
            f"\ndetached; {submission.submission_id} goes on, and the same command follows it again",
            err=True,
        )
        return _INTERRUPTED
    if as_json and outcome.report is not None:
        echo(json.dumps(outcome.report))
    return outcome.exit_code


def _write_example(name: str, *, as_json: bool) -> None:
    path = Path(f"{name}.toml")
    if path.exists():
        raise ConfigError(f"{path} must not be there yet, got one that is; move it away")
    with durable.storage_errors(f"writing {path}"):
        durable.write_bytes(path, (_CONFIGS / path.name).read_bytes())
    say = f"{path} is written: change it, then run `cairn submit {path}`"
    echo(json.dumps({"file": str(path)}) if as_json else say)
