"""A Ray on this machine that lives as long as this process's stdin: `python -m cairn.jobs.ray_cluster.local`.

A process of its own for two reasons. Starting Ray forks, which a process with an open LanceDB table must not
do. And stdin ends when the parent does, even by a kill, so that no Ray is left behind. Prints the address on
stdout when it is ready.
"""

from __future__ import annotations

import os
import sys
from logging import ERROR
from typing import Final

OBJECT_STORE_BYTES: Final = 512 << 20
"""Shards are a few MB and two a worker are under way; a sample of documents is some 70 MB."""


def main() -> None:
    """Start Ray, say where it is, and stop it when stdin ends."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing about an ingest leaves this machine
    import ray

    ray.init(
        address="local",
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=ERROR,
    )
    sys.stdout.write(f"{ray.get_runtime_context().gcs_address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
