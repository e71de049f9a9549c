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
transformer's.

What is kept of chunks' own tokens while they pass through the transformer stands in chunk order, too: the
codes of a codebook for documents, unit states for queries.

    T tokens    M chunks    D model dim
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import regex
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.cluster.sampling import hash_order
from cairn.pipeline.config import DEFAULT_MODEL, LINE_TOKENS, MACHINE_SETTINGS, EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.describe import Describer, described_by
from cairn.pipeline.encode.encoder_fit import prefixes_of, require_fit, usable_context
from cairn.pipeline.encode.endpoint_requests import CLOSE_SECONDS, Patience
from cairn.pipeline.encode.sentences import rank_sentences, rank_starts
from cairn.pipeline.encode.structure import rank_structure
from cairn.pipeline.encode.tokenization import (
    WORD_START,
    Prefix,
    TokenizedTexts,
    tokenize,
    tokenize_after,
)
from cairn.pipeline.errors import ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import load_backbone, token_projection_of
from cairn.pipeline.model.context_encoder import encoded_head
from cairn.pipeline.model.document_encoder import embed_chunks, embed_windows, first_dims, one_torch_thread
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.folders.model_defaults import encoder_config, query_settings
from cairn.pipeline.model.landmark_mixer import mixer_of
from cairn.pipeline.model.landmarks import (
    INTRODUCED_START,
    SENTENCE_START,
    Chunks,
    chunk_spans,
    lay_out,
    split_into_chunks,
)
from cairn.pipeline.model.late_backbone import LateBackbone
from cairn.pipeline.model.latent_attention import latent_attention_of
from cairn.pipeline.poolings import pooling_rule
from cairn.pipeline.ragged import ranges
from cairn.pipeline.token_vectors.codebook import LEAST_STATES, TokenCodebook, TokenCoder, token_idf
from cairn.pipeline.types import FAR, QueryTokens
from jaxtyping import Bool, Float, Float32, Int32, Int64
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

QUERY_ROWS: Final = 32
"""Rows of late-interaction queries that are encoded at once."""

SMALL_CHARACTERS: Final = 1_000
"""Queries of so many characters together are encoded on one thread."""


