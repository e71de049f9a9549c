"""A job: a verb of `cairn` with its settings in a file, run as ``python -m cairn.jobs.NAME --config FILE``.

The file is one that :mod:`cairn.pipeline.settings_file` reads. The process becomes that of the verb with
``--json``: progress and the one sentence of an error on stderr, the report on stdout, exit codes of `cairn`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cairn.jobs.job_file import JOBS
from cairn.pipeline.errors import CairnError


def main(name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Become the process of a job's verb, unless this is another cluster than the job's."""
    parser = argparse.ArgumentParser(prog=f"python -m cairn.jobs.{name}", description=f"Run a {name} job.")
    parser.add_argument("--config", type=Path, required=True, help="TOML file of the job, see jobs/configs")
    parser.add_argument(
        "--folder", type=Path, help="folder that the job's relative paths start from, where it is there"
    )
    parser.add_argument("--cluster", help="id of the Ray cluster it was submitted to, to run on no other")
    options = parser.parse_args(arguments)
    config, folder = options.config, options.folder
    address = os.environ.get("RAY_ADDRESS")
    try:
        if options.cluster and address:
            from cairn.jobs.ray_cluster.runtime import require_cluster

            require_cluster(address, options.cluster)
    except CairnError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    if folder is not None and folder.is_dir():
        config = config.absolute()
        os.chdir(folder)
    words = ("-m", "cairn.cli.main", *JOBS[name], "--config", str(config), "--json")
    os.execv(sys.executable, (sys.executable, *words))  # noqa: S606 (a command line of ours)
