"""Commit and publish what ``encode_corpus`` left."""

from __future__ import annotations

import sys
from functools import partial

from cairn.jobs.job import ingest_job, main
from cairn.pipeline.line.build_index import build_index

write_index = partial(build_index, is_encoded=True)

if __name__ == "__main__":
    sys.exit(main("write_index", ingest_job(write_index)))