Rewrite = Callable[[Float[torch.Tensor, "T D"]], np.ndarray]
"""From states of tokens to the row that is kept of each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenRows:
    """Rows of groups laid end to end; group ``i`` owns ``offsets[i]:offsets[i + 1]``."""

    rows: np.ndarray
    offsets: Int64[np.ndarray, " n1"]

    def take(self, groups: Int64[np.ndarray, " n"]) -> TokenRows:
        """Return the rows of some groups, in their order; a group of -1 has none."""
        sizes = np.where(groups < 0, 0, np.diff(self.offsets, append=self.offsets[-1])[groups])
        rows = self.rows[ranges(np.where(groups < 0, 0, self.offsets[groups]), sizes)]
        return TokenRows(rows=rows, offsets=np.concatenate([[0], np.cumsum(sizes)]))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedDocuments:
    """Vectors of N documents and their M chunks, in document order, L2-normalised.

    Document ``i`` owns chunks ``chunk_offsets[i]:chunk_offsets[i + 1]``. ``num_tokens`` counts a text's own
    tokens. Spans are Python character offsets, contiguous from 0 to the text's length. With a token
    codebook ``chunk_tokens`` are the codes of each chunk's tokens, ``title_tokens`` those of each title.
    ``lines`` describe chunks where the settings ask for it, "" where one has none.
    """

    document_vectors_NV: Float32[np.ndarray, "N V"]
    num_tokens: Int32[np.ndarray, " N"]
    chunk_offsets: Int64[np.ndarray, " N1"]
    start_char: Int64[np.ndarray, " M"]
    end_char: Int64[np.ndarray, " M"]
    chunk_vectors_MV: Float32[np.ndarray, "M V"]
    chunk_tokens: TokenRows | None = None
    title_tokens: TokenRows | None = None
    lines: Sequence[str] | None = None


class DocumentEncoder:
    """The second stage with its settings; ``fingerprint`` names the space its vectors lie in."""

    def __init__(
        self,
        config: EncoderConfig,
        context: ContextSet | None = None,
        backbone: Backbone | None = None,
        token_codebook: TokenCoder | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.config = config
        self._describer = Describer.of(config, patience)
        self.backbone = load_backbone(config) if backbone is None else backbone
        self.vector_dim = require_fit(config, self.backbone)
        self.token_codebook = token_codebook
        self._document_prefix, self._query_prefix = prefixes_of(config, self.backbone)
        is_latent = pooling_rule(config.pooling).needs_latent_attention
        self._token_head = latent_attention_of(self.backbone) if is_latent else None
        self._mixer = mixer_of(self.backbone)
        self._asking = self._encoder_of_queries()
        context_CD = usable_context(config, context, self.backbone)
        # The context is read by the transformer, or mixed in behind it.
        self._context_CD = context_CD if self._mixer is None else None
        self._mixed_context_CD = None if self._mixer is None else context_CD
        self.fingerprint = fingerprint(
            kind="encoder",
            format=ENCODER_FORMAT_VERSION,
            weights=self.backbone.weights_fingerprint,
            context=context.fingerprint if config.use_context and context is not None else None,
            **hashed_settings(config),
            **({"landmark_mixer": MIXING_VERSION} if self._mixer else {}),
            **({} if self._asking is None else {"queries": self._asking.fingerprint}),
        )

    def _encoder_of_queries(self) -> DocumentEncoder | None:
        """Return the encoder of queries alone, None where the documents' model reads them."""
        asked = None if self.backbone.of_queries is None else query_settings(self.config)
        if asked is None:
            return None
        asking = DocumentEncoder(asked, None, self.backbone.of_queries)
        if asking.vector_dim != self.vector_dim:
            raise ModelError(
                "the models of queries and of documents must have vectors of one width, got "
                f"{asking.vector_dim:,} and {self.vector_dim:,}; fetch the model again"
            )
        return asking

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own."""
        return self.backbone.tokenizer

    outage: None = None
    """A model in this process is always there."""

    @property
    def reads_titles(self) -> bool:
        """Say whether a document's title moves its vectors."""
        return self._mixer is not None or self.config.title_tokens > 0 or self._describer is not None

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
        tokens = lines = None
        if self._describer is not None:
            tokens = tokenize_after(self._document_prefix, self.backbone.tokenizer, texts)
            chunks = cut_into_chunks(self.config, tokens, texts)
            _, start_char, end_char = shown_chunks(chunks, tokens, texts)
            lines = self._describer.lines(texts, titles, chunks.chunk_offsets, start_char, end_char)
        encoded = self._encode(
            texts,
            self._document_prefix,
            self.config.temperature,
            on_tokens,
            "document",
            codes_by(self.token_codebook),
            tokens,
            titles=titles,
            lines=lines,
        )
        title_ND = title_tokens = None
        if titles is not None and (self._mixer is not None or self.token_codebook is not None):
            title_ND, title_tokens = self._encode_titles(titles)
        encoded = replace(encoded, title_tokens=title_tokens, lines=lines)
        if self._mixer is None:
            return encoded
        mixed_MD = self._mixer.mix_documents(
            encoded.chunk_vectors_MV, encoded.chunk_offsets, title_ND, self._mixed_context_CD
        )
        chunk_vectors_MV = first_dims(mixed_MD, self.vector_dim)
        documents_NV = document_vectors(chunk_vectors_MV, encoded.chunk_offsets, "document")
        return replace(encoded, chunk_vectors_MV=chunk_vectors_MV, document_vectors_NV=documents_NV)

    def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "Q V"]:
        """Encode texts as documents are, but for the queries' prefix, temperature and model."""
        if self._asking is not None:
            return self._asking.encode_queries(texts)
        if isinstance(self.backbone, LateBackbone):
            return self.encode_query_tokens(texts)[0]
        return self._query_vectors(self._encode_queries(texts, None))

    def encode_query_tokens(
        self, texts: Sequence[str]
    ) -> tuple[Float32[np.ndarray, "Q V"], list[QueryTokens]]:
        """Encode queries, and return the states of their words' tokens from the same pass, too.

        None where another model reads queries: they compare with no document's tokens.
        """
        if self._asking is not None:
            return self.encode_queries(texts), [QueryTokens.none()] * len(texts)
        tokens = tokenize_after(self._query_prefix, self.backbone.tokenizer, texts)
        if isinstance(self.backbone, LateBackbone):
            return self._late_queries(self.backbone, tokens)
        encoded = self._encode_queries(texts, unit_states, tokens)
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

    def keep_paid(self, path: Path | None) -> None:
        """Keep every line that is asked for in a file, and ask for none that it holds; None ends that."""
        if self._describer is not None:
            self._describer.keep_paid(path)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Keep the lines that are answered within so many seconds, and close connections and files."""
        if self._describer is not None:
            self._describer.close(seconds)

    def _late_queries(
        self, backbone: LateBackbone, tokens: TokenizedTexts
    ) -> tuple[Float32[np.ndarray, "Q V"], list[QueryTokens]]:
        """Encode queries as a late-interaction model reads them: all tokens of a row have a vector."""
        split = partial(np.split, indices_or_sections=tokens.text_offsets[1:-1])
        rows, first = backbone.query_rows(self._query_prefix.ids.tolist(), split(tokens.ids))
        found: list[QueryTokens] = []
        for start in range(0, len(rows), QUERY_ROWS):
            some = rows[start : start + QUERY_ROWS]
            for row, states_TD in zip(some, backbone.query_vectors(some), strict=True):
                ids_T = np.full(len(states_TD), backbone.expansion_id, np.int32)
                ids_T[: len(row)] = row
                nowhere_T = np.full(len(states_TD), -1, np.int64)
                found.append(
                    QueryTokens(
                        states_TD=states_TD, ids_T=ids_T, start_char=nowhere_T, end_char=nowhere_T.copy()
                    )
                )
        spans = zip(rows, found, split(tokens.start_char), split(tokens.end_char), strict=True)
        for row, query, starts, ends in spans:
            own = slice(first, len(row) - 1)
            query.start_char[own] = starts[: len(row) - 1 - first]
            query.end_char[own] = ends[: len(row) - 1 - first]
        means_QD = np.stack([query.states_TD.mean(axis=0) for query in found])
        return first_dims(means_QD, self.vector_dim), found

    def token_states(self, texts: Sequence[str]) -> Float32[np.ndarray, "T D"]:
        """Return the unit states of all tokens of documents."""
        encoded = self._encode(
            texts, self._document_prefix, self.config.temperature, None, "document", unit_states
        )
        assert encoded.chunk_tokens is not None, "states were asked for"
        return encoded.chunk_tokens.rows

    def _encode_queries(
        self, texts: Sequence[str], rewrite: Rewrite | None, tokens: TokenizedTexts | None = None
    ) -> EncodedDocuments:
        own = self.config.query_temperature
        temperature = self.config.temperature if own is None else own
        is_small = sum(map(len, texts)) <= SMALL_CHARACTERS
        with one_torch_thread() if is_small else nullcontext():
            return self._encode(texts, self._query_prefix, temperature, None, "query", rewrite, tokens)

    def _query_vectors(self, encoded: EncodedDocuments) -> Float32[np.ndarray, "Q V"]:
        vectors_QV = encoded.document_vectors_NV
        if self._mixer is not None:
            mixed_QD = self._mixer.mix_queries(vectors_QV, self._mixed_context_CD)
            vectors_QV = first_dims(mixed_QD, self.vector_dim)
        return vectors_QV

    def token_codes(
        self,
        encoded: EncodedDocuments,
        texts: Sequence[str],
        titles: Sequence[str | None] | None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> EncodedDocuments:
        """Return documents that another encoder encoded, with token codes by this one."""
        owners = np.repeat(np.arange(len(texts)), np.diff(encoded.chunk_offsets)).tolist()
        spans = zip(owners, encoded.start_char.tolist(), encoded.end_char.tolist(), strict=True)
        chunks = [texts[owner][start:end] for owner, start, end in spans]
        of_titles = titles or [None] * len(texts)
        _, chunk_tokens = self._encode_titles(chunks, on_tokens)
        _, title_tokens = self._encode_titles(of_titles, on_tokens)
        return replace(encoded, chunk_tokens=chunk_tokens, title_tokens=title_tokens)

    def _encode_titles(
        self, titles: Sequence[str | None], on_tokens: Callable[[int], None] | None = None
    ) -> tuple[Float32[np.ndarray, "N D"], TokenRows | None]:
        """Embed titles, each different one once, zeros for a blank one; return their tokens' codes, too."""
        different = dict.fromkeys(title for title in titles if title and title.strip())
        known = {title: index for index, title in enumerate(different)}
        no_prefix, temperature = Prefix.of("", self.backbone.tokenizer), self.config.temperature
        encoded = self._encode(
            list(known), no_prefix, temperature, on_tokens, "title", codes_by(self.token_codebook)
        )
        place_N = np.array([known.get(title or "", -1) for title in titles], np.int64)
        vectors_ND = np.zeros((len(titles), encoded.document_vectors_NV.shape[1]), np.float32)
        vectors_ND[place_N >= 0] = encoded.document_vectors_NV[place_N[place_N >= 0]]
        if encoded.chunk_tokens is None:
            return vectors_ND, None
        of_titles = joined_codes(encoded.chunk_tokens, encoded.chunk_offsets, encoded.start_char)
        return vectors_ND, of_titles.take(place_N)

    def _head_ids(
        self,
        titles: Sequence[str | None] | None,
        lines: Sequence[str] | None,
        chunk_offsets: Int64[np.ndarray, " N1"],
    ) -> list[Int32[np.ndarray, " _"]] | None:
        """Return what stands at the head of each document's rows, of each chunk's where there are lines."""
        most, heads = self.config.title_tokens, None
        if titles is not None and most:
            heads = self._first_ids([(title or "").strip() for title in titles], most)
        if lines is None:
            return heads
        own = self._first_ids(lines, LINE_TOKENS)
        if heads is None:
            return own
        owners = np.repeat(np.arange(len(heads)), np.diff(chunk_offsets)).tolist()
        return [np.concatenate([heads[owner], ids]) for owner, ids in zip(owners, own, strict=True)]

    def _first_ids(self, texts: Sequence[str], most: int) -> list[Int32[np.ndarray, " _"]]:
        tokens = tokenize(self.backbone.tokenizer, texts)
        return [ids[:most] for ids in np.split(tokens.ids, tokens.text_offsets[1:-1])]

    def _encode(
        self,
        texts: Sequence[str],
        prefix: Prefix,
        temperature: float,
        on_tokens: Callable[[int], None] | None,
        what: str,
        rewrite: Rewrite | None,
        tokens: TokenizedTexts | None = None,
        titles: Sequence[str | None] | None = None,
        lines: Sequence[str] | None = None,
    ) -> EncodedDocuments:
        """Encode texts, which may be tokenised already, without what a mixer does: it needs all dims."""
        config = self.config
        if tokens is None:
            tokens = tokenize_after(prefix, self.backbone.tokenizer, texts)
        chunks = cut_into_chunks(config, tokens, texts)
        if what == "query":  # whose chunks are shown to no one
            lengths_Q = np.fromiter(map(len, texts), np.int64, len(texts))
            shown, (start_char, end_char) = chunks, chunk_spans(chunks, tokens.start_char, lengths_Q)
        else:
            shown, start_char, end_char = shown_chunks(chunks, tokens, texts)
        start_T = tokens.start_char
        chunk_tokens = np.diff(chunks.token_offsets)

        def report(finished: Int64[np.ndarray, " m"]) -> None:
            if on_tokens is not None:
                on_tokens(int(chunk_tokens[finished].sum()))

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
            titles=self._head_ids(titles, lines, chunks.chunk_offsets),
            are_of_chunks=lines is not None,
        )
        keeper = None
        if rewrite is not None:
            keeper = TokenKeeper(chunk_tokens, rewrite, self.backbone.model_dim)
        if config.document_context:
            text_M = np.repeat(np.arange(len(texts)), np.diff(chunks.chunk_offsets))
            embed = partial(embed_windows, text_M=text_M, most=config.document_context)
        else:
            embed = partial(embed_chunks, context_CD=self._context_CD)
        embeddings_MD = embed(
            self.backbone,
            rows,
            batch_tokens=config.batch_tokens,
            temperature=temperature,
            token_head=self._token_head,
            on_chunks=report,
            keep_own=None if keeper is None else keeper.keep,
        )
        chunk_vectors_MV = first_dims(
            embeddings_MD, self.vector_dim if self._mixer is None else self.backbone.embedding_dim
        )
        _require_finite(chunk_vectors_MV, chunks.chunk_offsets, what)
        # Tokens are judged with the text that is shown.
        kept = None if keeper is None else replace(keeper.finish(), offsets=shown.token_offsets)
        if kept is not None and isinstance(self.backbone, LateBackbone) and len(self.backbone.skipped_ids):
            is_kept_T = ~np.isin(tokens.ids, self.backbone.skipped_ids)
            kept, start_T = kept_where(kept, is_kept_T), start_T[is_kept_T]
        if kept is not None and kept.rows.dtype == np.uint8:
            kept = with_steps(kept, start_T, start_char)
        return EncodedDocuments(
            document_vectors_NV=document_vectors(chunk_vectors_MV, chunks.chunk_offsets, what),
            num_tokens=np.diff(tokens.text_offsets).astype(np.int32),
            chunk_offsets=chunks.chunk_offsets,
            start_char=start_char,
            end_char=end_char,
            chunk_vectors_MV=chunk_vectors_MV,
            chunk_tokens=kept,
        )


