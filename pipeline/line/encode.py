"""The step that needs the model: every staged shard through an engine's encoder, into ``pending/encoded``.

This process alone writes shards, in the order in which they are finished. A rerun finds the shards that a
killed run finished, and encodes only the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cairn.pipeline.encode.shards import finished_shards, write_encoded_shard
from cairn.pipeline.line.compatibility import require_same_encoder
from cairn.pipeline.line.engine import CorpusView
from cairn.pipeline.line.run import Run
from cairn.pipeline.types import ProgressListener

TYPICAL_TOKENS_A_CHARACTER = 0.25
"""English prose in WordPiece: the estimate until the first shard has been counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedCorpus:
    """What a run added to ``pending/encoded``, from ``first_shard`` on, and the space of its vectors."""

    encoder_fingerprint: str
    vector_dim: int
    sparse_fingerprint: str | None
    first_shard: int
    documents: int
    tokens: int
    seconds: float


def encode_shards(run: Run, view: CorpusView, shards: Sequence[Path], characters: int) -> EncodedCorpus:
    """Encode staged shards, whose texts have so many ``characters``, and write them to ``pending/encoded``.

    Raises :class:`FingerprintMismatchError` before any shard for another model than the collection's. Closes
    the engine at the end: the commit needs no model, and takes long.
    """
    run.progress("encode", 0, None, "tokens")  # before workers start, so that their start is counted
    begun = run.engine.begin(replace(view, given_dims=run.config.encoder.given_dims))
    if run.base:
        require_same_encoder(run.base, begun, run.config)
    folder = run.layout.encoded_folder
    partitions = run.config.index.partitions
    first = -(-(max(finished_shards(folder), default=-1) + 1) // partitions) * partitions
    meter = _TokenMeter(characters, run.progress)
    documents = 0
    for number, shard in run.engine.encode(shards, meter.add):
        own = first + int(shards[number].stem)  # which leaves the remainder of its partition
        write_encoded_shard(
            folder, own, shards[number], shard.documents, shard.chunks, flushes=run.keeps_work
        )
        documents += shard.num_documents
        meter.close_shard(shard.num_characters)
    run.engine.close()
    return EncodedCorpus(
        encoder_fingerprint=begun.encoder_fingerprint,
        vector_dim=begun.vector_dim,
        sparse_fingerprint=begun.sparse_fingerprint,
        first_shard=first,
        documents=documents,
        tokens=meter.tokens,
        seconds=meter.seconds,
    )


class _TokenMeter:
    """Counts tokens as they leave the encoder, and estimates their total from the characters so far."""

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
