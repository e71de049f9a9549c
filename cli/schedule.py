"""`cairn schedule add | list | remove | run | history | health`.

Ingests and jobs that come back by themselves.
"""

from __future__ import annotations

import json
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from cairn.cli.options import COUNT, NamedPath
from cairn.cli.settings import json_option
from cairn.cli.terminal import duration, table, thousands
from cairn.pipeline.errors import ConfigError, install_command

if TYPE_CHECKING:
    from cairn.jobs.schedule.history import ScheduledRun
    from cairn.jobs.schedule.schedules import Schedule, ScheduleFile

DEFAULT_FILE = "cairn-schedules.toml"

_INTERRUPTED = 130
_SHOWN_COUNTS = ("rows", "indexed", "unchanged", "quarantined", "deleted", "encoded", "generation")


@click.group(context_settings={"show_default": True})
@click.option(
    "--file",
    default=DEFAULT_FILE,
    type=NamedPath(path_type=Path, dir_okay=False),
    help="The TOML file of all schedules.",
)
@click.pass_context
def schedule(ctx: click.Context, file: Path) -> None:
    """Run ingests at the times of cron expressions, by one scheduler process."""
    try:
        from cairn.jobs.schedule.schedules import ScheduleFile
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"schedules must have their packages installed, got no {error.name}; "
            f"install them with {install_command('schedule')}"
        ) from error
    ctx.obj = ScheduleFile(file)


@schedule.command()
@click.argument("name")
@click.argument("words", nargs=-1, required=True, metavar="-- ingest|plan|submit ARGUMENTS...")
@click.option("--cron", required=True, help="Minute, hour, day, month and weekday, as in '30 2 * * *'.")
@click.option("--time-zone", help="Zone of the expression, such as Europe/Vienna.  [default: the machine's]")
@click.pass_context
def add(ctx: click.Context, *, name: str, words: tuple[str, ...], cron: str, time_zone: str | None) -> int:
    """Add schedule NAME: a command line of cairn and its times.

    The command runs in this folder, with its cairn.toml; `cairn schedule run` must be running for it.
    """
    from cairn.jobs.schedule.schedules import Schedule

    file: ScheduleFile = ctx.obj
    folder = None if Path.cwd() == file.path.parent else Path.cwd()
    added = Schedule(
        name=name, cron=cron, run=words, time_zone=time_zone, since=datetime.now(UTC), folder=folder
    )
    _check_command(ctx, added)
    file.add(added)
    click.echo(
        f"{name}: {added.in_words} ({added.zone}), next {_moment(added.next_fire(datetime.now(UTC)), added)}"
    )
    return 0


def _check_command(ctx: click.Context, added: Schedule) -> None:
    """Refuse what the verb itself would.

    Unknown flags, a name that is none, sources or a job file that are not there.
    """
    from cairn.cli.main import cairn
    from cairn.jobs.job_file import VERBS, ingest_of, read_job
    from cairn.pipeline.corpus.sources import resolve_sources
    from cairn.pipeline.index.layout import CollectionLayout

    verb = cairn.get_command(ctx, added.run[0])
    assert verb is not None, "schedules run verbs that there are"
    parameters = verb.make_context(added.run[0], list(added.run[1:]), parent=ctx.find_root()).params
    if added.run[0] == "submit":
        job = read_job(parameters["config"])
        if VERBS[job.name] == "ingest":  # its sources need be there for the cluster alone
            asked = ingest_of(job)
            CollectionLayout.at(Path(asked.root), asked.collection)
        return
    CollectionLayout.at(Path(parameters["root"]), parameters["collection"])
    if "sources" in parameters:
        resolve_sources(parameters["sources"])


@schedule.command("list")
@json_option
@click.pass_obj
def list_(file: ScheduleFile, *, as_json: bool) -> int:
    """Show every schedule, when it runs next and how its last run ended."""
    from cairn.jobs.schedule.history import last_runs, read_history

    schedules, last, now = file.read(), last_runs(read_history(file.history_path)), datetime.now(UTC)
    if as_json:
        click.echo(json.dumps([_as_json(each, last.get(name), now) for name, each in schedules.items()]))
        return 0
    if not schedules:
        click.echo(f"no schedules in {file.path}")
        return 0
    rows = [
        (
            name,
            each.in_words,
            each.zone,
            _moment(each.next_fire(now), each),
            _ended(last.get(name), each),
            " ".join(each.run),
        )
        for name, each in schedules.items()
    ]
    click.echo(table([("schedule", "times", "zone", "next", "last run", "command"), *rows]))
    return 0


