"""What a mixer learns from: vectors that are embedded once, laid out by source, and batches drawn of them.

    source     where pairs come from, the corpus a batch is drawn from
    page       documents of one source under one title, in file order; one without a title is a page by itself
    document   a section of its page: a long sequence joins neighbours, and a query is answered by one of them

Pages are never torn apart: one is in the sample or not, held out or not.

    seeds       random documents of the source, or in half of the batches the neighbours of a random one
    sequence    a seed by itself, or with its neighbours on the page: 2 to 96 landmarks, drawn on a log scale
    queries     one of each document of a sequence, of at most 6 of a long one
    context     as many documents of the source as when served, its own among them; all of a small source

All that is drawn is drawn from the seed and the step. Held-out batches are made the same way, out of held-out
pages among training ones.

    CACHE/<encoder's fingerprint>/document/<fingerprint of the texts>.npz    keys     16 bytes a text
    CACHE/<encoder's fingerprint>/query/…                                    counts   its chunks
    CACHE/<encoder's fingerprint>/title/…                                    vectors  theirs, float16
    CACHE/<encoder's fingerprint>/context-<tokens>/…

A text is found by its key in whatever file it lies, so other files of pairs, another sample or other judged
texts embed only what is new, and a killed run goes on behind its last block.

    N texts    M chunks    n documents of a source    P documents its contexts are drawn from    D width
    S sequences    L landmarks of the longest    Q queries    C context documents
"""

from __future__ import annotations

import hashlib
import logging
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline import durable
from cairn.pipeline.cluster.sampling import hash_order
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.settings import MixerConfig
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.landmark_mixer import Stretches
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Bool, Float, Float16, Float32, Int64

logger = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1
KEY_BYTES: Final = 16
BLOCK_TEXTS: Final = 2_048
"""Texts that a file holds, and a killed run has to embed again at most."""

