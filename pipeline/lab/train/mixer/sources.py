"""Pairs as numbers: the documents, pages and queries of each source, and the vectors they point to.

    source     where pairs come from, the corpus a batch is drawn from
    page       documents of one source under one title, in file order; one without a title is a page by itself
    document   a section of its page: a long sequence joins neighbours, and a query is answered by one of them

Pages are never torn apart: one is in the sample or not, held out or not.

    n documents of a source    p pairs of a source    P documents its contexts are drawn from    D width
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from cairn.pipeline.cluster.sampling import hash_order
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.train.mixer.settings import MixerConfig
from cairn.pipeline.lab.train.mixer.vectors import BaseVectors, ChunkVectors
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.types import ProgressListener
from jaxtyping import Bool, Float32, Int64

NO_TITLE: Final = -1
CONTEXTS_POOLED: Final = 2
"""How many contexts' worth of a source's documents are embedded for contexts: each draw is another half."""
_HOLD_OUT_SEED: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MixerSource:
    """One source; documents count from 0 in file order.

    ``row_n`` and ``title_n`` are rows of the documents' and titles' vectors, ``queries[document]`` those of
    the queries it answers. ``context_P`` are rows of the contexts' vectors: of documents not held out.
    """

    name: str
    row_n: Int64[np.ndarray, " n"]
    title_n: Int64[np.ndarray, " n"]
    mean_nD: Float32[np.ndarray, "n D"]
    pages: tuple[tuple[int, ...], ...]
    page_n: Int64[np.ndarray, " n"]
    queries: tuple[tuple[int, ...], ...]
    is_heldout_n: Bool[np.ndarray, " n"]
    context_P: Int64[np.ndarray, " P"]

    @property
    def num_training_pairs(self) -> int:
        """Count the pairs that are not held out."""
        return sum(
            len(queries)
            for queries, is_heldout in zip(self.queries, self.is_heldout_n.tolist(), strict=True)
            if not is_heldout
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MixerData:
    """All sources, and the vectors they share: unit ones but for those of documents' chunks."""

    sources: tuple[MixerSource, ...]
    documents: ChunkVectors
    contexts: ChunkVectors
    query_QD: Float32[np.ndarray, "Q D"]
    title_TD: Float32[np.ndarray, "T D"]

    @property
    def width(self) -> int:
        """Return the width of the base model's vectors."""
        return self.query_QD.shape[1]


def draw_pairs(pairs: TrainingPairs, config: MixerConfig) -> TrainingPairs:
    """Leave out sources that are too small, and the pairs of others beyond ``max_pairs``, by whole pages.

    Pages are drawn by a hash of the seed; where even the first is too large, its beginning is used. No source
    left raises :class:`SourceError`.
    """
    positions = _by(pairs.sources)
    large = [source for source, own in positions.items() if _is_large_enough(pairs, own, config)]
    if not large:
        largest = max(positions, key=lambda source: len(positions[source]))
        raise SourceError(
            f"training needs a source of at least min_pairs {config.min_pairs} pairs with two documents, "
            "got none: the largest, "
            f"{largest!r}, has {len(positions[largest])}; give more pairs, or lower min_pairs"
        )
    pairs = pairs.take(
        sorted(position for source in large for position in positions[source]), "pair of a source too small"
    )
    if config.max_pairs is None:
        return pairs
    pages = _pages_by_source(pairs)
    kept = [position for source in pages for position in _draw(pages[source], config.max_pairs, config.seed)]
    return pairs.take(sorted(kept), "pair beyond max_pairs of its source")


