"""The model-bound half of the line: every staged shard through the encoder of an engine, into ``pending/encoded``.

This process alone writes shards, as they come in, whoever encoded them. What a killed run finished is found
there and taken over.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.cluster_corpus import corpus_view, view_folder
from jobs.encoder_worker import CorpusView
from jobs.engine import Engine
from pipeline.cluster.store import Clusters
from pipeline.config import IngestConfig
from pipeline.context.store import ContextSet
from pipeline.encode.shards import finished_shards, write_encoded_shard
from pipeline.errors import FingerprintMismatchError
from pipeline.index.layout import CLUSTERS_ARROW, CONTEXT_ARROW, CollectionLayout
from pipeline.manifest import Manifest
from pipeline.model.folders.names import describe_model
from pipeline.types import ProgressListener

TYPICAL_TOKENS_A_CHARACTER = 0.25
"""English prose in WordPiece; stands in until the first shard has been counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedCorpus:
    """What the encoder left in ``pending/encoded``: what this run added, from ``first_shard`` on, in ``seconds``.

    ``view_folder`` is where the clusters and the context of ``view`` lie.
    """

    encoder_fingerprint: str
    vector_dim: int
    view: CorpusView
    view_folder: Path
    first_shard: int
    documents: int
    tokens: int
    seconds: float


def encode_corpus(
    layout: CollectionLayout,
    published: Manifest | None,
    staged: Sequence[Path],
    staged_characters: int,
    config: IngestConfig,
    engine: Engine,
    progress: ProgressListener,
) -> EncodedCorpus:
    """Run the stages that need a model over the staged shards; returns when every one is in ``pending/encoded``.

    Raises :class:`FingerprintMismatchError` before any shard for another model than the collection's. The
    engine is closed at the end: what comes after needs no model, and takes long.
    """
    view = corpus_view(layout, published, staged, config, engine, progress)
    progress("encode", 0, None, "tokens")  # workers that have to be started are started for it
    begun = engine.begin(view)
    if published:
        _require_same_encoder(published, begun.encoder_fingerprint, config)
    first = max(finished_shards(layout.encoded_folder), default=-1) + 1
    meter = _TokenMeter(staged_characters, progress)
    documents = 0
    for number, shard in engine.encode(staged, meter.add):
        write_encoded_shard(layout.encoded_folder, first + number, shard.documents, shard.chunks)
        documents += shard.num_documents
        meter.close_shard(shard.num_characters)
    engine.close()
    return EncodedCorpus(
        encoder_fingerprint=begun.encoder_fingerprint,
        vector_dim=begun.vector_dim,
        view=view,
        view_folder=view_folder(layout, published),
        first_shard=first,
        documents=documents,
        tokens=meter.tokens,
        seconds=meter.seconds,
    )


def require_same_model(
    layout: CollectionLayout, published: Manifest, config: IngestConfig, engine: Engine
) -> None:
    """Load the model; raise :class:`FingerprintMismatchError` where it is not the one the collection was built with."""
    folder = view_folder(layout, published)
    with layout.naming_damage():
        view = CorpusView(
            clusters=Clusters.read(folder / CLUSTERS_ARROW), context=ContextSet.read(folder / CONTEXT_ARROW)
        )
    _require_same_encoder(published, engine.begin(view).encoder_fingerprint, config)


def _require_same_encoder(published: Manifest, encoder_fingerprint: str, config: IngestConfig) -> None:
    if published.fingerprints["encoder"] != encoder_fingerprint:
        built_with, got = (
            describe_model(model) for model in (published.settings["encoder"]["model"], config.encoder.model)
        )
        raise FingerprintMismatchError(
            f"collection {published.collection!r} must keep the model it was built with ({built_with}), "
            f"got other weights, tokenizer or context from {got}; restore them, or use a new collection"
        )


class _TokenMeter:
    """Counts tokens as they leave the encoder.

    How many there will be is estimated from the characters, better with every shard.
    """

    def __init__(self, total_characters: int, progress: ProgressListener) -> None:
        self.tokens = 0
        self._characters = 0
        self._total_characters = total_characters
        self._tokens_a_character = TYPICAL_TOKENS_A_CHARACTER
        self._progress = progress
        self._started_seconds = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started_seconds

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        expected = round(self._total_characters * self._tokens_a_character)
        self._progress("encode", self.tokens, max(expected, self.tokens), "tokens")

    def close_shard(self, characters: int) -> None:
        self._characters += characters
        self._tokens_a_character = self.tokens / max(1, self._characters)
        self.add(0)


if __name__ == "__main__":
    from jobs.job import main

    sys.exit(main("encode_corpus"))
