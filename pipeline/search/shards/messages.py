"""What a shard is asked and what it answers; positions are the shard's own, counted from 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from cairn.pipeline.index.bm25 import Totals
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.search.reader import WindowScores
from cairn.pipeline.search.shards.placement import Placement
from cairn.pipeline.types import PlaceBy
from jaxtyping import Float32, Int64


class PartKey(NamedTuple):
    """What one shard of ``num_shards`` has of a generation.

    ``content`` is a hash of what the generation is made of, and of which shard has which document.
    """

    collection: str
    generation: int
    content: str
    place_by: PlaceBy
    num_shards: int
    shard: int


class Question(NamedTuple):
    """A call of :class:`~cairn.pipeline.search.shards.held_parts.ShardPart` for the part that a shard has."""

    shard: int
    key: PartKey
    method: str
    arguments: tuple[Any, ...]


Ask = Callable[[Sequence[Question]], list[Any]]
"""Asks all questions at once, and returns the answers in their order."""


def content_of(generation: Generation, placement: Placement) -> str:
    """Return the hash that tells a generation from another one of the same number, or placed otherwise."""
    files = {name: record.sha256 for name, record in generation.manifest.files.items()}
    return fingerprint(generation=generation.number, files=files, placement=placement.fingerprint)


@dataclass(frozen=True, kw_only=True, slots=True)
class WordTotals:
    """Sums over the collection that BM25 needs: of texts and titles, and of windows of each size."""

    documents: tuple[Totals, Totals]
    passages: Mapping[int, tuple[Totals, Totals]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """A query whose words are scored, with the totals of the collection; passages of ``size`` chunks rank."""

    query: str
    totals: WordTotals
    size: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartScoresAsked:
    """What is to be scored with a search: what the shard finds, and ``known`` documents of it.

    ``parts`` are cosines. Windows of ``window_size`` are scored, None for none. ``min_documents`` are scored
    however long they are.
    """

    known: Int64[np.ndarray, " A"]
    parts: Sequence[str]
    window_size: int | None
    min_documents: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SearchAsked:
    """One search of a shard: the documents and chunks nearest to a vector, None of an index not asked.

    Only ``allowed`` documents count, None for all. ``num_best`` documents and passages are wanted by the
    ``words``, None for none. ``scores`` asks for scores of all that is found.
    """

    vector_V: Float32[np.ndarray, " V"]
    num_documents: int | None
    num_chunks: int | None
    allowed: Int64[np.ndarray, " A"] | None
    words: Words | None
    num_best: int | None
    scores: PartScoresAsked | None


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

    scores_K: Float32[np.ndarray, " K"]
    positions_K: Int64[np.ndarray, " K"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartScores:
    """Scores of candidates, None of what was not asked for."""

    document_N: Float32[np.ndarray, " N"] | None
    chunk_N: Float32[np.ndarray, " N"] | None
    passage_N: Float32[np.ndarray, " N"] | None
    windows: WindowScores | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartFound:
    """The answer to :class:`SearchAsked`; ``scores`` are those of ``positions``, which ascend."""

    documents: Nearest | None
    chunks: Nearest | None
    words: BestWords | None
    positions: Int64[np.ndarray, " N"]
    scores: PartScores | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartMatches:
    """MaxSim of windows, and of the ``best_n`` of them the sums of their chunk vectors."""

    max_sim_W: Float32[np.ndarray, " W"]
    best_n: Int64[np.ndarray, " n"]
    sums_nV: Float32[np.ndarray, "n V"]