def cut_into_chunks(config: EncoderConfig, tokens: TokenizedTexts, texts: Sequence[str]) -> Chunks:
    """Cut tokenised texts as the settings ask: what vectors stand for."""
    if config.landmarks == "sentence":
        rank_sentences(tokens, texts)
    elif config.landmarks == "structure":
        rank_structure(tokens, texts)
    interval, whole = config.landmark_interval, config.whole_text_tokens
    interval_N = np.where(np.diff(tokens.text_offsets) <= whole, max(interval, whole), interval)
    return split_into_chunks(tokens.breaks, tokens.text_offsets, interval_N)


_LINE_BREAK: Final = regex.compile(r"\n\s*")
MAX_INDENT: Final = 200
"""Characters before a passage that may belong to its first line."""


def shown_chunks(
    chunks: Chunks, tokens: TokenizedTexts, texts: Sequence[str]
) -> tuple[Chunks, Int64[np.ndarray, " M"], Int64[np.ndarray, " M"]]:
    """Return the chunks that a search shows for those that vectors stand for, and their characters.

    A cut moves to the nearest place where a sentence, an item, a row or a block begins, by less than half the
    chunk on that side; else to where a line begins; else it stays. No cut moves to between a heading and what
    stands below it. It stays, too, where a chunk would show white space alone, which some tokenizers make
    tokens of. A line keeps its indentation.
    """
    is_cut_M1 = np.ones(len(chunks.token_offsets), bool)
    is_cut_M1[chunks.chunk_offsets] = False
    cuts = np.flatnonzero(is_cut_M1)
    token_offsets = chunks.token_offsets.copy()
    if len(cuts):
        ranked = replace(tokens, breaks=np.zeros_like(tokens.breaks))
        for index, text in enumerate(texts):
            lines = [match.end() for match in _LINE_BREAK.finditer(text)]
            rank_starts(ranked, index, np.array(lines, np.int64), WORD_START)
        rank_structure(ranked, texts)
        before, cut, after = (chunks.token_offsets[cuts + step] for step in (-1, 0, 1))
        for least in (WORD_START, SENTENCE_START):
            # Places beyond both ends are near to none.
            places = np.flatnonzero((ranked.breaks >= least) & (ranked.breaks != INTRODUCED_START))
            places = np.concatenate([[-len(tokens.ids)], places, [2 * len(tokens.ids)]])
            next_place = np.searchsorted(places, cut)
            left, right = places[next_place - 1], places[next_place]
            is_left, is_right = 2 * (cut - left) < cut - before, 2 * (right - cut) < after - cut
            is_left &= ~is_right | (cut - left <= right - cut)
            begins = np.where(is_left, left, right)
            is_near = is_left | is_right
            token_offsets[cuts[is_near]] = begins[is_near]
    lengths_N = np.fromiter(map(len, texts), np.int64, len(texts))
    owners = np.repeat(np.arange(len(texts)), np.diff(chunks.chunk_offsets)).tolist()
    while True:
        shown = replace(chunks, token_offsets=token_offsets)
        start_char, end_char = chunk_spans(shown, tokens.start_char, lengths_N)
        is_moved_M1 = token_offsets != chunks.token_offsets
        blank = [
            chunk
            for chunk in np.flatnonzero(is_moved_M1[:-1] | is_moved_M1[1:]).tolist()
            if not texts[owners[chunk]][start_char[chunk] : end_char[chunk]].strip()
        ]
        if not blank:
            break
        for place in (*blank, *(chunk + 1 for chunk in blank)):
            token_offsets[place] = chunks.token_offsets[place]
    for chunk in np.flatnonzero(start_char).tolist():
        start = start_char[chunk]
        before = texts[owners[chunk]][max(0, start - MAX_INDENT) : start]
        if (kept := before.rstrip(" \t")).endswith("\n"):
            start_char[chunk] = end_char[chunk - 1] = start - len(before) + len(kept)
    return shown, start_char, end_char


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


