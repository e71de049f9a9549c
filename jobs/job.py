"""A job run as a process: `python -m jobs.<name> --config FILE`, on a cluster's head, in a container or in a shell.

Progress and the one sentence of an error go to stderr, the report as one JSON object to stdout; exit codes
are those of `cairn`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from jobs.job_file import IngestJob, JobName, TrainJob, read_job
from jobs.progress_log import ProgressLog
from pipeline.errors import CairnError, ConfigError
from pipeline.types import ProgressListener

_FAILED: Final = 1
_QUARANTINED: Final = 3
_INTERRUPTED: Final = 130


def run_job(job: IngestJob | TrainJob, progress: ProgressListener) -> dict[str, Any]:
    """Run a job and return its report."""
    if isinstance(job, TrainJob):
        from jobs.train_encoder import train_encoder

        return train_encoder(job, progress)
    from jobs.build_index import build_index
    from jobs.ingest_settings import resolve_ingest_config
    from jobs.plan_index import stored_settings

    config = resolve_ingest_config(
        {**job.stages, "sync": job.sync}, stored_settings(job.root, job.collection)
    )
    report = build_index(job.sources, job.root, job.collection, config, progress, job.engine, job=job.job)
    return {**asdict(report), "warnings": list(report.warnings)}


def main(name: JobName, arguments: Sequence[str] | None = None) -> int:
    """Run the job of ``--config``, which must be the one that was called; return the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m jobs.{name}", description=f"Run a {name} job.")
    parser.add_argument("--config", type=Path, required=True, help="TOML file of the job, see jobs/configs")
    parser.add_argument(
        "--folder", type=Path, help="folder that the job's relative paths start from, where it is there"
    )
    parser.add_argument("--cluster", help="id of the Ray cluster it was submitted to, to run on no other")
    options = parser.parse_args(arguments)
    signal.signal(
        signal.SIGTERM, _interrupt
    )  # as a stopped job and a drained machine send it; what is finished is kept
    log = ProgressLog(lambda line: sys.stderr.write(f"{line}\n"))
    return _in_sentences(lambda: _run(name, options.config, options.folder, options.cluster, log))


def _run(name: JobName, config: Path, folder: Path | None, cluster_id: str | None, log: ProgressLog) -> int:
    job = read_job(config)
    if job.job != name:
        raise ConfigError(
            f"{config}: job must be {name!r} to be run by jobs.{name}, got {job.job!r}; run python -m "
            f"jobs.{job.job}"
        )
    if (
        cluster_id
        and isinstance(job, IngestJob)
        and job.engine.address
        and job.engine.address == os.environ.get("RAY_ADDRESS")
    ):
        from jobs.ray_cluster.runtime import require_cluster

        require_cluster(job.engine.address, cluster_id)
    if folder and folder.is_dir():
        os.chdir(folder)
    report = run_job(job, log)
    log.finish()
    sys.stdout.write(f"{json.dumps(report, default=dict)}\n")
    return _QUARANTINED if report.get("quarantined") else 0


def _in_sentences(action: Callable[[], int]) -> int:
    try:
        return action()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; finished work is kept, the same job goes on from there\n")
        return _INTERRUPTED
    except CairnError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except MemoryError:
        sys.stderr.write("error: out of memory; nothing published was changed, finished work is kept\n")
        return _FAILED


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
