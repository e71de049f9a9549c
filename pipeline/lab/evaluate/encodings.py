"""A retrieval set under one encoder: the record that says how, and the vectors with their cost.

    encoding = encoder settings + context (none, random, corpus) + titles in front of chunks? + overlapping
    chunks? + documents cut after so many tokens?

Two systems with the same encoding share one pass of the encoder. Titles in front and overlapping chunks are
what a RAG pipeline does: every chunk is encoded as a text of its own, title and line break first; its span
stays that of the chunk. Overlapping chunks begin every ``stride_tokens`` tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.corpus.tokenization import tokenize
from cairn.pipeline.encode.documents import DocumentEncoder, EncodedDocuments
from cairn.pipeline.encode.texts import first_tokens
from cairn.pipeline.lab.evaluate.contexts import corpus_context, random_context, tied_context
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.model.backbone_loader import load_backbone, token_projection_of
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.landmarks import chunk_spans, split_into_chunks
from cairn.pipeline.ragged import ranges
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float32, Int32, Int64, UInt8

ContextKind = Literal["none", "random", "tied", "corpus"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How a corpus is encoded; two equal ones are encoded once.

    ``context`` says whose the context is that the encoder's settings ask for, ``none`` where they ask for
    none. ``stride_tokens`` divides the encoder's landmark interval; None: chunks do not overlap.
    """

    encoder: EncoderConfig
    context: ContextKind = "none"
    has_titles: bool = False
    max_document_tokens: int | None = None
    stride_tokens: int | None = None

    def __post_init__(self) -> None:
        assert self.encoder.needs_context == (self.context != "none"), (
            "a context goes with settings that use it"
        )

    @property
    def has_pieces(self) -> bool:
        """Say whether every chunk is encoded as a text of its own."""
        return self.has_titles or self.stride_tokens is not None


def _no_codes() -> UInt8[np.ndarray, "0 0"]:
    return np.zeros((0, 0), np.uint8)


def _no_states() -> Float32[np.ndarray, "0 0"]:
    return np.zeros((0, 0), np.float32)


def _no_ids() -> Int32[np.ndarray, " 0"]:
    return np.zeros(0, np.int32)


