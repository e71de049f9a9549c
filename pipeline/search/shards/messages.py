"""What a shard is asked and what it answers; positions are the shard's own, counted from 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from pipeline.index.bm25 import Totals
from pipeline.index.generation import Generation
from pipeline.manifest import fingerprint
from pipeline.search.reader import WindowScores


class PartKey(NamedTuple):
    """Documents ``first`` to ``end`` of a generation; ``content`` is a hash of what it is made of."""

    collection: str
    generation: int
    content: str
    first: int
    end: int


class Question(NamedTuple):
    """A call of :class:`~pipeline.search.shards.shard_part.ShardPart` for the part that a shard has."""

    shard: int
    key: PartKey
    method: str
    arguments: tuple[Any, ...]


Ask = Callable[[Sequence[Question]], list[Any]]
"""Asks all questions at once, and returns the answers in their order."""


def content_of(generation: Generation) -> str:
    """Return the hash that tells a generation from another one of the same number."""
    files = {name: record.sha256 for name, record in generation.manifest.files.items()}
    return fingerprint(generation=generation.number, files=files)


@dataclass(frozen=True, kw_only=True, slots=True)
class WordTotals:
    """Sums that BM25 needs of all shards: of texts and titles, and of windows of each size."""

    documents: tuple[Totals, Totals]
    passages: Mapping[int, tuple[Totals, Totals]]

    @staticmethod
    def sum(parts: Sequence[WordTotals]) -> WordTotals:
        """Return the totals of all parts."""
        return WordTotals(
            documents=_sum([part.documents for part in parts]),
            passages={size: _sum([part.passages[size] for part in parts]) for size in parts[0].passages},
        )


def _sum(pairs: Sequence[tuple[Totals, Totals]]) -> tuple[Totals, Totals]:
    first, second = zip(*pairs, strict=True)
    return reduce(Totals.__add__, first), reduce(Totals.__add__, second)


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """A query whose words are scored, with the totals of all shards."""

    query: str
    totals: WordTotals


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BestWords:
    """A shard's best documents and passages by BM25, and the highest BM25 of passages of each size."""

    documents: Int64[np.ndarray, " A"]
    scores: Float32[np.ndarray, " A"]
    passages: Int64[np.ndarray, " P"]
    passage_scores: Float32[np.ndarray, " P"]
    highs: Mapping[int, float]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Nearest:
    """Scores and positions of the nearest vectors of an index, as it gives them."""

    scores_QK: Float32[np.ndarray, "Q K"]
    positions_QK: Int64[np.ndarray, "Q K"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartScores:
    """Scores of candidates, None of what was not asked for."""

    document_N: Float32[np.ndarray, " N"] | None
    chunk_N: Float32[np.ndarray, " N"] | None
    passage_N: Float32[np.ndarray, " N"] | None
    windows: WindowScores | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartMatches:
    """MaxSim of windows, and of the ``best_n`` of them the sums of their chunk vectors."""

    max_sim_W: Float32[np.ndarray, " W"]
    best_n: Int64[np.ndarray, " n"]
    sums_nV: Float32[np.ndarray, "n V"]
