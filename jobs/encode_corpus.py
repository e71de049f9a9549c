"""Stage and encode what changed; the work is kept for ``write_index``."""

from __future__ import annotations

import sys
from functools import partial

from cairn.jobs.job import ingest_job, main
from cairn.pipeline.line.build_index import build_index

encode_corpus = partial(build_index, until="encode")

if __name__ == "__main__":
    sys.exit(main("encode_corpus", ingest_job(encode_corpus)))