def document_vectors(
    chunk_vectors_MV: Float32[np.ndarray, "M V"], chunk_offsets: Int64[np.ndarray, " N1"], what: str
) -> Float32[np.ndarray, "N V"]:
    """Return the normalised mean of each text's chunks; a text of one chunk has its vector."""
    if len(chunk_offsets) == 1:
        return np.zeros((0, chunk_vectors_MV.shape[1]), np.float32)
    sums_NV = np.add.reduceat(chunk_vectors_MV, chunk_offsets[:-1], axis=0)
    is_single = np.diff(chunk_offsets) == 1
    vectors_NV = np.where(is_single[:, None], sums_NV, first_dims(sums_NV, sums_NV.shape[1]))
    if not np.isfinite(vectors_NV).all():
        document = int(np.flatnonzero(~np.isfinite(vectors_NV).all(axis=1))[0])
        raise ModelError(
            f"a {what}'s vector must not be zero, got chunks that cancel out in {what} {document} of those "
            "encoded together; choose another landmark_interval"
        )
    return vectors_NV


def kept_where(codes: TokenRows, is_kept_T: Bool[np.ndarray, " T"]) -> TokenRows:
    """Return the rows of some tokens; groups may lose some or all of theirs."""
    ends_T1 = np.concatenate([[0], np.cumsum(is_kept_T)])
    return TokenRows(rows=codes.rows[is_kept_T], offsets=ends_T1[codes.offsets])


