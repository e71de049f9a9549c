"""Stage what changed, and draw clusters and context; the work is kept for the next job."""

from __future__ import annotations

import sys
from functools import partial

from cairn.jobs.job import ingest_job, main
from cairn.pipeline.line.build_index import build_index

cluster_corpus = partial(build_index, until="cluster")

if __name__ == "__main__":
    sys.exit(main("cluster_corpus", ingest_job(cluster_corpus)))
