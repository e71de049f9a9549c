"""A retrieval set under one encoder: the record that says how, and the vectors with their cost.

    encoding = encoder settings + context (none, random, corpus) + titles in front of chunks? + overlapping
    chunks?

Two systems with the same encoding share one pass of the encoder. Titles in front and overlapping chunks are
what a RAG pipeline does: every chunk is encoded as a text of its own, title and line break first; its span
stays that of the chunk. Overlapping chunks begin every ``stride_tokens`` tokens.

The contexts an encoder is evaluated with: the corpus's own, as an ingest draws it, and a random one.

A random context is as many documents of random words of the vocabulary, embedded like any other (Morris &
Rush 2024 compare with random strings): what is gained beyond it comes from the corpus and not from having
read something.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from cairn.pipeline.cluster.assignment import assign
from cairn.pipeline.cluster.asymmetric_kmeans import train_clusters
from cairn.pipeline.cluster.queries import query_side
from cairn.pipeline.cluster.sampling import sample_rows
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig
from cairn.pipeline.context.store import ContextSet, build_context
from cairn.pipeline.encode.documents import TokenRows, fitted_codebook
from cairn.pipeline.encode.encoder import Encoder, load_cutter, open_encoder
from cairn.pipeline.encode.encoder_fit import prefixes_of
from cairn.pipeline.encode.given import GivenEncoder
from cairn.pipeline.encode.tokenization import tokenize
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.kept_arrays import kept_arrays
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.document_encoder import first_dims
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.landmarks import chunk_spans, split_into_chunks
from cairn.pipeline.model.static_embeddings import StaticEmbedder, fit_static
from cairn.pipeline.ragged import ranges
from cairn.pipeline.types import ProgressListener, QueryTokens
from jaxtyping import Float32, Int64

RANDOM_TOKENS: Final = 64
"""Length of a random document: that of a chunk."""


def corpus_context(
    judged: RetrievalSet, config: ContextConfig, backbone: Backbone, encoder: EncoderConfig
) -> ContextSet:
    """Cluster the documents and draw the context from them; queries of the set play no part."""
    sample = _sample(judged)
    titles, texts = (sample.column(name).to_pylist() for name in ("title", "text"))
    table, tokenizer = backbone.token_embeddings, backbone.tokenizer
    fit = fit_static(table, tokenizer, texts)
    embedder = StaticEmbedder(table, tokenizer, fit)
    phi_NV = embedder.embed(texts)
    psi_NV = embedder.embed(query_side(titles, [None] * len(texts), texts))
    clusters = train_clusters(
        phi_NV, psi_NV, ClusterConfig(), surrogate_fingerprint=embedder.fingerprint, surrogate_state=fit
    )
    return _build(sample, assign(clusters, phi_NV, psi_NV), config, backbone, encoder)


def random_context(
    judged: RetrievalSet, config: ContextConfig, backbone: Backbone, encoder: EncoderConfig
) -> ContextSet:
    """Make as many documents of random words as the corpus's context has."""
    generator = np.random.default_rng(config.seed)
    num_documents = min(config.context_documents, len(judged.doc_ids))
    ids = generator.integers(0, backbone.tokenizer.get_vocab_size(), (num_documents, RANDOM_TOKENS)).tolist()
    texts = [backbone.tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    names = [f"random-{number}" for number in range(num_documents)]
    sample = _table(names, [""] * num_documents, texts)
    return _build(sample, np.zeros(num_documents, np.int32), config, backbone, encoder)


def _sample(judged: RetrievalSet) -> pa.Table:
    """Return the documents' openings, as an ingest samples them."""
    config = ClusterConfig()
    documents = _table(judged.doc_ids, judged.titles, judged.texts)
    return sample_rows([documents], config.max_sample_documents, config.seed)


def _table(doc_ids: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> pa.Table:
    return pa.table(
        {
            "doc_id": pa.array(doc_ids, pa.string()),
            "title": pa.array(titles, pa.large_string()),
            "text": pa.array(texts, pa.large_string()),
            "content_sha256": [hashlib.sha256(text.encode()).hexdigest() for text in texts],
        }
    )


def _build(
    sample: pa.Table,
    cluster_N: np.ndarray,
    config: ContextConfig,
    backbone: Backbone,
    encoder: EncoderConfig,
) -> ContextSet:
    first_stage = ContextEncoder.of(backbone, encoder, config)
    return build_context(sample, cluster_N, config, first_stage.embed, first_stage.fingerprint)


ContextKind = Literal["none", "random", "corpus"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How a corpus is encoded; two equal ones are encoded once.

    ``context`` says whose the context is that the encoder's settings ask for, ``none`` where they ask for
    none. ``stride_tokens`` divides the encoder's landmark interval; None: chunks do not overlap.
    ``vector_column`` is where the set has its own vectors, which stand in place of encoded ones.
    """

    encoder: EncoderConfig
    context: ContextKind = "none"
    has_titles: bool = False
    stride_tokens: int | None = None
    vector_column: str | None = None

    def __post_init__(self) -> None:
        assert self.encoder.use_context == (self.context != "none"), (
            "a context goes with settings that use it"
        )

    @property
    def has_pieces(self) -> bool:
        """Say whether every chunk is encoded as a text of its own."""
        return self.has_titles or self.stride_tokens is not None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedSet:
    """Vectors of N documents, their M chunks and Q queries, L2-normalised; spans are characters of the text.

    With a codebook there are codes of chunks, of titles in each document's first chunk, and the
    tokens of queries. ``encode_seconds`` is the encoder's time for the documents, context included;
    ``tokens`` are those it read.
    """

    document_vectors_NV: Float32[np.ndarray, "N V"]
    chunk_vectors_MV: Float32[np.ndarray, "M V"]
    query_vectors_QV: Float32[np.ndarray, "Q V"]
    chunk_offsets: Int64[np.ndarray, " N1"]
    start_char: Int64[np.ndarray, " M"]
    end_char: Int64[np.ndarray, " M"]
    tokens: int
    encode_seconds: float
    query_seconds: float
    chunk_codes: TokenRows | None = None
    title_codes: TokenRows | None = None
    query_tokens: Sequence[QueryTokens] = ()
    lines: Sequence[str] | None = None

    @property
    def chunk_document(self) -> Int64[np.ndarray, " M"]:
        """Return the document each chunk belongs to."""
        return np.repeat(np.arange(len(self.chunk_offsets) - 1), np.diff(self.chunk_offsets))


KEPT: Final = ("document_vectors_NV", "chunk_vectors_MV", "chunk_offsets", "start_char", "end_char")
"""What is kept of any encoded set, and of a batch of documents."""


def build_encoder(
    judged: RetrievalSet, encoding: Encoding, context_config: ContextConfig
) -> tuple[Encoder, float]:
    """Return the encoder with its context, and the seconds the context took."""
    config = encoding.encoder
    backbone = load_cutter(config)
    started = time.monotonic()
    context = context_for(judged, encoding, context_config, backbone)
    codebook = None if encoding.has_pieces else fitted_codebook(_sample(judged), config, context, backbone)
    return open_encoder(config, context, backbone, codebook), time.monotonic() - started


def encode_set(
    judged: RetrievalSet,
    encoding: Encoding,
    encoder: Encoder,
    progress: ProgressListener,
    context_seconds: float = 0.0,
    cache: Path | None = None,
) -> EncodedSet:
    """Encode documents and queries of a set.

    ``cache`` is a folder that keeps the documents, in a file named by everything that moves a vector in it.
    A long table that was killed goes on with what it had encoded, and a new way to rank costs no encoding.
    Times are kept with the vectors: they are those of the run that encoded.
    """
    key = fingerprint(
        encoder=encoder.fingerprint,
        precision=encoding.encoder.precision,
        has_titles=encoding.has_titles,
        stride_tokens=encoding.stride_tokens,
        late=None if encoder.token_codebook is None else encoder.token_codebook.fingerprint,
        texts=text_digest(judged.texts),
        titles=text_digest(judged.titles if encoding.has_titles or encoder.reads_titles else ()),
        names=KEPT,
        **({} if encoding.has_pieces else {"chunks": "shown"}),
    )
    path = None if cache is None or judged.given is not None else cache / f"{key}.safetensors"
    if cache is not None and encoding.encoder.describe:
        cache.mkdir(parents=True, exist_ok=True)
        encoder.keep_paid(cache / "paid.sqlite")
    kept = kept_arrays(
        path, key, partial(encoded_arrays, encoder, judged, encoding, progress, context_seconds)
    )
    codes = {
        name: TokenRows(rows=kept[name], offsets=kept[f"{name}_offsets"]) if name in kept else None
        for name in ("chunk_codes", "title_codes")
    }
    started, tokens = time.monotonic(), []
    if encoder.token_codebook is None:
        queries_QV = encoder.encode_queries(judged.queries)
    else:
        queries_QV, tokens = encoder.encode_query_tokens(judged.queries)
    if judged.given is not None:
        queries_QV = judged.given.queries_QV
    return EncodedSet(
        **{name: kept[name] for name in KEPT},
        chunk_codes=codes["chunk_codes"],
        title_codes=codes["title_codes"],
        tokens=int(kept["tokens"][0]),
        encode_seconds=float(kept["seconds"][0]),
        lines=kept["lines"].tobytes().decode().split("\n") if "lines" in kept else None,
        query_vectors_QV=queries_QV,
        query_seconds=time.monotonic() - started,
        query_tokens=tokens,
    )


def encoded_arrays(
    encoder: Encoder,
    judged: RetrievalSet,
    encoding: Encoding,
    progress: ProgressListener,
    context_seconds: float,
) -> Mapping[str, np.ndarray]:
    """Encode the documents of a set into what is kept of them."""
    started, tokens = time.monotonic(), 0

    def count(more: int) -> None:
        nonlocal tokens
        tokens += more
        progress("encode", tokens, None, "tokens")

    arrays: dict[str, np.ndarray]
    texts = judged.texts
    if encoding.has_pieces:
        assert not isinstance(encoder, GivenEncoder), "given vectors are those of passages"
        pieces = cut_pieces(encoder.backbone, judged.titles, texts, encoding)
        whole = open_encoder(row_settings(encoding, encoder.backbone), None, encoder.backbone)
        chunk_MV = whole.encode(pieces.texts, count).document_vectors_NV
        sums_NV = np.add.reduceat(chunk_MV, pieces.offsets[:-1], axis=0)
        columns = (first_dims(sums_NV, chunk_MV.shape[1]), chunk_MV)
        arrays = dict(zip(KEPT, (*columns, pieces.offsets, pieces.start_char, pieces.end_char), strict=True))
    else:
        if isinstance(encoder, GivenEncoder):
            assert judged.given is not None, "a set without vectors is encoded"
            read = None if encoder.token_codebook is None else count  # nothing is read for given vectors
            encoded = encoder.encode(texts, read, titles=judged.titles, given=judged.given.documents)
        else:
            encoded = encoder.encode(texts, count, titles=judged.titles)
        arrays = {name: getattr(encoded, name) for name in KEPT}
        if encoded.lines is not None:  # none holds a line break
            arrays["lines"] = np.frombuffer("\n".join(encoded.lines).encode(), np.uint8)
        if encoded.chunk_tokens is not None and encoded.title_tokens is not None:
            owner_M = np.full(int(encoded.chunk_offsets[-1]), -1)
            owner_M[encoded.chunk_offsets[:-1]] = np.arange(len(encoded.chunk_offsets) - 1)
            titles = encoded.title_tokens.take(owner_M)
            for name, codes in (("chunk_codes", encoded.chunk_tokens), ("title_codes", titles)):
                arrays |= {name: codes.rows, f"{name}_offsets": codes.offsets}
    seconds = context_seconds + time.monotonic() - started
    return {**arrays, "tokens": np.array([tokens]), "seconds": np.array([seconds])}


def row_settings(encoding: Encoding, backbone: Backbone) -> EncoderConfig:
    """Return the settings of rows; a piece is one, with room for the longest title, else the mean of two."""
    config = encoding.encoder
    if not encoding.has_pieces:
        return config
    prefix_tokens = max(len(prefix.ids) for prefix in prefixes_of(config, backbone))
    room = min(config.window_tokens, backbone.max_positions) - 2 - prefix_tokens
    return replace(config, landmark_interval=room)


def only_cut(judged: RetrievalSet, encoding: Encoding) -> EncodedSet:
    """Cut the documents of a set into pieces for BM25 alone: the vectors have no dimensions."""
    pieces = cut_pieces(load_cutter(encoding.encoder), judged.titles, judged.texts, encoding)
    counts = len(judged.texts), len(pieces.texts), len(judged.queries)
    document_NV, chunk_MV, query_QV = (np.zeros((count, 0), np.float32) for count in counts)
    return EncodedSet(
        document_vectors_NV=document_NV,
        chunk_vectors_MV=chunk_MV,
        query_vectors_QV=query_QV,
        chunk_offsets=pieces.offsets,
        start_char=pieces.start_char,
        end_char=pieces.end_char,
        tokens=0,
        encode_seconds=0.0,
        query_seconds=0.0,
    )


def context_for(
    judged: RetrievalSet, encoding: Encoding, context_config: ContextConfig, backbone: Backbone
) -> ContextSet | None:
    """Return the context that an encoding asks for, drawn for this set."""
    if encoding.context == "none":
        return None
    make = random_context if encoding.context == "random" else corpus_context
    return make(judged, context_config, backbone, encoding.encoder)


class Pieces(NamedTuple):
    """M pieces of N texts: those of text n are ``offsets[n]`` to ``offsets[n + 1]``, spans are characters."""

    texts: list[str]
    offsets: Int64[np.ndarray, " N1"]
    start_char: Int64[np.ndarray, " M"]
    end_char: Int64[np.ndarray, " M"]


def cut_pieces(backbone: Backbone, titles: Sequence[str], texts: Sequence[str], encoding: Encoding) -> Pieces:
    """Cut texts into pieces of the encoder's landmark interval, which begin every ``stride_tokens``."""
    interval = encoding.encoder.landmark_interval
    stride = encoding.stride_tokens or interval
    tokens = tokenize(backbone.tokenizer, texts)
    chunks = split_into_chunks(tokens.breaks, tokens.text_offsets, stride)
    start, end = chunk_spans(chunks, tokens.start_char, np.fromiter(map(len, texts), np.int64, len(texts)))
    # Windows slide by one chunk; a text with fewer is one window.
    size, num_chunks_N = interval // stride, np.diff(chunks.chunk_offsets)
    num_windows_N = np.maximum(num_chunks_N - size + 1, 1)
    first_W = ranges(chunks.chunk_offsets[:-1], num_windows_N)
    end_W = first_W + np.repeat(np.minimum(size, num_chunks_N), num_windows_N)
    start, end = start[first_W], end[end_W - 1]
    offsets = np.concatenate([[0], np.cumsum(num_windows_N)])
    return Pieces(
        piece_texts(titles if encoding.has_titles else None, texts, offsets, start, end), offsets, start, end
    )


def piece_texts(
    titles: Sequence[str] | None,
    texts: Sequence[str],
    offsets: Int64[np.ndarray, " N1"],
    start_M: Int64[np.ndarray, " M"],
    end_M: Int64[np.ndarray, " M"],
) -> list[str]:
    """Return the text of every piece, with ``titles`` its document's title and a line break first."""
    document_M = np.repeat(np.arange(len(texts)), np.diff(offsets)).tolist()
    heads = [f"{title}\n" if title else "" for title in titles or [""] * len(texts)]
    return [
        heads[document] + texts[document][start:end]
        for document, start, end in zip(document_M, start_M.tolist(), end_M.tolist(), strict=True)
    ]


def text_digest(texts: Iterable[str]) -> str:
    """Identify texts and their order."""
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