class TokenKeeper:
    """Gathers what ``rewrite`` keeps of each chunk's states, whatever the order of batches."""

    def __init__(self, num_M: Int64[np.ndarray, " M"], rewrite: Rewrite, model_dim: int) -> None:
        self._num_M = num_M
        self._rewrite = rewrite
        self._empty = rewrite(torch.zeros((0, model_dim)))
        self._parts = [self._empty] * len(num_M)

    def keep(self, chunk_m: Int64[np.ndarray, " m"], own_TD: Float[torch.Tensor, "T D"]) -> None:
        """Take the states of some chunks, one after another."""
        parts = np.split(self._rewrite(own_TD), np.cumsum(self._num_M[chunk_m])[:-1])
        for chunk, part in zip(chunk_m.tolist(), parts, strict=True):
            self._parts[chunk] = part

    def finish(self) -> TokenRows:
        """Return the rows of all chunks, in their order."""
        return TokenRows(
            rows=np.concatenate([self._empty, *self._parts]),
            offsets=np.concatenate([[0], np.cumsum(self._num_M, dtype=np.int64)]),
        )


def codes_by(codebook: TokenCoder | None) -> Rewrite | None:
    """Return what keeps the codes of a codebook, None without one."""
    return None if codebook is None else lambda states_TD: codebook.encode(unit_states(states_TD))


