"""Bring a collection up to date with its sources."""

from __future__ import annotations

import sys

from cairn.jobs.job import ingest_job, main
from cairn.pipeline.line.build_index import build_index

if __name__ == "__main__":
    sys.exit(main("build_index", ingest_job(build_index)))
