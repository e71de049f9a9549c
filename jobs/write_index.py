"""From staged shards to a served generation: encode, commit to Lance as the one committer, publish.

Workers only ever make Parquet shards; this is the single place that merges them into the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain

import numpy as np

from jobs import pending
from jobs.cluster_corpus import corpus_view
from jobs.encode_corpus import EncodedCorpus, encode_corpus
from jobs.run import Run, source_names
from pipeline.config import IngestConfig
from pipeline.corpus.ledger import Ledger
from pipeline.corpus.staging import Staged
from pipeline.errors import ConfigError
from pipeline.index.lance_index import LanceTables, Versions
from pipeline.index.layout import CLUSTERS_ARROW, CONTEXT_ARROW
from pipeline.index.publish import GenerationFacts, next_generation_number, publish_generation
from pipeline.manifest import Manifest


def encode_and_publish(
    run: Run, staged: Staged, ledger: Ledger, *, delete_vanished: bool
) -> tuple[Manifest | None, int]:
    """Encode what was staged, commit it with the deletions, and serve the result; a job that stops before does what is its own.

    Returns the manifest of what is served then and how many documents passed through the encoder.
    """
    if run.job == "cluster_corpus":
        corpus_view(run.layout, run.published, staged.shards, run.config, run.engine, run.progress)
        return run.published, 0
    if run.job == "write_index" and staged.staged:
        raise ConfigError(
            f"every document must be encoded before write_index, got {staged.staged:,} that are not; run "
            "encode_corpus first"
        )
    corpus = encode_corpus(
        run.layout, run.published, staged.shards, staged.characters, run.config, run.engine, run.progress
    )
    if not run.publishes:
        return run.published, corpus.documents
    tables = LanceTables.open_or_create(run.layout, run.scan.metadata_fields, corpus.vector_dim)
    if not run.published:
        tables.roll_back(None)
    versions = _commit(run, tables, ledger, corpus, delete_vanished=delete_vanished)
    facts = generation_facts(
        run.run_id, run.config, corpus, run.published, source_names(run.scan), tables, versions
    )
    manifest = publish_generation(run.layout, tables, versions, facts, run.config.index, run.progress)
    return manifest, corpus.documents


def _commit(
    run: Run, tables: LanceTables, ledger: Ledger, corpus: EncodedCorpus, *, delete_vanished: bool
) -> Versions:
    shards = pending.EncodedShards(run.layout, ledger, corpus.first_shard)
    expected_documents, expected_chunks = shards.count()
    run.progress("commit", 0, expected_documents, "documents")
    versions = tables.commit(
        generation=next_generation_number(run.layout),
        deleted_ids=chain(ledger.replaced_ids(), ledger.vanished_ids() if delete_vanished else ()),
        documents=shards.stream("documents", tables.schemas["documents"]),
        chunks=shards.stream("chunks", tables.schemas["chunks"]),
        expected_documents=expected_documents,
        expected_chunks=expected_chunks,
    )
    run.progress("commit", expected_documents, expected_documents, "documents")
    return versions


def generation_facts(
    run_id: str,
    config: IngestConfig,
    corpus: EncodedCorpus,
    kept: Manifest | None,
    sources: Sequence[str],
    tables: LanceTables,
    versions: Versions,
) -> GenerationFacts:
    """Return what the manifest is to say.

    ``kept`` is the generation whose clusters and context are carried over, None for drawn ones.
    """
    view = corpus.view
    if kept:
        sizes, at_context = kept.context_cluster_sizes, kept.documents_at_context
    else:
        sizes_K = np.zeros(view.clusters.num_clusters, dtype=np.int64)
        for batch in tables.scan("documents", ["cluster_id"], versions):
            sizes_K += np.bincount(batch.column("cluster_id").to_numpy(), minlength=len(sizes_K))
        sizes, at_context = tuple(sizes_K.tolist()), int(sizes_K.sum())
    measured = corpus.tokens / corpus.seconds if corpus.tokens else 0.0
    return GenerationFacts(
        run_id=run_id,
        side_files={name: corpus.view_folder / name for name in (CONTEXT_ARROW, CLUSTERS_ARROW)},
        fingerprints={
            "encoder": corpus.encoder_fingerprint,
            "context": view.context.fingerprint,
            "clusters": view.clusters.fingerprint,
        },
        settings=config.to_dict(),
        context_documents=len(view.context.doc_ids),
        context_cluster_sizes=sizes,
        documents_at_context=at_context,
        encode_tokens_per_second=measured or (kept.encode_tokens_per_second if kept else 0.0),
        sources=tuple(sources),
    )


if __name__ == "__main__":
    from jobs.job import main

    sys.exit(main("write_index"))
