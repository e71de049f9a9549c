"""How long an evaluation will take: a sample of its texts is encoded once and timed.

Every encoding is counted by the texts it encodes; what is ranked afterwards, a context, and token states of
pieces are not. Encodings that a cache holds take no time, and are counted all the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.evaluate.systems import System
from cairn.pipeline.model.backbone_loader import load_backbone

SAMPLE_CHARACTERS: Final = 40_000
"""Some 10,000 tokens: a second or two of encoding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Seconds of all encodings together, how many there are, and the tokens of the texts, once."""

    seconds: float
    encodings: int
    tokens: int


def estimate_seconds(sets: Sequence[RetrievalSet], systems: Sequence[System]) -> Estimate:
    """Estimate the time that the systems need on these sets; loads the model of the last one."""
    encodings = list(dict.fromkeys(each.encoding for each in systems))
    characters = sum(len(text) for judged in sets for text in judged.texts)
    config = encodings[-1].encoder.without_context
    encoder = DocumentEncoder(config, backbone=load_backbone(config))
    ends = accumulate(len(text) for text in sets[0].texts)
    num_sampled = 1 + sum(end < SAMPLE_CHARACTERS for end in ends)
    sample = [text[:SAMPLE_CHARACTERS] for text in sets[0].texts[:num_sampled]]
    encoder.encode(sample[:1])  # the first pass is slower
    started = time.monotonic()
    tokens = int(encoder.encode(sample).num_tokens.sum())
    seconds = time.monotonic() - started
    share = characters / max(1, sum(map(len, sample)))
    # Pieces that overlap encode a text as often as they cover it.
    passes = sum(
        each.encoder.landmark_interval / each.stride_tokens if each.stride_tokens else 1.0
        for each in encodings
    )
    return Estimate(seconds=passes * share * seconds, encodings=len(encodings), tokens=round(share * tokens))
