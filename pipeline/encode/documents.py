"""Documents to vectors: the second stage applied to a shard of texts.

    texts ─▶ tokens ─▶ chunks ─▶ rows ─▶ M2 ─▶ chunk vectors ─▶ document vectors
                                          ▲
                                   context embeddings

All chunks of a shard are one pool of work, sorted by length, so short and long documents share batches. A
document's vector is the normalised mean of its chunks' vectors, each cut to the dimensions asked for and
normalised first. Queries go the same way with their own prefix. A vector that is not finite stops the shard
before anything is written.

Where the model has a landmark mixer, chunks are encoded each by itself and the mixer gives them their
document, its title and the context; where it has none, only ``text`` is encoded and the context is the
transformer's. Vectors are whitened last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import regex
from cairn.pipeline.config import MACHINE_SETTINGS, EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.context.whitening import Whitening
from cairn.pipeline.corpus.tokenization import TokenizedTexts
from cairn.pipeline.encode.encoder_fit import prefixes_of, require_fit, usable_context, whitening_of
from cairn.pipeline.encode.prefixes import Prefix, tokenize_after
from cairn.pipeline.encode.sentences import rank_sentences
from cairn.pipeline.encode.structure import rank_structure
from cairn.pipeline.encode.texts import first_tokens
from cairn.pipeline.encode.token_rows import TokenKeeper, TokenRows, joined_codes, keep_codes, keep_states
from cairn.pipeline.errors import ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.batching import one_torch_thread
from cairn.pipeline.model.document_encoder import embed_chunks, row_temperatures
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.landmark_mixer import mix_documents, mix_queries, mixer_of
from cairn.pipeline.model.landmark_reader import LandmarkReader
from cairn.pipeline.model.landmarks import (
    chunk_spans,
    lay_out,
    split_into_chunks,
)
from cairn.pipeline.model.latent_attention import latent_attention_of
from cairn.pipeline.model.pooling import first_dims
from cairn.pipeline.poolings import pooling_rule
from cairn.pipeline.token_vectors.projection import TokenProjection
from cairn.pipeline.types import QueryTokens
from jaxtyping import Float32, Int32, Int64
from tokenizers import Tokenizer

ENCODER_FORMAT_VERSION = 1
"""Raised when the same settings begin to give other vectors."""

MIXING_VERSION = 1
"""Raised when the same mixer begins to give other vectors."""

_ALWAYS_HASHED: Final = frozenset(
    {"pooling", "attention", "landmark_interval", "window_tokens", "window_overlap_tokens", "temperature"}
)
"""The settings of the first release. Others are hashed where they differ from their default."""
_HASHED_AS: Final = {"window_tokens": "max_window_tokens", "dims": "truncate_dim", "layers": "num_layers"}
"""Names in fingerprints, where the setting was renamed since."""

SMALL_CHARACTERS: Final = 1_000
"""Queries of so many characters together are encoded on one thread."""

_MakeKeeper = Callable[[Int64[np.ndarray, " M"]], TokenKeeper | None]
"""From the numbers of chunks' own tokens to what keeps something of them, None to keep nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedDocuments:
    """Vectors of N documents and their M chunks, in document order, L2-normalised.

    Document ``i`` owns chunks ``chunk_offsets[i]:chunk_offsets[i + 1]``. ``num_tokens`` counts a text's own
    tokens. Spans are Python character offsets, contiguous from 0 to the text's length. With a token
    projection ``chunk_tokens`` are the codes of each chunk's tokens, ``title_tokens`` those of each title.
    """

    document_vectors_NV: Float32[np.ndarray, "N V"]
    num_tokens: Int32[np.ndarray, " N"]
    chunk_offsets: Int64[np.ndarray, " N1"]
    start_char: Int64[np.ndarray, " M"]
    end_char: Int64[np.ndarray, " M"]
    chunk_vectors_MV: Float32[np.ndarray, "M V"]
    chunk_tokens: TokenRows | None = None
    title_tokens: TokenRows | None = None