def unit_states(own_TD: Float[torch.Tensor, "T D"]) -> Float32[np.ndarray, "T D"]:
    """Keep unit states in float32."""
    return F.normalize(own_TD.float(), dim=1).cpu().numpy()


def with_steps(
    codes: TokenRows, start_char_T: Int64[np.ndarray, " T"], chunk_start_M: Int64[np.ndarray, " M"]
) -> TokenRows:
    """Add a byte to each row: by how many characters its token begins behind the one before.

    The first of a chunk counts from the chunk's start. :data:`FAR` characters or more are FAR.
    """
    before_T = np.concatenate([[0], start_char_T[:-1]]) if len(start_char_T) else start_char_T
    is_filled_M = np.diff(codes.offsets) > 0
    before_T[codes.offsets[:-1][is_filled_M]] = chunk_start_M[is_filled_M]
    steps_T = np.clip(start_char_T - before_T, 0, FAR).astype(np.uint8)
    return replace(codes, rows=np.concatenate([codes.rows, steps_T[:, None]], axis=1))


def joined_codes(
    codes: TokenRows, text_offsets: Int64[np.ndarray, " N1"], start_char_M: Int64[np.ndarray, " M"]
) -> TokenRows:
    """Return codes of chunks as those of their texts: text ``i`` has chunks ``text_offsets[i]`` to the next.

    A later chunk's first step counts from the token before it, not from the chunk's start.
    """
    rows = codes.rows.copy()
    steps_M1 = np.concatenate([[0], np.cumsum(rows[:, -1], dtype=np.int64)])[codes.offsets]
    last_char_M = start_char_M + np.diff(steps_M1)
    is_later_M = np.diff(codes.offsets) > 0
    is_later_M[text_offsets[:-1]] = False
    later = np.flatnonzero(is_later_M)
    first_tokens = codes.offsets[later]
    steps = rows[first_tokens, -1] + start_char_M[later] - last_char_M[later - 1]
    rows[first_tokens, -1] = np.clip(steps, 0, FAR)
    return TokenRows(rows=rows, offsets=codes.offsets[text_offsets])


