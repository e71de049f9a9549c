"""A job run as a process, ``python -m cairn.jobs.NAME --config FILE``: a verb with its settings in a file.

Progress and the one sentence of an error go to stderr, the report as one JSON object to stdout; exit codes
are those of `cairn`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from cairn.jobs.engine import open_engine
from cairn.jobs.job_file import Job, ingest_of, read_job
from cairn.pipeline import unforeseen
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.errors import CairnError
from cairn.pipeline.line.compatibility import stored_settings
from cairn.pipeline.line.engine import Engine
from cairn.pipeline.line.ingest_settings import resolve_ingest_config
from cairn.pipeline.line.progress_log import ProgressLog
from cairn.pipeline.types import IngestReport, ProgressListener

_FAILED: Final = 1
_QUARANTINED: Final = 3
_INTERRUPTED: Final = 130

RunJob = Callable[[Job, ProgressListener], Mapping[str, Any]]
"""Runs a job that was read from its file; returns its report."""
IngestLine = Callable[[Sequence[str], str, str, IngestConfig, ProgressListener, Engine | None], IngestReport]


def ingest_job(line: IngestLine) -> RunJob:
    """Return what runs a job of an ingest, such as ``build_index``, with the settings of its file."""

    def run(job: Job, progress: ProgressListener) -> Mapping[str, Any]:
        asked = ingest_of(job)
        config = resolve_ingest_config(asked.chosen, stored_settings(asked.root, asked.collection))
        engine = open_engine(asked.engine, config)
        report = line(asked.sources, asked.root, asked.collection, config, progress, engine)
        return {**asdict(report), "warnings": list(report.warnings)}

    return run


def main(name: str, run: RunJob, arguments: Sequence[str] | None = None) -> int:
    """Run the job ``name`` with the settings of ``--config``; return the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m cairn.jobs.{name}", description=f"Run a {name} job.")
    parser.add_argument("--config", type=Path, required=True, help="TOML file of the job, see jobs/configs")
    parser.add_argument(
        "--folder", type=Path, help="folder that the job's relative paths start from, where it is there"
    )
    parser.add_argument("--cluster", help="id of the Ray cluster it was submitted to, to run on no other")
    options = parser.parse_args(arguments)
    # A stopped job and a drained machine send it; what is finished is kept.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        report = _run(name, run, options)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; finished work is kept, the same job goes on from there\n")
        return _INTERRUPTED
    except CairnError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except MemoryError:
        sys.stderr.write("error: out of memory; nothing published was changed, finished work is kept\n")
        return _FAILED
    except Exception as error:  # noqa: BLE001 - no job ends in a traceback
        sys.stderr.write(f"error: {unforeseen.sentence_of(error, f'cairn.jobs.{name}')}\n")
        return _FAILED
    sys.stdout.write(f"{json.dumps(report, default=dict)}\n")
    return _QUARANTINED if report.get("quarantined") else 0


def _run(name: str, run: RunJob, options: argparse.Namespace) -> Mapping[str, Any]:
    job = read_job(options.config, name)
    address = os.environ.get("RAY_ADDRESS")
    if options.cluster and address:
        from cairn.jobs.ray_cluster.runtime import require_cluster

        require_cluster(address, options.cluster)
    if options.folder and options.folder.is_dir():
        os.chdir(options.folder)
    log = ProgressLog(lambda line: sys.stderr.write(f"{line}\n"))
    report = run(job, log)
    log.finish()
    return report


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