class DocumentEncoder:
    """The second stage with its settings; ``fingerprint`` names the space its vectors lie in."""

    def __init__(
        self,
        config: EncoderConfig,
        context: ContextSet | None = None,
        backbone: Backbone | None = None,
        token_projection: TokenProjection | None = None,
    ) -> None:
        self.config = config
        self.backbone = load_backbone(config) if backbone is None else backbone
        self.vector_dim = require_fit(config, self.backbone)
        self.token_projection = token_projection
        self._document_prefix, self._query_prefix = prefixes_of(config, self.backbone)
        self._token_head = (
            latent_attention_of(self.backbone)
            if pooling_rule(config.pooling).needs_latent_attention
            else None
        )
        self._mixer = mixer_of(self.backbone)
        context_CD = usable_context(config, context, self.backbone)
        self._context_CD, self._mixed_context_CD = (
            (context_CD, None) if self._mixer is None else (None, context_CD)
        )
        self._whitening: Whitening | None = whitening_of(config, context, self.vector_dim)
        self._landmarks = (
            LandmarkReader(self.backbone, self._context_CD) if config.attention == "landmark" else None
        )
        self.fingerprint = fingerprint(
            kind="encoder",
            format=ENCODER_FORMAT_VERSION,
            weights=self.backbone.weights_fingerprint,
            context=context.fingerprint if config.needs_context and context is not None else None,
            **_hashed_settings(config),
            **({"landmark_gates": self._landmarks.fingerprint} if self._landmarks else {}),
            **({"landmark_mixer": MIXING_VERSION} if self._mixer else {}),
        )

    @property
    def reads_titles(self) -> bool:
        """Say whether a document's title moves its vectors."""
        return self._mixer is not None

    def encode(
        self,
        texts: Sequence[str],
        on_tokens: Callable[[int], None] | None = None,
        *,
        titles: Sequence[str | None] | None = None,
    ) -> EncodedDocuments:
        """Encode texts in the order given.

        ``on_tokens`` hears how many of their tokens each batch has finished, each token once. ``titles``, one
        a text, None or "" where it has none, are read where :attr:`reads_titles`.
        """
        encoded = self._encode(
            texts, self._document_prefix, *self._temperatures, on_tokens, "document", self._code_keeper
        )
        title_ND = title_tokens = None
        if titles is not None and (self._mixer is not None or self.token_projection is not None):
            title_ND, title_tokens = self._encode_titles(titles)
        encoded = replace(encoded, title_tokens=title_tokens)
        if self._mixer is None and self._whitening is None:
            return encoded
        chunk_vectors_MV = encoded.chunk_vectors_MV
        if self._mixer is not None:
            mixed_MD = mix_documents(
                self._mixer, chunk_vectors_MV, encoded.chunk_offsets, title_ND, self._mixed_context_CD
            )
            chunk_vectors_MV = first_dims(mixed_MD, self.vector_dim)
        if self._whitening is not None:
            chunk_vectors_MV = self._whitening.apply(chunk_vectors_MV)
        documents_NV = _document_vectors(chunk_vectors_MV, encoded.chunk_offsets, "document")
        return replace(encoded, chunk_vectors_MV=chunk_vectors_MV, document_vectors_NV=documents_NV)

    def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "Q V"]:
        """Encode texts as documents are, but for the queries' prefix and temperature.

        Returns the documents' vectors.
        """
        return self._query_vectors(self._encode_queries(texts, None))

    def encode_query_tokens(
        self, texts: Sequence[str]
    ) -> tuple[Float32[np.ndarray, "Q V"], list[QueryTokens]]:
        """Encode queries, and return the states of their words' tokens from the same pass, too."""
        tokens = tokenize_after(self._query_prefix, self.backbone.tokenizer, texts)
        encoded = self._encode_queries(texts, self._state_keeper, tokens)
        states = encoded.chunk_tokens
        assert states is not None, "states were asked for"
        own = word_tokens(tokens, self.backbone.tokenizer, texts)
        return self._query_vectors(encoded), [
            QueryTokens(
                states_TD=states.rows[places],
                ids_T=tokens.ids[places],
                start_char=tokens.start_char[places],
                end_char=tokens.end_char[places],
            )
            for places in own
        ]

    @property
    def _temperatures(self) -> tuple[float, Sequence[tuple[int, float]]]:
        return self.config.temperature, self.config.temperature_by_length

    def _encode_queries(
        self, texts: Sequence[str], keeper: _MakeKeeper | None, tokens: TokenizedTexts | None = None
    ) -> EncodedDocuments:
        own = self.config.query_temperature
        temperatures = self._temperatures if own is None else (own, ())
        is_small = sum(map(len, texts)) <= SMALL_CHARACTERS
        with one_torch_thread() if is_small else nullcontext():
            return self._encode(texts, self._query_prefix, *temperatures, None, "query", keeper, tokens)

    def _query_vectors(self, encoded: EncodedDocuments) -> Float32[np.ndarray, "Q V"]:
        vectors_QV = encoded.document_vectors_NV
        if self._mixer is not None:
            mixed_QD = mix_queries(self._mixer, vectors_QV, self._mixed_context_CD)
            vectors_QV = first_dims(mixed_QD, self.vector_dim)
        return vectors_QV if self._whitening is None else self._whitening.apply(vectors_QV)

    def _code_keeper(self, num_M: Int64[np.ndarray, " M"]) -> TokenKeeper | None:
        return None if self.token_projection is None else keep_codes(num_M, self.token_projection)

    def _state_keeper(self, num_M: Int64[np.ndarray, " M"]) -> TokenKeeper | None:
        return keep_states(num_M, self.backbone.model_dim)

    def _encode_titles(
        self, titles: Sequence[str | None]
    ) -> tuple[Float32[np.ndarray, "N D"], TokenRows | None]:
        """Embed titles as texts of their own, each different one once; return their tokens' codes, too.

        One that is missing or blank becomes zeros.
        """
        known = {
            title: index
            for index, title in enumerate(dict.fromkeys(title for title in titles if title and title.strip()))
        }
        no_prefix, temperature = Prefix.of("", self.backbone.tokenizer), self.config.temperature
        encoded = self._encode(list(known), no_prefix, temperature, (), None, "title", self._code_keeper)
        place_N = np.array([known.get(title or "", -1) for title in titles], np.int64)
        vectors_ND = np.zeros((len(titles), encoded.document_vectors_NV.shape[1]), np.float32)
        vectors_ND[place_N >= 0] = encoded.document_vectors_NV[place_N[place_N >= 0]]
        if encoded.chunk_tokens is None:
            return vectors_ND, None
        of_titles = joined_codes(encoded.chunk_tokens, encoded.chunk_offsets, encoded.start_char)
        return vectors_ND, of_titles.take(place_N)

    def _encode(
        self,
        texts: Sequence[str],
        prefix: Prefix,
        temperature: float,
        temperature_by_length: Sequence[tuple[int, float]],
        on_tokens: Callable[[int], None] | None,
        what: str,
        make_keeper: _MakeKeeper | None,
        tokens: TokenizedTexts | None = None,
    ) -> EncodedDocuments:
        """Encode texts through the transformer, without what a mixer does; a mixer needs all dimensions.

        ``tokens`` are the texts' own, where they were tokenised behind the prefix before.
        """
        if tokens is None:
            tokens = tokenize_after(prefix, self.backbone.tokenizer, texts)
        if self.config.landmarks == "sentence":
            rank_sentences(tokens, texts)
        elif self.config.landmarks == "structure":
            rank_structure(tokens, texts)
        interval, whole = self.config.landmark_interval, self.config.whole_text_tokens
        interval_N = np.where(np.diff(tokens.text_offsets) <= whole, max(interval, whole), interval)
        chunks = split_into_chunks(tokens.breaks, tokens.text_offsets, interval_N)
        start_char, end_char = chunk_spans(
            chunks, tokens.start_char, np.fromiter(map(len, texts), np.int64, len(texts))
        )
        chunk_tokens = np.diff(chunks.token_offsets)

        def report(finished: Int64[np.ndarray, " m"]) -> None:
            if on_tokens is not None:
                on_tokens(int(chunk_tokens[finished].sum()))

        config = self.config
        rows = lay_out(
            tokens.ids,
            chunks,
            attention=config.attention,
            pooling=config.pooling,
            cls_id=self.backbone.cls_id,
            landmark_id=self.backbone.landmark_id,
            prefix_ids=prefix.ids,
            pool_prefix=config.pool_prefix,
            max_window_tokens=config.window_tokens,
            overlap_tokens=config.window_overlap_tokens,
        )
        keeper = None if make_keeper is None else make_keeper(chunk_tokens)
        embeddings_MD = embed_chunks(
            self.backbone,
            rows,
            batch_tokens=self.config.batch_tokens,
            temperature=row_temperatures(rows.tokens_together, temperature, temperature_by_length),
            context_CD=self._context_CD,
            token_head=self._token_head,
            landmarks=self._landmarks,
            on_chunks=report,
            keep_own=None if keeper is None else keeper.keep,
        )
        chunk_vectors_MV = first_dims(
            embeddings_MD, self.vector_dim if self._mixer is None else self.backbone.embedding_dim
        )
        _require_finite(chunk_vectors_MV, chunks.chunk_offsets, what)
        return EncodedDocuments(
            document_vectors_NV=_document_vectors(chunk_vectors_MV, chunks.chunk_offsets, what),
            num_tokens=np.diff(tokens.text_offsets).astype(np.int32),
            chunk_offsets=chunks.chunk_offsets,
            start_char=start_char,
            end_char=end_char,
            chunk_vectors_MV=chunk_vectors_MV,
            chunk_tokens=None if keeper is None else keeper.finish(tokens.start_char, start_char),
        )


