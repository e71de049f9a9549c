"""`cairn schedule list | run | history | health`: ingests and jobs that come back by themselves."""

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
from cairn.cli.terminal import duration, echo, table, thousands
from cairn.pipeline.errors import ConfigError, install_command

if TYPE_CHECKING:
    from cairn.jobs.schedule.scheduler import ScheduledRun
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


@schedule.command("list")
@json_option
@click.pass_obj
def list_(file: ScheduleFile, *, as_json: bool) -> None:
    """Show every schedule, when it runs next and how its last run ended."""
    from cairn.jobs.schedule.scheduler import last_runs, read_history

    schedules, last, now = file.read(), last_runs(read_history(file.history_path)), datetime.now(UTC)
    if as_json:
        echo(json.dumps([_as_json(each, last.get(name), now) for name, each in schedules.items()]))
        return
    if not schedules:
        echo(f"no schedules in {file.path}")
        return
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
    echo(table([("schedule", "times", "zone", "next", "last run", "command"), *rows]))


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
        log=lambda line: echo(line, err=True),
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
def history(file: ScheduleFile, *, name: str | None, last: int, as_json: bool) -> None:
    """Show what ran, of all schedules or of NAME: when, how long, with which counts and which exit code."""
    from cairn.jobs.schedule.scheduler import read_history

    runs = [each for each in read_history(file.history_path) if name in (None, each.schedule)]
    if name is not None and not runs:
        file.require(name, file.read())
    if as_json:
        echo(json.dumps([each.to_dict() for each in runs[-last:]]))
        return
    if not runs:
        echo("nothing has run yet")
        return
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
    echo(table([header, *rows]))


@schedule.command()
@click.pass_obj
def health(file: ScheduleFile) -> None:
    """Tell by the exit code whether a scheduler runs the schedules of the file: 0 yes, 1 no."""
    from cairn.jobs.schedule.scheduler import require_scheduler

    require_scheduler(file)
    echo("a scheduler runs")


def _as_json(each: Schedule, last: ScheduledRun | None, now: datetime) -> dict[str, Any]:
    return {
        "schedule": each.name,
        "cron": each.cron,
        "time_zone": str(each.zone),
        "run": list(each.run),
        "folder": str(each.folder) if each.folder else None,
        "next": each.next_fire(now).isoformat(timespec="seconds"),
        "last": last.to_dict() if last else None,
    }


def _moment(moment: datetime, each: Schedule) -> str:
    return f"{moment.astimezone(each.zone):%a %Y-%m-%d %H:%M}"


def _ended(last: ScheduledRun | None, each: Schedule) -> str:
    return f"exit {last.exit_code}, {_moment(last.started_at, each)}" if last else "never"
