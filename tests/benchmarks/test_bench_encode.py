"""Tokens a second of the encoder beside sentence-transformers' default ``encode``: same model, process, thread count and passages.

The passages are taken in slices, each encoded by both in turn, so that a busy moment of the machine falls on both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import EncoderConfig
from pipeline.encode.documents import DocumentEncoder
from pipeline.encode.queries import TextQueryEncoder
from pipeline.model.embedded_weights import embedded_folder
from pipeline.model.precision import has_native_bf16

pytestmark = pytest.mark.bench

PASSAGES = 5_000
SLICES = 10
WHOLE_PASSAGE_TOKENS = 254
"""Each passage one chunk, as sentence-transformers pools it: the same vectors on both sides."""


def test_bench_encode_against_sentence_transformers(sample_passages: Callable[[int], list[str]]) -> None:
    from sentence_transformers import SentenceTransformer

    texts = sample_passages(PASSAGES)
    published = SentenceTransformer(str(embedded_folder()), device="cpu")
    encoder = DocumentEncoder(EncoderConfig(landmark_interval=WHOLE_PASSAGE_TOKENS))
    encoder.encode(texts[:50])
    published.encode(texts[:50])
    ours, theirs, tokens, cosines = [], [], 0, []
    for number in range(SLICES):
        part = texts[number::SLICES]
        our_seconds, encoded = _timed(lambda part=part: encoder.encode(part))
        their_seconds, vectors = _timed(lambda part=part: published.encode(part))
        ours.append(our_seconds)
        theirs.append(their_seconds)
        tokens += int(encoded.num_tokens.sum())
        is_whole = np.diff(encoded.chunk_offsets) == 1
        cosines.append(float((encoded.document_vectors_NV * vectors).sum(axis=1)[is_whole].min()))
    slices = sorted(their / our for our, their in zip(ours, theirs, strict=True))
    print(f"\n{len(texts)} passages, {tokens / len(texts):.0f} tokens on average, {torch.get_num_threads()} thread(s), ", end="")
    print(f"native bf16: {has_native_bf16(torch.device('cpu'))}")
    print(f"ours {tokens / sum(ours):.0f} tokens/s, sentence-transformers {tokens / sum(theirs):.0f} tokens/s")
    print(
        f"ratio = {sum(theirs) / sum(ours):.2f}  (slices {slices[0]:.2f} to {slices[-1]:.2f}; goal >= 3)  least cosine {min(cosines):.6f}"
    )
    assert min(cosines) >= 0.999


def test_bench_one_query() -> None:
    encoder = TextQueryEncoder(EncoderConfig())
    seconds = [_timed(lambda: encoder.encode_queries(["how do I reverse a list while iterating over it"]))[0] for _ in range(100)]
    print(f"\none query: median {1e3 * statistics.median(seconds):.1f} ms, best {1e3 * min(seconds):.1f} ms")


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result