def embed_sources(
    pairs: TrainingPairs, vectors: BaseVectors, config: MixerConfig, progress: ProgressListener
) -> MixerData:
    """Embed what is not kept of the pairs and lay it out by source.

    A share of each source's pages is held out.
    """
    document_number, query_number = (_numbers(column) for column in (pairs.documents, pairs.queries))
    title_number = _numbers(title for title in pairs.titles if title.strip())
    documents = vectors.embed("document", list(document_number), progress)
    query_QD = vectors.embed("query", list(query_number), progress).means()
    title_TD = vectors.embed("title", list(title_number), progress).means()
    mean_ND = documents.means()
    pages = _pages_by_source(pairs)
    context_number: dict[str, int] = {}
    sources: list[MixerSource] = []
    for name, positions in _by(pairs.sources).items():
        own = _numbers(pairs.documents[position] for position in positions)
        budget = int(config.hold_out * len(positions))
        heldout = {
            pairs.documents[position] for position in _draw(pages[name], budget, _HOLD_OUT_SEED, cuts=False)
        }
        pool = _context_pool([document for document in own if document not in heldout], config)
        context_P = [context_number.setdefault(document, len(context_number)) for document in pool]
        first = {pairs.documents[position]: position for position in reversed(positions)}
        queries: list[dict[int, None]] = [{} for _ in own]
        for position in positions:
            queries[own[pairs.documents[position]]][query_number[pairs.queries[position]]] = None
        source_pages = [
            tuple(dict.fromkeys(own[pairs.documents[position]] for position in page))
            for page in pages[name].values()
        ]
        page_n = np.zeros(len(own), np.int64)
        for number, page in enumerate(source_pages):
            page_n[list(page)] = number
        row_n = np.array([document_number[document] for document in own], np.int64)
        sources.append(
            MixerSource(
                name=name,
                row_n=row_n,
                title_n=np.array(
                    [title_number.get(pairs.titles[first[document]], NO_TITLE) for document in own], np.int64
                ),
                mean_nD=mean_ND[row_n],
                pages=tuple(source_pages),
                page_n=page_n,
                queries=tuple(map(tuple, queries)),
                is_heldout_n=np.array([document in heldout for document in own]),
                context_P=np.array(context_P, np.int64),
            )
        )
    return MixerData(
        sources=tuple(sources),
        documents=documents,
        contexts=vectors.embed("context", list(context_number), progress),
        query_QD=query_QD,
        title_TD=title_TD,
    )


def _context_pool(documents: list[str], config: MixerConfig) -> list[str]:
    """Draw the documents of a source that its contexts are drawn from."""
    order = hash_order(documents, config.seed)[: CONTEXTS_POOLED * config.context_documents]
    return [documents[place] for place in order.tolist()]


def _is_large_enough(pairs: TrainingPairs, positions: Sequence[int], config: MixerConfig) -> bool:
    return (
        len(positions) >= config.min_pairs and len({pairs.documents[position] for position in positions}) > 1
    )


def _pages_by_source(pairs: TrainingPairs) -> dict[str, dict[str, list[int]]]:
    """Return the pairs of each source's pages by the name of the page.

    A document is on the page of its first pair.
    """
    page_of: dict[tuple[str, str], str] = {}
    pages: dict[str, dict[str, list[int]]] = {}
    for position, (source, document, title) in enumerate(
        zip(pairs.sources, pairs.documents, pairs.titles, strict=True)
    ):
        page = page_of.setdefault(
            (source, document), f"title {title}" if title.strip() else f"document {document}"
        )
        pages.setdefault(source, {}).setdefault(page, []).append(position)
    return pages


def _draw(pages: Mapping[str, Sequence[int]], budget: int, seed: int, *, cuts: bool = True) -> list[int]:
    """Return the pairs of drawn pages, at most ``budget``; ``cuts`` begins the first page where none fits."""
    names = list(pages)
    order = [names[place] for place in hash_order(names, seed).tolist()]
    drawn: list[int] = []
    for name in order:
        if len(drawn) + len(pages[name]) <= budget:
            drawn += pages[name]
    return drawn or (list(pages[order[0]][:budget]) if cuts else [])


def _numbers(texts: Iterable[str]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for text in texts:
        numbers.setdefault(text, len(numbers))
    return numbers


def _by(names: Sequence[str]) -> dict[str, list[int]]:
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, []).append(position)
    return positions