def _require_finite(
    chunk_vectors_MV: Float32[np.ndarray, "M V"], chunk_offsets: Int64[np.ndarray, " N1"], what: str
) -> None:
    bad = np.flatnonzero(~np.isfinite(chunk_vectors_MV).all(axis=1))
    if len(bad):
        document = int(np.searchsorted(chunk_offsets, bad[0], side="right")) - 1
        raise ModelError(
            "a chunk's vector must be finite and not zero, got one that is not for chunk "
            f"{int(bad[0] - chunk_offsets[document])} of "
            f"{what} {document} of those encoded together; check the model's weights, or try precision fp32"
        )


def _document_vectors(
    chunk_vectors_MV: Float32[np.ndarray, "M V"], chunk_offsets: Int64[np.ndarray, " N1"], what: str
) -> Float32[np.ndarray, "N V"]:
    if len(chunk_offsets) == 1:
        return np.zeros((0, chunk_vectors_MV.shape[1]), np.float32)
    sums_NV = np.add.reduceat(chunk_vectors_MV, chunk_offsets[:-1], axis=0)
    is_single = np.diff(chunk_offsets) == 1
    vectors_NV = np.where(is_single[:, None], sums_NV, first_dims(sums_NV, sums_NV.shape[1]))
    if not np.isfinite(vectors_NV).all():
        document = int(np.flatnonzero(~np.isfinite(vectors_NV).all(axis=1))[0])
        raise ModelError(
            f"a {what}'s vector must not be zero, got chunks that cancel out in {what} {document} of "
            "those encoded together; "
            "choose another landmark_interval"
        )
    return vectors_NV