Kind = Literal["document", "query", "title", "context"]
_STAGES: Final[Mapping[Kind, str]] = {
    "document": "documents",
    "query": "queries",
    "title": "titles",
    "context": "context documents",
}
_KeptFile = tuple[list[bytes], np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkVectors:
    """Vectors of N texts' chunks; text ``i`` owns ``vectors_MD[offsets_N1[i] : offsets_N1[i + 1]]``."""

    vectors_MD: Float16[np.ndarray, "M D"]
    offsets_N1: Int64[np.ndarray, " N1"]

    def means(self) -> Float32[np.ndarray, "N D"]:
        """Return each text's vector as an ingest makes a document's.

        The normalised sum of its chunks' vectors.
        """
        counts_N = np.diff(self.offsets_N1)
        means_ND = np.zeros((len(counts_N), self.vectors_MD.shape[1]), np.float32)
        for start in range(0, len(counts_N), BLOCK_TEXTS):
            first, end = self.offsets_N1[start], self.offsets_N1[min(start + BLOCK_TEXTS, len(counts_N))]
            block = slice(start, start + BLOCK_TEXTS)
            means_ND[block] = np.add.reduceat(
                unit(self.vectors_MD[first:end]), self.offsets_N1[:-1][block] - first
            )
        return unit(means_ND)


def unit(vectors: Float[np.ndarray, "*rows D"]) -> Float32[np.ndarray, "*rows D"]:
    """Normalise vectors in float32; zeros stay zeros."""
    wide = vectors.astype(np.float32)
    norms = np.linalg.norm(wide, axis=-1, keepdims=True)
    return wide / np.where(norms > 0, norms, 1.0)


class BaseVectors:
    """Embeds the four kinds of texts with one base model; ``folder`` = None keeps nothing.

    A context document has one vector, that of the first stage, as in an ingest with ``context``.
    """

    def __init__(
        self, config: EncoderConfig, folder: Path | None, context: ContextConfig | None = None
    ) -> None:
        self.encoder = DocumentEncoder(config)
        # Titles are read without a prefix, as an encoder with a mixer reads them.
        plain = replace(
            config, document_prefix="", query_prefix="", pool_prefix=False, temperature_by_length=()
        )
        self._titles = DocumentEncoder(plain, backbone=self.encoder.backbone)
        context = context or ContextConfig()
        self._first_stage = ContextEncoder.of(self.encoder.backbone, config, context)
        self._context_tokens = context.max_document_tokens
        key = fingerprint(format=FORMAT_VERSION, encoder=self.encoder.fingerprint, precision=config.precision)
        self._folder = None if folder is None else folder / key

    def embed(
        self, kind: Kind, texts: Sequence[str], progress: ProgressListener = silent_progress
    ) -> ChunkVectors:
        """Return the vectors of different texts in the order given, embedding those that are not kept."""
        keys = [_key(text) for text in texts]
        number = {key: place for place, key in enumerate(keys)}
        found: list[np.ndarray | None] = [None] * len(texts)
        for kept_keys, counts_n, vectors_mD in self._kept(kind, number.keys().__contains__):
            ends_n = np.cumsum(counts_n)
            for key, end, count in zip(kept_keys, ends_n.tolist(), counts_n.tolist(), strict=True):
                if key in number:
                    found[number[key]] = vectors_mD[end - count : end]
        missing = [place for place, vectors in enumerate(found) if vectors is None]
        for start in range(0, len(missing), BLOCK_TEXTS):
            places = missing[start : start + BLOCK_TEXTS]
            counts_n, vectors_mD = self._encode(kind, [texts[place] for place in places])
            self.keep(kind, [texts[place] for place in places], counts_n, vectors_mD)
            for place, vectors in zip(places, np.split(vectors_mD, np.cumsum(counts_n)[:-1]), strict=True):
                found[place] = vectors
            progress(_STAGES[kind], start + len(places), len(missing), "texts")
        parts = [vectors for vectors in found if vectors is not None]
        offsets_N1 = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        width = self.encoder.vector_dim
        return ChunkVectors(
            vectors_MD=np.concatenate([np.zeros((0, width), np.float16), *parts]), offsets_N1=offsets_N1
        )

    def keep(
        self,
        kind: Kind,
        texts: Sequence[str],
        counts_N: Int64[np.ndarray, " N"],
        vectors_MD: Float16[np.ndarray, "M D"],
    ) -> None:
        """Keep vectors of texts, each with so many chunks, where :meth:`embed` finds them.

        Whole or not at all.
        """
        if self._folder is None:
            return
        keys_NB = np.frombuffer(b"".join(map(_key, texts)), np.uint8).reshape(-1, KEY_BYTES)
        path = self._folder / self._subfolder(kind) / f"{hashlib.sha256(keys_NB.tobytes()).hexdigest()}.npz"
        with durable.storage_errors(f"keeping vectors in {path.parent}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with durable.replacing(path) as temporary, temporary.open("wb") as stream:
                np.savez(
                    stream,
                    keys=keys_NB,
                    counts=np.asarray(counts_N, np.int64),
                    vectors=np.asarray(vectors_MD, np.float16),
                )

    def _encode(
        self, kind: Kind, texts: Sequence[str]
    ) -> tuple[Int64[np.ndarray, " N"], Float16[np.ndarray, "M D"]]:
        if kind == "query":
            return np.ones(len(texts), np.int64), self.encoder.encode_queries(texts).astype(np.float16)
        if kind == "context":
            return np.ones(len(texts), np.int64), unit(self._first_stage.embed(texts)).astype(np.float16)
        encoded = (self._titles if kind == "title" else self.encoder).encode(texts)
        return np.diff(encoded.chunk_offsets), encoded.chunk_vectors_MV.astype(np.float16)

    def _kept(self, kind: Kind, is_wanted: Callable[[bytes], bool]) -> Iterator[_KeptFile]:
        for path in sorted((self._folder / self._subfolder(kind)).glob("*.npz")) if self._folder else ():
            if (file := _read_kept(path, is_wanted)) is not None:
                yield file

    def _subfolder(self, kind: Kind) -> str:
        return f"{kind}-{self._context_tokens}" if kind == "context" else kind


def _read_kept(path: Path, is_wanted: Callable[[bytes], bool]) -> _KeptFile | None:
    """Return the keys, counts and vectors of a file; None where it is damaged or holds nothing wanted."""
    try:
        # The stream is ours: numpy leaves a damaged file open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            keys = [row.tobytes() for row in arrays["keys"]]
            if not any(map(is_wanted, keys)):
                return None
            counts_N, vectors_MD = arrays["counts"], arrays["vectors"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        keys, counts_N, vectors_MD = [], np.zeros(0, np.int64), None
    if vectors_MD is None or len(keys) != len(counts_N) or counts_N.sum() != len(vectors_MD):
        logger.warning("%s is damaged; its texts are embedded again", path.name)
        return None
    return keys, counts_N, vectors_MD


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


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
