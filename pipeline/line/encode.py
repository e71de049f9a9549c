"""The step that needs the model: every staged shard through an engine's encoder, into ``pending/encoded``.

This process alone writes shards, in the order in which they are finished. A rerun finds the shards that a
killed run finished, and encodes only the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.pipeline.encode.shards import count_rows, finished_shards, write_encoded_shard
from cairn.pipeline.index.segments.parts import num_parts
from cairn.pipeline.index.worker_files import PendingArea
from cairn.pipeline.line import pending
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
    begun = run.engine.begin(view)
    if run.base:
        require_same_encoder(run.base, begun.encoder_fingerprint, run.config)
    folder = run.layout.encoded_folder
    first = max(finished_shards(folder), default=-1) + 1
    meter = _TokenMeter(characters, run.progress)
    documents = 0
    for number, shard in run.engine.encode(shards, meter.add, _shared_area(run, characters)):
        write_encoded_shard(folder, first + number, shards[number], shard.documents, shard.chunks)
        documents += shard.num_documents
        meter.close_shard(shard.num_characters)
    run.engine.close()
    return EncodedCorpus(
        encoder_fingerprint=begun.encoder_fingerprint,
        vector_dim=begun.vector_dim,
        first_shard=first,
        documents=documents,
        tokens=meter.tokens,
        seconds=meter.seconds,
    )


def _shared_area(run: Run, characters: int) -> PendingArea | None:
    """Return where workers leave shards, None where there are too few for workers to commit them."""
    folder = run.layout.encoded_folder
    earlier = sum(count_rows(folder, "chunks", number) for number in finished_shards(folder))
    new = characters * TYPICAL_TOKENS_A_CHARACTER / run.config.encoder.landmark_interval
    is_by_tasks = run.engine.run_tasks is not None and num_parts(earlier + round(new)) > 1
    return pending.pending_area(run.layout) if is_by_tasks else None


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
