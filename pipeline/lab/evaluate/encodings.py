"""A retrieval set under one encoder: the record that says how, and the vectors with their cost.

    encoding = encoder settings + context (none, random, corpus) + titles in front of chunks? + overlapping
    chunks? + documents cut after so many tokens?

Two systems with the same encoding share one pass of the encoder. Titles in front and overlapping chunks are
what a RAG pipeline does: every chunk is encoded as a text of its own, title and line break first; its span
stays that of the chunk. Overlapping chunks begin every ``stride_tokens`` tokens.
"""

from __future__ import annotations

import hashlib
import time
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from cairn.pipeline import durable
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.corpus.tokenization import tokenize
from cairn.pipeline.encode.documents import DocumentEncoder, EncodedDocuments
from cairn.pipeline.encode.texts import first_tokens
from cairn.pipeline.lab.evaluate.contexts import corpus_context, random_context, tied_context
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.manifest import fingerprint
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
    chunk_codes: UInt8[np.ndarray, "P bytes"] = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    chunk_code_offsets: Int64[np.ndarray, " P1"] = field(default_factory=lambda: np.zeros(1, np.int64))
    title_codes: UInt8[np.ndarray, "S bytes"] = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    title_code_offsets: Int64[np.ndarray, " P1"] = field(default_factory=lambda: np.zeros(1, np.int64))
    query_states: Float32[np.ndarray, "q D"] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    query_token_ids: Int32[np.ndarray, " q"] = field(default_factory=lambda: np.zeros(0, np.int32))
    query_token_offsets: Int64[np.ndarray, " K1"] = field(default_factory=lambda: np.zeros(1, np.int64))

    @property
    def chunk_document(self) -> Int64[np.ndarray, " M"]:
        """Return the document each chunk belongs to."""
        return np.repeat(np.arange(len(self.chunk_offsets) - 1), np.diff(self.chunk_offsets))


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
    tokens = 0

    def count(more: int) -> None:
        nonlocal tokens
        tokens += more
        progress("encode", tokens, None, "tokens")

    texts = judged.texts
    if encoding.max_document_tokens is not None:
        texts = first_tokens(encoder.backbone.tokenizer, texts, encoding.max_document_tokens)
    codes: dict[str, Any] = {}
    if encoding.has_pieces:
        pieces = cut_pieces(encoder.backbone, judged.titles, texts, encoding)
        # Room for the longest title a row can hold; a longer piece becomes the mean of two rows.
        room = min(encoder.config.window_tokens, encoder.backbone.max_positions) - 2
        config = replace(encoder.config, landmark_interval=room)
        chunk_MV = (
            DocumentEncoder(config, None, encoder.backbone).encode(pieces.texts, count).document_vectors_NV
        )
        sums_NV = np.add.reduceat(chunk_MV, pieces.offsets[:-1], axis=0)
        norms_N1 = np.linalg.norm(sums_NV, axis=1, keepdims=True)
        document_NV = sums_NV / np.maximum(norms_N1, np.finfo(np.float32).tiny)
        offsets, start, end = pieces.offsets, pieces.start_char, pieces.end_char
    else:
        encoded = encoder.encode(texts, count, titles=judged.titles)
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
        tokens=tokens,
        encode_seconds=context_seconds + time.monotonic() - started,
        query_seconds=0.0,
        **codes,
    )


def only_cut(judged: RetrievalSet, encoding: Encoding) -> EncodedSet:
    """Cut the documents of a set into pieces for BM25 alone: the vectors have no dimensions."""
    pieces = cut_pieces(load_backbone(encoding.encoder), judged.titles, judged.texts, encoding)
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


def context_for(
    judged: RetrievalSet, encoding: Encoding, context_config: ContextConfig, backbone: Backbone
) -> ContextSet | None:
    """Return the context that an encoding asks for, drawn for this set."""
    if encoding.context == "none":
        return None
    make = {"random": random_context, "tied": tied_context, "corpus": corpus_context}[encoding.context]
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


CACHE_FORMAT: Final = 2


def encode_set(
    judged: RetrievalSet,
    encoding: Encoding,
    encoder: DocumentEncoder,
    progress: ProgressListener,
    context_seconds: float = 0.0,
    cache: Path | None = None,
) -> EncodedSet:
    """Encode documents and queries of a set.

    ``cache`` is a folder that keeps encoded sets, one file each, named by everything that moves a vector in
    it. A long table that was killed goes on with what it had encoded, and a new way to rank costs no
    encoding. Times are kept with the vectors: they are those of the run that encoded. A file that cannot be
    read is encoded again; nothing is ever removed.
    """
    path = None if cache is None else _cache_file(cache, judged, encoding, encoder)
    kept = None if path is None else _read_encoded(path)
    if kept is not None:
        return kept
    encoded = encode_documents(encoder, judged, encoding, progress, context_seconds)
    encoded = encode_queries(encoder, encoded, judged.queries)
    if path is not None:
        with durable.storage_errors(f"writing {path.name} to the cache"):
            path.parent.mkdir(parents=True, exist_ok=True)
            arrays: dict[str, Any] = {
                field.name: np.asarray(getattr(encoded, field.name)) for field in fields(EncodedSet)
            }
            with durable.replacing(path) as temporary, temporary.open("wb") as stream:
                np.savez(stream, **arrays)
    return encoded


def _cache_file(folder: Path, judged: RetrievalSet, encoding: Encoding, encoder: DocumentEncoder) -> Path:
    key = fingerprint(
        format=CACHE_FORMAT,
        encoder=encoder.fingerprint,
        precision=encoding.encoder.precision,
        has_titles=encoding.has_titles,
        max_document_tokens=encoding.max_document_tokens,
        **({} if encoding.stride_tokens is None else {"stride_tokens": encoding.stride_tokens}),
        **({} if encoder.token_projection is None else {"late": encoder.token_projection.fingerprint}),
        texts=text_digest(judged.texts),
        titles=text_digest(judged.titles if encoding.has_titles or encoder.reads_titles else ()),
        queries=text_digest(judged.queries),
    )
    return folder / f"{key}.npz"


def _read_encoded(path: Path) -> EncodedSet | None:
    """Return what is kept, None where nothing whole is."""
    try:
        # The stream is ours: numpy leaves a damaged file open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            kept = {field.name: arrays[field.name] for field in fields(EncodedSet)}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return EncodedSet(**{name: array if array.ndim else array.item() for name, array in kept.items()})


def text_digest(texts: Iterable[str]) -> str:
    """Identify texts and their order."""
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
