"""The line: sources in, one published generation out.

    stage ─▶ view ─────────────▶ encode ─────────▶ commit ─────────▶ publish
    checked  clusters and        shard by shard    the one writer    vector files,
    rows     context, drawn once                   of the tables     then CURRENT

Every step streams, and peak memory does not depend on the size of the corpus. This process holds the
collection's writer lock throughout and alone writes to it; only what needs a model is the engine's, which may
have workers on other machines. A reader sees nothing of it before ``CURRENT`` moves, and every finished shard
outlives a kill. ``until`` ends the line after its clusters or its encoding, and what is done is kept for the
next run: so each part can have the machine that suits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from cairn.pipeline.config import IngestConfig
from cairn.pipeline.corpus.sources import Source
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.line.compatibility import is_repointed
from cairn.pipeline.line.encode import encode_shards
from cairn.pipeline.line.engine import Engine
from cairn.pipeline.line.ingest import IngestJobName, count_vanished, finish, open_ingest, stage_corpus
from cairn.pipeline.line.publish import commit_shards, publish
from cairn.pipeline.line.view import view_corpus
from cairn.pipeline.types import IngestReport, ProgressListener, silent_progress

Step = Literal["cluster", "encode", "publish"]


def build_index(
    sources: Sequence[Source],
    root: str | Path,
    collection: str,
    config: IngestConfig,
    progress: ProgressListener = silent_progress,
    engine: Engine | None = None,
    *,
    until: Step = "publish",
    is_encoded: bool = False,
) -> IngestReport:
    """Bring a collection up to date with its sources and return what was done.

    ``engine`` = None encodes in this process. The line ends after the step ``until``. With ``is_encoded``,
    documents that an earlier run did not encode raise :class:`ConfigError`.

    Sources, columns and settings are checked before anything is written. A row is counted once:
    ``rows == indexed + unchanged + quarantined``.
    """
    job: IngestJobName = "build_index"
    if until == "cluster":
        job = "cluster_corpus"
    elif until == "encode":
        job = "encode_corpus"
    elif is_encoded:
        job = "write_index"
    with open_ingest(job, sources, root, collection, config, progress, engine) as run:
        staged = stage_corpus(run)
        if is_encoded and staged.staged:
            raise ConfigError(
                f"every document must be encoded before write_index, got {staged.staged:,} that are not; "
                "run encode_corpus first"
            )
        vanished = count_vanished(run, staged) if until == "publish" else 0
        is_moved = until == "publish" and is_repointed(run.base, config)
        if not (staged.indexed or vanished or is_moved):
            return finish(run, staged)
        view = view_corpus(run, staged.shards)
        if until == "cluster":
            return finish(run, staged)
        encoded = encode_shards(run, view, staged.shards, staged.characters)
        if until == "encode":
            return finish(run, staged, encoded=encoded.documents)
        committed = commit_shards(
            run, encoded, has_tokens=view.token_projection is not None, delete_vanished=vanished > 0
        )
        manifest = publish(run, view, encoded, committed)
        return finish(run, staged, manifest, encoded=encoded.documents, deleted=vanished)