def _hashed_settings(config: EncoderConfig) -> dict[str, Any]:
    """Return the settings that move vectors; :attr:`DocumentEncoder.fingerprint` has the context's own."""
    default = type(config)()
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    return {
        _HASHED_AS.get(name, name): float(value) if name == "temperature" else value
        for name, value in values.items()
        if name not in MACHINE_SETTINGS
        and name != "use_context"
        and (name in _ALWAYS_HASHED or value != getattr(default, name))
    }


_UNKNOWN: Final = ("[UNK]", "<unk>")
_OF_WORD: Final = regex.compile(r"[\p{Alphabetic}\p{N}]")


def word_tokens(
    tokens: TokenizedTexts, tokenizer: Tokenizer, texts: Sequence[str]
) -> list[Int64[np.ndarray, " T"]]:
    """Return the places of each text's tokens that hold a letter or digit and are known to the model."""
    unknown = {tokenizer.token_to_id(token) for token in _UNKNOWN}
    bounds = tokens.text_offsets.tolist()
    places: list[Int64[np.ndarray, " T"]] = []
    for text, first, end in zip(texts, bounds[:-1], bounds[1:], strict=True):
        spans = zip(tokens.start_char[first:end].tolist(), tokens.end_char[first:end].tolist(), strict=True)
        is_word = [_OF_WORD.search(text, *span) is not None for span in spans]
        is_known = [token not in unknown for token in tokens.ids[first:end].tolist()]
        places.append(first + np.flatnonzero(np.array(is_word, bool) & np.array(is_known, bool)))
    return places


def with_vectors(
    context: ContextSet, documents: pa.Table, config: EncoderConfig, backbone: Backbone
) -> ContextSet:
    """Return the context with one vector for each of its documents; as it is where nothing is whitened.

    ``documents`` has ``doc_id``, ``text`` and ``title`` of at least these. A document's vector is that of its
    first chunk, encoded as a document by itself, with its title and behind the context where the settings ask
    for it.
    """
    if not config.whitening:
        return context
    place = {doc_id: row for row, doc_id in enumerate(documents.column("doc_id").to_pylist())}
    own = documents.take(pa.array([place[doc_id] for doc_id in context.doc_ids]))
    encoder = DocumentEncoder(replace(config, whitening=0.0), context, backbone)
    heads = first_tokens(backbone.tokenizer, own.column("text").to_pylist(), config.longest_chunk_tokens)
    encoded = encoder.encode(heads, titles=own.column("title").to_pylist())
    return replace(context, vectors_CV=encoded.document_vectors_NV)
