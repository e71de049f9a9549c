"""`cairn submit CONFIG`: run a job on a Ray cluster and follow it."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import click
from cairn.cli.engine import job_server_option
from cairn.cli.options import NamedPath
from cairn.pipeline import durable
from cairn.pipeline.errors import ConfigError

_INTERRUPTED = 130
_CONFIGS = files("cairn.jobs") / "configs"
_EXAMPLES = sorted(
    each.name.removesuffix(".toml") for each in _CONFIGS.iterdir() if each.name.endswith(".toml")
)


@click.command(context_settings={"show_default": True})
@click.argument("config", required=False, type=NamedPath(path_type=Path, dir_okay=False))
@click.option(
    "--example",
    type=click.Choice(_EXAMPLES),
    help="Write an example of CONFIG, called EXAMPLE.toml, into this folder and submit nothing.",
)
@job_server_option
@click.option(
    "--key",
    help="Name this run, such as the night it belongs to: it is submitted once, however often it is "
    "asked for.",
)
@click.option("--detach", is_flag=True, help="Submit and return; do not follow.")
@click.option("--quiet", is_flag=True, help="Do not show the job's log.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on stdout: the job's report; its log on stderr."
)
def submit(
    *,
    config: Path | None,
    example: str | None,
    address: str,
    key: str | None,
    detach: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Run the job of the TOML file CONFIG on a Ray cluster, follow its log and end with its exit code.

    A job that runs already is joined. Ctrl-C leaves it running; the same command follows it again.
    """
    if example is not None:
        return _write_example(example, as_json=as_json)
    if config is None:
        raise click.UsageError("submit must have a job file, got none; --example build_index writes one")
    from cairn.jobs.ray_cluster.submission import JobServer

    server = JobServer(address)
    submission = server.submit(config, key)
    say = f"{'submitted' if submission.is_new else 'joined'} {submission.submission_id}"
    if detach:
        click.echo(
            json.dumps({"submission_id": submission.submission_id, "is_new": submission.is_new})
            if as_json
            else say
        )
        return 0
    click.echo(say, err=True)
    try:
        outcome = server.follow(
            submission.submission_id, lambda text: None if quiet else click.echo(text, nl=False, err=as_json)
        )
    except KeyboardInterrupt:
        click.echo(
            f"\ndetached; {submission.submission_id} goes on, `cairn jobs` lists it, the same command "
            "follows it again",
            err=True,
        )
        return _INTERRUPTED
    if as_json and outcome.report is not None:
        click.echo(json.dumps(outcome.report))
    return outcome.exit_code


def _write_example(name: str, *, as_json: bool) -> int:
    path = Path(f"{name}.toml")
    if path.exists():
        raise ConfigError(f"{path} must not be there yet, got one that is; move it away")
    with durable.storage_errors(f"writing {path}"):
        durable.write_bytes(path, (_CONFIGS / path.name).read_bytes())
    say = f"{path} is written: change it, then run `cairn submit {path}`"
    click.echo(json.dumps({"file": str(path)}) if as_json else say)
    return 0
