"""`cairn jobs`: what was submitted to a Ray cluster."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime

import click
from cairn.cli.engine import job_server_option
from cairn.cli.settings import json_option
from cairn.cli.terminal import duration, table


@click.command(context_settings={"show_default": True})
@job_server_option
@json_option
def jobs(*, address: str, as_json: bool) -> int:
    """List the jobs of a Ray cluster, the newest first."""
    from cairn.jobs.ray_cluster.submission import JobServer

    found = JobServer(address).list()
    if as_json:
        click.echo(json.dumps([asdict(listed) for listed in found]))
        return 0
    rows = [("job", "status", "started", "time", "exit")]
    for listed in found:
        started = datetime.fromtimestamp(listed.started_at).astimezone() if listed.started_at else None
        seconds = "" if listed.seconds is None else duration(listed.seconds)
        exit_code = "" if listed.exit_code is None else str(listed.exit_code)
        rows.append(
            (
                listed.submission_id,
                listed.status.lower(),
                f"{started:%Y-%m-%d %H:%M}" if started else "",
                seconds,
                exit_code,
            )
        )
    click.echo(table(rows) if found else "no job was submitted yet")
    return 0
