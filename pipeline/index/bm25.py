"""BM25, as documents and passages are scored by it.

    BM25(text) = Σ idf(t) · f · (k1 + 1) / (f + k1 · (1 - b + b · length / average length))
    idf(t)     = ln(1 + (N - n + ½) / (n + ½))

    f: count of t in the text      n: texts that hold t, of N      k1 = 1.2, b = 0.75

Every text with a word of the query is scored, so that no score depends on how the collection was written or
on who else is a candidate. Source: Robertson & Zaragoza 2009, "The Probabilistic Relevance Framework: BM25
and Beyond".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64, Shaped

K1, B = 1.2, 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Texts of one kind: how many there are, how long they are together, how many hold each term asked for.

    Totals of the parts of a corpus are added, so that each part scores its texts as the whole would.
    """

    texts: int
    length: int
    holding: Mapping[str, int]

    @property
    def average_length(self) -> float:
        """Return the mean length, 1 of no texts."""
        return self.length / self.texts if self.texts else 1.0

    def __add__(self, other: Totals) -> Totals:
        """Return the totals of two parts, asked for the same terms."""
        return Totals(
            texts=self.texts + other.texts,
            length=self.length + other.length,
            holding={term: count + other.holding[term] for term, count in self.holding.items()},
        )


def length_penalty(lengths_N: Shaped[np.ndarray, " N"], average: float) -> Float32[np.ndarray, " N"]:
    """Return k1 · (1 - b + b · length / average length) of each text."""
    return (K1 * (1.0 - B + B * lengths_N / max(average, 1.0))).astype(np.float32)


def add_term(
    scores_N: Float32[np.ndarray, " N"],
    texts_A: Int64[np.ndarray, " A"] | slice,
    counts_A: Shaped[np.ndarray, " A"],
    penalty_N: Float32[np.ndarray, " N"],
    weight: np.float32,
) -> None:
    """Add a word to the scores of the texts that hold it, each named once."""
    found = counts_A.astype(np.float32, copy=False)
    share = weight * found
    share /= found + penalty_N[texts_A]
    scores_N[texts_A] += share


def term_weight(repeats: int, num_holding: int, num_texts: int) -> np.float32:
    """Return idf(t) · (k1 + 1), for each time the query has the word."""
    idf = math.log(1.0 + (num_texts - num_holding + 0.5) / (num_holding + 0.5))
    return np.float32(repeats * idf * (K1 + 1.0))
