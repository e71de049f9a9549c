"""Jobs: verbs of `cairn` with their settings in a file, run as ``python -m cairn.jobs.NAME --config FILE``.

The file is one that :mod:`cairn.pipeline.settings_file` reads; ``jobs/configs`` has files of all jobs. The
process becomes that of the verb with ``--json``: progress and the one sentence of an error on stderr, the
report on stdout, exit codes of `cairn`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.settings_file import read_settings_file

JOBS: Final[Mapping[str, tuple[str, ...]]] = {
    "cluster_corpus": ("ingest", "--step", "cluster"),
    "encode_corpus": ("ingest", "--step", "encode"),
    "write_index": ("ingest", "--step", "write"),
    "build_index": ("ingest",),
    "train_encoder": ("train",),
    "pretrain_encoder": ("pretrain",),
    "compress_model": ("compress",),
    "distill_encoder": ("distill",),
}
"""The verb of each job, with what it is always told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job of a file; ``subject`` is what it works on: a collection, or the folder of a run."""

    name: str
    subject: str


def read_job(path: Path) -> Job:
    """Read which job a file is; raise :class:`ConfigError` where it is none."""
    file = read_settings_file(path)
    if file.job not in JOBS:
        raise ConfigError(f"{path}: job must be one of {', '.join(JOBS)}, got {file.job!r}")
    verb = JOBS[file.job][0]
    subject = {**file.shared, **file.tables.get(verb, {})}.get("collection" if verb == "ingest" else "output")
    return Job(name=file.job, subject=Path(str(subject)).name)


def main(name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Become the process of a job's verb."""
    parser = argparse.ArgumentParser(prog=f"python -m cairn.jobs.{name}", description=f"Run a {name} job.")
    parser.add_argument("--config", type=Path, required=True, help="TOML file of the job, see jobs/configs")
    parser.add_argument(
        "--folder", type=Path, help="folder that the job's relative paths start from, where it is there"
    )
    options = parser.parse_args(arguments)
    config, folder = options.config, options.folder
    if folder is not None and folder.is_dir():
        config = config.absolute()
        os.chdir(folder)
    words = ("-m", "cairn.cli.main", *JOBS[name], "--config", str(config), "--json")
    os.execv(sys.executable, (sys.executable, *words))  # noqa: S606 (a command line of ours)
