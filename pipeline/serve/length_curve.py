"""The curve of length collapse, from stored vectors: are longer documents more alike than shorter ones?

    lengths 1, 2 to 3, 4 to 7, … tokens ─▶ mean cosine over all pairs of a sample of each

A curve that rises with length means that long documents lie close together and are hard to tell apart; a low,
flat curve is better. It also depends on the topics of long and short documents; ``cairn analyse`` does not,
since it measures pieces of equal texts.

Source: Zhou et al., "Length-Induced Embedding Collapse in Transformer-based Models", figure 1c. Differs:
whole documents, as indexed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from cairn.pipeline.index.generation import Generation
from jaxtyping import Float32, Int64

MAX_SAMPLE: Final = 1_000
MIN_SAMPLE: Final = 10
"""Fewer documents of a length say little: their cosine is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBin:
    """Documents of ``min_tokens`` to ``max_tokens`` tokens.

    ``cosine`` is the mean over pairs, None where there are too few.
    """

    min_tokens: int
    max_tokens: int
    documents: int
    cosine: float | None


def measure_lengths(generation: Generation, visible: Int64[np.ndarray, " A"]) -> list[LengthBin]:
    """Measure the visible documents, in bins whose ends double."""
    tokens_A = generation.num_tokens[visible]
    bin_A = np.frexp(np.maximum(tokens_A, 1).astype(np.float64))[1] - 1
    found: list[LengthBin] = []
    for exponent in range(int(bin_A.min()), int(bin_A.max()) + 1) if len(visible) else ():
        members = visible[bin_A == exponent]
        sample = members[np.linspace(0, len(members) - 1, min(len(members), MAX_SAMPLE)).astype(np.int64)]
        cosine = mean_cosine(generation.documents.reconstruct(sample)) if len(sample) >= MIN_SAMPLE else None
        found.append(
            LengthBin(
                min_tokens=1 << exponent,
                max_tokens=(2 << exponent) - 1,
                documents=len(members),
                cosine=cosine,
            )
        )
    return found


def mean_cosine(vectors_NV: Float32[np.ndarray, "N V"]) -> float:
    """Return the mean cosine over all pairs of N ≥ 2 vectors, none with itself.

    Of unit vectors (‖Σv‖² - N) / (N (N - 1)).
    """
    unit_NV = vectors_NV.astype(np.float64)
    unit_NV /= np.maximum(np.linalg.norm(unit_NV, axis=1, keepdims=True), 1e-12)
    num = len(unit_NV)
    return float((np.square(unit_NV.sum(axis=0)).sum() - num) / (num * (num - 1)))
