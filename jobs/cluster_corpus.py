"""Stage what changed, and draw clusters and context; the work is kept for the next job."""

from __future__ import annotations

from cairn.jobs.job import main

if __name__ == "__main__":
    main("cluster_corpus")
