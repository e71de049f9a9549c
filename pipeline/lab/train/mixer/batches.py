"""Batches a mixer learns from: sequences of neighbouring documents of one source, queries on some, a context.

    seeds       random documents of the source, or in half of the batches the neighbours of a random one
    sequence    a seed by itself, or with its neighbours on the page: 2 to 96 landmarks, drawn on a log scale
    queries     one of each document of a sequence, of at most 6 of a long one
    context     as many documents of the source as when served, its own among them; all of a small source

All that is drawn is drawn from the seed and the step. Held-out batches are made the same way, out of held-out
pages among training ones.

    S sequences    L landmarks of the longest    Q queries    C context documents    D width
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.lab.train.mixer.settings import MixerConfig
from cairn.pipeline.lab.train.mixer.sources import NO_TITLE, MixerData, MixerSource
from cairn.pipeline.lab.train.mixer.vectors import unit
from cairn.pipeline.model.landmark_mixer import Stretches
from jaxtyping import Float32, Int64

MAX_GROUPED_LANDMARKS: Final = 96
MAX_LANDMARKS: Final = 192
"""A sequence ends before it grows longer; of a longer document its beginning is read."""
MAX_SEQUENCE_QUERIES: Final = 6
NEIGHBOURS_SHARE: Final = 0.5
SEEDS_OF_QUERIES: Final = 3
"""Seeds that stand ready for each query; most are on sequences already."""
HELDOUT_DOCUMENTS: Final = 32
HELDOUT_CANDIDATES: Final = 128
"""Documents of a source that are asked for, and those they stand among."""
NO_DOCUMENT: Final = -1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MixerBatch:
    """What one step sees; ``document_SL`` numbers a landmark's document, -1 where there is none.

    ``answer_Q`` is the document that answers a query. ``answer_QD`` are the base model's vectors of these
    documents.
    """

    source: str
    stretches: Stretches
    document_SL: Int64[torch.Tensor, "S L"]
    query_QD: Float32[torch.Tensor, "Q D"]
    answer_Q: Int64[torch.Tensor, " Q"]
    sequence_Q: Int64[torch.Tensor, " Q"]
    answer_QD: Float32[torch.Tensor, "Q D"]
    context_CD: Float32[torch.Tensor, "C D"] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sequence:
    """Documents in the order of their page, grown around ``seed``."""

    seed: int
    documents: tuple[int, ...]


class BatchMaker:
    """Draws batches; sources are drawn in proportion to the square root of their pairs."""

    def __init__(self, data: MixerData, config: MixerConfig) -> None:
        self._data, self._config = data, config
        self._training = [np.flatnonzero(~source.is_heldout_n) for source in data.sources]
        self._shares = np.array([source.num_training_pairs**0.5 for source in data.sources])
        self._shares /= self._shares.sum()

    def training_batch(self, step: int) -> MixerBatch:
        """Draw the batch of a step."""
        config, generator = self._config, np.random.default_rng([self._config.seed, step])
        number = int(generator.choice(len(self._shares), p=self._shares))
        source = self._data.sources[number]
        seeds = self._seeds(source, self._training[number], generator)
        is_grouped = generator.random() < config.grouped_share
        sequences: list[_Sequence] = []
        queries: list[tuple[int, int, int]] = []
        for sequence in self._sequences(source, seeds, generator, is_grouped=is_grouped):
            queries += [
                (self._query_of(source, document, generator), document, len(sequences))
                for document in _asked(sequence, generator)
            ]
            sequences.append(sequence)
            if len(queries) >= config.batch_queries:
                break
        shows_title_S = generator.random(len(sequences)) >= config.title_absence
        context = None if generator.random() < config.context_absence else self._context(source, generator)
        return self._batch(source, sequences, queries, shows_title_S, context)

    def heldout_batches(self) -> Iterator[tuple[MixerBatch, float]]:
        """Return the batches that say how good a mixer is, and the share of training each stands for.

        Every source with held-out pages has two, of documents by themselves and of sequences; other documents
        of the source stand among them and are the context.
        """
        for number, source in enumerate(self._data.sources):
            if not source.is_heldout_n.any():
                continue
            for is_grouped in (False, True):
                generator = np.random.default_rng([self._config.seed, number])
                asked = generator.permutation(np.flatnonzero(source.is_heldout_n))[:HELDOUT_DOCUMENTS]
                others = generator.permutation(self._training[number])[: HELDOUT_CANDIDATES - len(asked)]
                sequences = list(
                    self._sequences(
                        source, [*asked.tolist(), *others.tolist()], generator, is_grouped=is_grouped
                    )
                )
                is_asked = set(asked.tolist())
                queries = [
                    (source.queries[document][0], document, place)
                    for place, sequence in enumerate(sequences)
                    for document in sequence.documents
                    if document in is_asked
                ]
                context = self._context(source, generator)
                yield (
                    self._batch(source, sequences, queries, np.ones(len(sequences), bool), context),
                    float(self._shares[number]),
                )

    def sample_vectors(self, num_vectors: int) -> Float32[np.ndarray, "N D"]:
        """Draw about so many unit vectors of chunks and as many of queries, from each source its share."""
        generator = np.random.default_rng(self._config.seed)
        offsets_N1, drawn = self._data.documents.offsets_N1, list[np.ndarray]()
        for source, share in zip(self._data.sources, self._shares.tolist(), strict=True):
            wanted = max(1, round(share * num_vectors))
            documents = source.row_n[generator.integers(len(source.row_n), size=wanted)]
            chunks = offsets_N1[documents] + (
                generator.random(wanted) * np.diff(offsets_N1)[documents]
            ).astype(np.int64)
            queries = np.concatenate([np.array(own, np.int64) for own in source.queries])
            queries = queries[generator.integers(len(queries), size=wanted)]
            drawn += [unit(self._data.documents.vectors_MD[chunks]), self._data.query_QD[queries]]
        return np.concatenate(drawn)

    def _seeds(
        self, source: MixerSource, training: Int64[np.ndarray, " n"], generator: np.random.Generator
    ) -> list[int]:
        wanted = min(SEEDS_OF_QUERIES * self._config.batch_queries, len(training))
        if generator.random() < NEIGHBOURS_SHARE:
            anchor = training[generator.integers(len(training))]
            cosine_n = source.mean_nD[training] @ source.mean_nD[anchor]
            training = training[np.argpartition(-cosine_n, wanted - 1)[:wanted]]
        return generator.permutation(training)[:wanted].tolist()

    def _sequences(
        self, source: MixerSource, seeds: Iterable[int], generator: np.random.Generator, *, is_grouped: bool
    ) -> Iterator[_Sequence]:
        used: set[int] = set()
        for seed in seeds:
            if seed in used:
                continue
            documents = self._grown(source, seed, used, generator) if is_grouped else (seed,)
            used.update(documents)
            yield _Sequence(seed=seed, documents=documents)

    def _grown(
        self, source: MixerSource, seed: int, used: set[int], generator: np.random.Generator
    ) -> tuple[int, ...]:
        """Grow a sequence to both sides until it is long enough, its page ends, or others hold the rest."""
        page = source.pages[source.page_n[seed]]
        low = high = page.index(seed)
        length = self._length(source, seed)
        wanted = int(2 ** generator.uniform(1, np.log2(MAX_GROUPED_LANDMARKS)))
        while length < wanted:
            free = [
                place for place in (low - 1, high + 1) if 0 <= place < len(page) and page[place] not in used
            ]
            free = [place for place in free if length + self._length(source, page[place]) <= MAX_LANDMARKS]
            if not free:
                break
            place = free[int(generator.integers(len(free)))]
            low, high = min(low, place), max(high, place)
            length += self._length(source, page[place])
        return page[low : high + 1]

    def _length(self, source: MixerSource, document: int) -> int:
        first, end = self._data.documents.offsets_N1[source.row_n[document] :][:2].tolist()
        return min(end - first, MAX_LANDMARKS)

    @staticmethod
    def _query_of(source: MixerSource, document: int, generator: np.random.Generator) -> int:
        queries = source.queries[document]
        return queries[int(generator.integers(len(queries)))]

    def _context(
        self, source: MixerSource, generator: np.random.Generator
    ) -> Float32[torch.Tensor, "C D"] | None:
        drawn_C = generator.permutation(source.context_P)[: self._config.context_documents]
        return torch.from_numpy(unit(self._data.contexts.vectors_MD[drawn_C])) if len(drawn_C) else None

    def _batch(
        self,
        source: MixerSource,
        sequences: list[_Sequence],
        queries: list[tuple[int, int, int]],
        shows_title_S: np.ndarray,
        context_CD: Float32[torch.Tensor, "C D"] | None,
    ) -> MixerBatch:
        query_Q, answer_Q, sequence_Q = (np.array(column, np.int64) for column in zip(*queries, strict=True))
        stretches, document_SL = self._stretches(source, sequences, shows_title_S)
        return MixerBatch(
            source=source.name,
            stretches=stretches,
            document_SL=document_SL,
            query_QD=torch.from_numpy(self._data.query_QD[query_Q]),
            answer_Q=torch.from_numpy(answer_Q),
            sequence_Q=torch.from_numpy(sequence_Q),
            answer_QD=torch.from_numpy(source.mean_nD[answer_Q]),
            context_CD=context_CD,
        )

    def _stretches(
        self, source: MixerSource, sequences: list[_Sequence], shows_title_S: np.ndarray
    ) -> tuple[Stretches, Int64[torch.Tensor, "S L"]]:
        lengths = [
            [self._length(source, document) for document in sequence.documents] for sequence in sequences
        ]
        longest, width = max(map(sum, lengths)), self._data.width
        x_SLD = np.zeros((len(sequences), longest, width), np.float32)
        title_SD = np.zeros((len(sequences), width), np.float32)
        document_SL = np.full((len(sequences), longest), NO_DOCUMENT, np.int64)
        for place, (sequence, own) in enumerate(zip(sequences, lengths, strict=True)):
            first = self._data.documents.offsets_N1[source.row_n[list(sequence.documents)]]
            rows = np.concatenate(
                [np.arange(start, start + length) for start, length in zip(first.tolist(), own, strict=True)]
            )
            x_SLD[place, : len(rows)] = unit(self._data.documents.vectors_MD[rows])
            document_SL[place, : len(rows)] = np.repeat(sequence.documents, own)
            title = source.title_n[sequence.seed]
            if title != NO_TITLE and shows_title_S[place]:
                title_SD[place] = self._data.title_TD[title]
        x = torch.from_numpy(x_SLD)
        stretches = Stretches(
            x_SLD=x,
            is_landmark_SL=torch.from_numpy(document_SL != NO_DOCUMENT),
            mean_SD=F.normalize(x.sum(1), dim=-1),
            num_landmarks_S=torch.tensor([float(sum(own)) for own in lengths]),
            title_SD=torch.from_numpy(title_SD),
        )
        return stretches, torch.from_numpy(document_SL)


def _asked(sequence: _Sequence, generator: np.random.Generator) -> list[int]:
    """Return the documents of a sequence that queries are for: all, or of many the seed and some others."""
    documents = sequence.documents
    if len(documents) <= MAX_SEQUENCE_QUERIES:
        return list(documents)
    others = [document for document in documents if document != sequence.seed]
    return [sequence.seed, *generator.permutation(others)[: MAX_SEQUENCE_QUERIES - 1].tolist()]