def _no_offsets() -> Int64[np.ndarray, " 1"]:
    return np.zeros(1, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedSet:
    """Vectors of N documents, their M chunks and Q queries, L2-normalised; spans are characters of the text.

    With a token projection there are codes of chunks, of titles in each document's first chunk, and states of
    query tokens; without one they are empty. ``encode_seconds`` is the encoder's time for the documents,
    context included; ``tokens`` are those it read.
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
    chunk_codes: UInt8[np.ndarray, "P bytes"] = field(default_factory=_no_codes)
    chunk_code_offsets: Int64[np.ndarray, " P1"] = field(default_factory=_no_offsets)
    title_codes: UInt8[np.ndarray, "S bytes"] = field(default_factory=_no_codes)
    title_code_offsets: Int64[np.ndarray, " P1"] = field(default_factory=_no_offsets)
    query_states: Float32[np.ndarray, "q D"] = field(default_factory=_no_states)
    query_token_ids: Int32[np.ndarray, " q"] = field(default_factory=_no_ids)
    query_token_offsets: Int64[np.ndarray, " K1"] = field(default_factory=_no_offsets)

    @property
    def chunk_document(self) -> Int64[np.ndarray, " M"]:
        """Return the document each chunk belongs to."""
        return np.repeat(np.arange(len(self.chunk_offsets) - 1), np.diff(self.chunk_offsets))


def encode_set(
    judged: RetrievalSet, encoding: Encoding, context_config: ContextConfig, progress: ProgressListener
) -> EncodedSet:
    """Encode documents and queries of a set."""
    encoder, seconds = build_encoder(judged, encoding, context_config)
    return encode_queries(
        encoder, encode_documents(encoder, judged, encoding, progress, seconds), judged.queries
    )


def build_encoder(
    judged: RetrievalSet, encoding: Encoding, context_config: ContextConfig, backbone: Backbone | None = None
) -> tuple[DocumentEncoder, float]:
    """Return the encoder with its context, and the seconds the context took.

    ``backbone`` saves loading the encoding's own once more.
    """
    config = encoding.encoder
    backbone = backbone or load_backbone(config)
    started = time.monotonic()
    context = context_for(judged, encoding, context_config, backbone)
    projection = None if encoding.has_pieces else token_projection_of(config, backbone)
    return DocumentEncoder(config, context, backbone, projection), time.monotonic() - started


def encode_queries(encoder: DocumentEncoder, encoded: EncodedSet, queries: Sequence[str]) -> EncodedSet:
    """Return encoded documents with these queries."""
    started = time.monotonic()
    if encoder.token_projection is None:
        queries_QV = encoder.encode_queries(queries)
        return replace(encoded, query_vectors_QV=queries_QV, query_seconds=time.monotonic() - started)
    queries_QV, tokens = encoder.encode_query_tokens(queries)
    return replace(
        encoded,
        query_vectors_QV=queries_QV,
        query_seconds=time.monotonic() - started,
        query_states=np.concatenate([each.states_TD for each in tokens]),
        query_token_ids=np.concatenate([each.ids_T for each in tokens]),
        query_token_offsets=np.cumsum([0, *(len(each.ids_T) for each in tokens)]),
    )


def encode_documents(
    encoder: DocumentEncoder,
    judged: RetrievalSet,
    encoding: Encoding,
    progress: ProgressListener,
    context_seconds: float = 0.0,
) -> EncodedSet:
    """Encode the documents of a set, without queries yet."""
    started = time.monotonic()
    meter = _Meter(progress)
    texts = (
        judged.texts
        if encoding.max_document_tokens is None
        else first_tokens(encoder.backbone.tokenizer, judged.texts, encoding.max_document_tokens)
    )
    codes: dict[str, Any] = {}
    if encoding.has_pieces:
        document_NV, chunk_MV, offsets, start, end = _encode_pieces(
            encoder, encoding, judged.titles, texts, meter.add
        )
    else:
        encoded = encoder.encode(texts, meter.add, titles=judged.titles)
        document_NV, chunk_MV = encoded.document_vectors_NV, encoded.chunk_vectors_MV
        offsets, start, end = encoded.chunk_offsets, encoded.start_char, encoded.end_char
        codes = _codes(encoded)
    return EncodedSet(
        document_vectors_NV=document_NV,
        chunk_vectors_MV=chunk_MV,
        query_vectors_QV=np.zeros((0, document_NV.shape[1]), np.float32),
        chunk_offsets=offsets,
        start_char=start,
        end_char=end,
        tokens=meter.tokens,
        encode_seconds=context_seconds + time.monotonic() - started,
        query_seconds=0.0,
        **codes,
    )


def _codes(encoded: EncodedDocuments) -> dict[str, Any]:
    """Return the codes of an encoding with a token projection, nothing without."""
    chunks, titles = encoded.chunk_tokens, encoded.title_tokens
    if chunks is None or titles is None:
        return {}
    owner_M = np.full(int(encoded.chunk_offsets[-1]), -1)
    owner_M[encoded.chunk_offsets[:-1]] = np.arange(len(encoded.chunk_offsets) - 1)
    titles = titles.take(owner_M)
    return {
        "chunk_codes": chunks.rows,
        "chunk_code_offsets": chunks.offsets,
        "title_codes": titles.rows,
        "title_code_offsets": titles.offsets,
    }


class _Meter:
    def __init__(self, progress: ProgressListener) -> None:
        self.tokens = 0
        self._progress = progress

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self._progress("encode", self.tokens, None, "tokens")


def context_for(
    judged: RetrievalSet, encoding: Encoding, context_config: ContextConfig, backbone: Backbone
) -> ContextSet | None:
    """Return the context that an encoding asks for, drawn for this set."""
    if encoding.context == "none":
        return None
    make = {"random": random_context, "tied": tied_context, "corpus": corpus_context}[encoding.context]
    return make(judged, context_config, backbone, encoding.encoder)


def piece_texts(
    titles: Sequence[str] | None,
    texts: Sequence[str],
    document_M: Int64[np.ndarray, " M"],
    start_M: Int64[np.ndarray, " M"],
    end_M: Int64[np.ndarray, " M"],
) -> list[str]:
    """Return the text of every chunk, with ``titles`` its document's title and a line break first."""
    pieces: list[str] = []
    for number, start, end in zip(document_M.tolist(), start_M.tolist(), end_M.tolist(), strict=True):
        document = int(number)
        title = titles[document] if titles is not None else ""
        piece = texts[document][start:end]
        pieces.append(f"{title}\n{piece}" if title else piece)
    return pieces


def sliding_windows(
    chunk_offsets: Int64[np.ndarray, " N1"], size: int
) -> tuple[Int64[np.ndarray, " W"], Int64[np.ndarray, " W"], Int64[np.ndarray, " W"]]:
    """Return document, first and end chunk of every window of ``size`` neighbouring chunks.

    Windows slide by one chunk; a document with fewer chunks is one window.
    """
    num_chunks_N = np.diff(chunk_offsets)
    num_windows_N = np.maximum(num_chunks_N - size + 1, 1)
    document_W = np.repeat(np.arange(len(num_chunks_N)), num_windows_N)
    first_W = ranges(chunk_offsets[:-1], num_windows_N)
    return document_W, first_W, first_W + np.minimum(size, num_chunks_N)[document_W]


def _encode_pieces(
    encoder: DocumentEncoder,
    encoding: Encoding,
    titles: Sequence[str],
    texts: Sequence[str],
    on_tokens: Callable[[int], None],
) -> tuple[
    Float32[np.ndarray, "N V"],
    Float32[np.ndarray, "M V"],
    Int64[np.ndarray, " N1"],
    Int64[np.ndarray, " M"],
    Int64[np.ndarray, " M"],
]:
    interval = encoder.config.landmark_interval
    stride = encoding.stride_tokens or interval
    tokens = tokenize(encoder.backbone.tokenizer, texts)
    chunks = split_into_chunks(tokens.breaks, tokens.text_offsets, stride)
    start, end = chunk_spans(chunks, tokens.start_char, np.fromiter(map(len, texts), np.int64, len(texts)))
    document, first_chunk, end_chunk = sliding_windows(chunks.chunk_offsets, interval // stride)
    start, end = start[first_chunk], end[end_chunk - 1]
    pieces = piece_texts(titles if encoding.has_titles else None, texts, document, start, end)
    offsets = np.searchsorted(document, np.arange(len(texts) + 1))
    # Room for the longest title a row can hold; a piece that is longer still becomes the mean of two rows.
    room = min(encoder.config.window_tokens, encoder.backbone.max_positions) - 2
    chunk_MV = (
        DocumentEncoder(replace(encoder.config, landmark_interval=room), None, encoder.backbone)
        .encode(pieces, on_tokens)
        .document_vectors_NV
    )
    sums_NV = np.add.reduceat(chunk_MV, offsets[:-1], axis=0)
    norms_N1 = np.linalg.norm(sums_NV, axis=1, keepdims=True)
    document_NV = sums_NV / np.maximum(norms_N1, np.finfo(np.float32).tiny)
    return document_NV, chunk_MV, offsets, start, end