def hashed_settings(config: EncoderConfig) -> dict[str, Any]:
    """Return the settings that move vectors; :attr:`DocumentEncoder.fingerprint` has the context's own."""
    default = type(config)()
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    return {
        _HASHED_AS.get(name, name): float(value) if name == "temperature" else value
        for name, value in values.items()
        if name not in MACHINE_SETTINGS
        and name != "use_context"
        and (name in _ALWAYS_HASHED or value != getattr(default, name))
    } | described_by(config)


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


def first_tokens(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> list[str]:
    """Cut every text after its first ``max_tokens`` tokens."""
    heads = [encoded_head(tokenizer, text, max_tokens) for text in texts]
    return [
        text if len(head.ids) < max_tokens else text[: head.offsets[max_tokens - 1][1]]
        for text, head in zip(texts, heads, strict=True)
    ]


TOKEN_READER: Final = DEFAULT_MODEL
"""Reads tokens for an encoder that shows no states of them."""


def load_token_reader(config: EncoderConfig, codebook: TokenCoder | None = None) -> DocumentEncoder:
    """Load :data:`TOKEN_READER` for the chunks and queries of another encoder, whose settings these are."""
    own = encoder_config({"model": TOKEN_READER, "token_bytes": config.token_bytes, "use_context": False})
    return DocumentEncoder(own, token_codebook=codebook)


class TokenReader:
    """Reads tokens beside an encoder that shows no states of them, where its settings ask for that."""

    def __init__(self, config: EncoderConfig, codebook: TokenCoder | None) -> None:
        self._config, self._codebook = config, codebook

    @cached_property
    def _encoder(self) -> DocumentEncoder:
        return load_token_reader(self._config, self._codebook)

    @property
    def hashed(self) -> Mapping[str, str]:
        """What it adds to a fingerprint."""
        return {"tokens": self._encoder.backbone.weights_fingerprint} if self._config.token_bytes else {}

    def with_codes(
        self,
        encoded: EncodedDocuments,
        texts: Sequence[str],
        titles: Sequence[str | None] | None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> EncodedDocuments:
        """Return encoded documents with codes of their tokens; as they are where there is no codebook yet."""
        if self._codebook is None:
            return encoded
        return self._encoder.token_codes(encoded, texts, titles, on_tokens)

    def of_queries(self, texts: Sequence[str]) -> list[QueryTokens]:
        """Return the tokens of queries; none where those of documents are not kept."""
        if not self._config.token_bytes:
            return [QueryTokens.none()] * len(texts)
        return self._encoder.encode_query_tokens(texts)[1]


CODEBOOK_TOKENS: Final = 16_384
"""Tokens of the sample that a codebook is fitted to."""
IDF_TEXTS: Final = 8_192
"""Documents of the sample whose chunks are counted."""
UNSEEN_CHUNKS: Final = 64
"""Chunks without any word, counted along, so that a first handful of documents weighs no word as nothing."""


def fitted_codebook(
    documents: pa.Table, config: EncoderConfig, context: ContextSet | None, backbone: Backbone
) -> TokenCoder | None:
    """Return what codes the tokens of a collection; None where the settings ask for none.

    It is the projection that the model brings where its codes are small enough, else a codebook fitted to the
    first ``documents`` of a sample, which have ``doc_id`` and ``text``. Where they are few, random words of
    the vocabulary join them: what comes later is coded, too.
    """
    if not config.token_bytes:
        return None
    if not config.shows_states:
        reader = load_token_reader(config)
        config, context, backbone = reader.config, None, reader.backbone
    trained = token_projection_of(config, backbone)
    if trained is not None and trained.vector_bytes <= config.token_bytes:
        return trained
    texts: list[str] = documents.column("text").to_pylist()
    order = hash_order(documents.column("doc_id").to_pylist(), 0)
    texts = [texts[place] for place in order[:IDF_TEXTS].tolist()]
    tokenizer, interval = backbone.tokenizer, config.landmark_interval
    tokens = tokenize(tokenizer, texts)
    chunks = split_into_chunks(tokens.breaks, tokens.text_offsets, interval)
    vocabulary_size = tokenizer.get_vocab_size()
    weights_X = token_idf(tokens.ids, chunks.token_offsets, vocabulary_size, UNSEEN_CHUNKS)
    if isinstance(backbone, LateBackbone):
        # It was trained so that all tokens of a query count alike.
        weights_X = np.ones(vocabulary_size, np.float32)
    encoder = DocumentEncoder(config, context, backbone)
    share = max(interval, -(-CODEBOOK_TOKENS // len(texts)))
    heads = first_tokens(tokenizer, texts[: -(-CODEBOOK_TOKENS // share)], share)
    states_TD = encoder.token_states(heads)
    if len(states_TD) < LEAST_STATES:
        size = (-(-LEAST_STATES // interval), interval)
        random_ids = np.random.default_rng(0).integers(0, vocabulary_size, size).tolist()
        words = [tokenizer.decode(row, skip_special_tokens=True) or "a" for row in random_ids]
        states_TD = np.concatenate([states_TD, encoder.token_states(words)])
    return TokenCodebook.fit(states_TD, weights_X, config.token_bytes)