@schedule.command()
@click.argument("name")
@click.pass_obj
def remove(file: ScheduleFile, *, name: str) -> int:
    """Remove schedule NAME; what is running of it runs to its end."""
    file.remove(name)
    click.echo(f"{name}: removed")
    return 0


@schedule.command()
@click.option("--parallel", type=COUNT, default=4, help="Commands that may run at a time.")
@click.pass_obj
def run(file: ScheduleFile, *, parallel: int) -> int:
    """Run every schedule of the file at its times, until SIGTERM or Ctrl-C; edits of the file are taken up.

    Runs that were missed are made up for once. A running command is interrupted when this ends, and goes on
    at the next start.
    """
    from cairn.jobs.schedule.scheduler import Scheduler

    scheduler = Scheduler(
        file=file,
        command=(sys.executable, "-m", "cairn.cli.main"),
        log=lambda line: click.echo(line, err=True),
        parallel=parallel,
    )
    received: list[int] = []

    def stop(number: int, _: Any) -> None:
        received.append(number)
        scheduler.is_stopping = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    scheduler.run()
    return _INTERRUPTED if signal.SIGINT in received else 0


@schedule.command()
@click.argument("name", required=False)
@click.option("--last", type=COUNT, default=20, help="Runs to show, the newest.")
@json_option
@click.pass_obj
def history(file: ScheduleFile, *, name: str | None, last: int, as_json: bool) -> int:
    """Show what ran, of all schedules or of NAME: when, how long, with which counts and which exit code."""
    from cairn.jobs.schedule.history import read_history

    runs = [each for each in read_history(file.history_path) if name in (None, each.schedule)]
    if name is not None and not runs:
        file.require(name, file.read())
    if as_json:
        click.echo(json.dumps([_run_as_json(each) for each in runs[-last:]]))
        return 0
    if not runs:
        click.echo("nothing has run yet")
        return 0
    header = ("started", "schedule", "exit", "time", *_SHOWN_COUNTS, "")
    rows = [
        (
            f"{each.started_at.astimezone():%Y-%m-%d %H:%M:%S}",
            each.schedule,
            f"{each.exit_code}" + (f" ({each.attempts} attempts)" if each.attempts > 1 else ""),
            duration(each.seconds),
            *(thousands(each.counts[count]) if count in each.counts else "" for count in _SHOWN_COUNTS),
            each.error or "",
        )
        for each in runs[-last:]
    ]
    click.echo(table([header, *rows]))
    return 0


@schedule.command()
@click.pass_obj
def health(file: ScheduleFile) -> int:
    """Tell by the exit code whether a scheduler runs the schedules of the file: 0 yes, 1 no."""
    from cairn.jobs.schedule.scheduler import require_scheduler

    require_scheduler(file)
    click.echo("a scheduler runs")
    return 0


def _as_json(each: Schedule, last: ScheduledRun | None, now: datetime) -> dict[str, Any]:
    return {
        "schedule": each.name,
        "cron": each.cron,
        "time_zone": str(each.zone),
        "run": list(each.run),
        "folder": str(each.folder) if each.folder else None,
        "next": each.next_fire(now).isoformat(timespec="seconds"),
        "last": _run_as_json(last) if last else None,
    }


def _run_as_json(run: ScheduledRun) -> dict[str, Any]:
    return {
        "schedule": run.schedule,
        "started_at": run.started_at.isoformat(timespec="seconds"),
        "seconds": run.seconds,
        "exit_code": run.exit_code,
        "attempts": run.attempts,
        "counts": dict(run.counts),
        "error": run.error,
    }


def _moment(moment: datetime, each: Schedule) -> str:
    return f"{moment.astimezone(each.zone):%a %Y-%m-%d %H:%M}"


def _ended(last: ScheduledRun | None, each: Schedule) -> str:
    return f"exit {last.exit_code}, {_moment(last.started_at, each)}" if last else "never"
