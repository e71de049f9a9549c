"""The line: sources in, one published generation out.

    stage ─▶ view ─────────────▶ encode ─────────▶ commit ─────────▶ publish
    checked  clusters and        shard by shard    the one writer    vector files,
    rows     context, drawn once                   of the tables     then CURRENT

Every step streams, and peak memory does not depend on the size of the corpus. This process holds the
collection's writer lock throughout and alone writes to it; only what needs a model is the engine's, which may
have workers on other machines. A reader sees nothing of it before ``CURRENT`` moves, and every finished shard
outlives a kill. The jobs ``cluster_corpus`` and ``encode_corpus`` are the first steps of the line,
``write_index`` the last ones, each on the machine that suits it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jobs.cluster_corpus import view_corpus
from jobs.compatibility import is_repointed
from jobs.encode_corpus import encode_shards
from jobs.engine import EngineConfig
from jobs.ingest import count_vanished, finish, open_ingest, stage_corpus
from jobs.write_index import commit_shards, publish
from pipeline.config import IngestConfig
from pipeline.corpus.sources import Source
from pipeline.types import IngestReport, ProgressListener, silent_progress


def build_index(
    sources: Sequence[Source],
    root: str | Path,
    collection: str,
    config: IngestConfig,
    progress: ProgressListener = silent_progress,
    engine: EngineConfig | None = None,
) -> IngestReport:
    """Bring a collection up to date with its sources and return what was done.

    Sources, columns and settings are checked before anything is written. A row is counted once:
    ``rows == indexed + unchanged + quarantined``.
    """
    with open_ingest("build_index", sources, root, collection, config, progress, engine) as run:
        staged = stage_corpus(run)
        vanished = count_vanished(run, staged)
        if not (staged.indexed or vanished or is_repointed(run.base, config)):
            return finish(run, staged)
        view = view_corpus(run, staged.shards)
        encoded = encode_shards(run, view, staged.shards, staged.characters)
        committed = commit_shards(
            run, encoded, has_tokens=view.token_projection is not None, delete_vanished=vanished > 0
        )
        manifest = publish(run, view, encoded, committed)
        return finish(run, staged, manifest, encoded=encoded.documents, deleted=vanished)


if __name__ == "__main__":
    from jobs.job import ingest_job, main

    sys.exit(main("build_index", ingest_job(build_index)))
